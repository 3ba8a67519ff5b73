"""The names of a run in dashboards: from the flags, from W&B's environment variables, kept by a run that goes on."""

import json
from pathlib import Path

import pytest
from lives import IMAGES

from memsave_recipes.core.errors import InputError
from memsave_recipes.run import folder as run_folder
from memsave_recipes.tools.compare import compare, read_run
from memsave_recipes.training.arguments import RunArguments
from memsave_recipes.training.parsing import parse_arguments

RECIPE = "image_classification"
SHORT = (*IMAGES, "--max_steps", "2", "--save_every", "1")
NAMES = ("--project", "mine", "--run_name", "first try")
VARIABLES = ("WANDB_PROJECT", "WANDB_NAME")
AUTOMATIC = ["none", "float32", "cpu"]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def told(monkeypatch):
    """The project, the name and the tags that the trackers of each run are given."""
    given = []
    start_trackers = run_folder.start_trackers

    def start(accelerator, labels, **options):
        given.append((labels.project, labels.name, list(labels.tags)))
        start_trackers(accelerator, labels, **options)

    monkeypatch.setattr(run_folder, "start_trackers", start)
    return given


def test_without_flags_the_names_are_made(train, told):
    train(*SHORT)
    ((project, name, tags),) = told
    assert project == "memsave-image-classification"
    assert name.startswith("none-mbs")
    assert tags == AUTOMATIC


def test_flags_name_the_run_in_trackers_and_summary(train, told, tmp_path, capsys):
    train(*SHORT, *NAMES)
    assert told == [("mine", "first try", AUTOMATIC)]
    assert " first try " in capsys.readouterr().out
    assert compare([read_run(tmp_path / "run")]).rows[0].name == "first try"


def test_variables_of_wandb_name_it_where_the_flags_do_not(train, told, monkeypatch):
    for variable, value in zip(VARIABLES, ("theirs", "by variable"), strict=True):
        monkeypatch.setenv(variable, value)
    train(*SHORT, "--run_name", "by flag")
    assert told == [("theirs", "by flag", AUTOMATIC)]


def test_a_run_that_goes_on_keeps_its_names(train, told, monkeypatch, capsys, tmp_path):
    train(*SHORT, *NAMES)
    monkeypatch.setenv("WANDB_PROJECT", "another")
    train(*SHORT, "--resume")
    assert told[0] == told[1]
    assert "so another --project is left out" in capsys.readouterr().out
    assert json.loads(Path(tmp_path, "run", "config.json").read_text())["project"] == "mine"


def test_names_that_were_edited_by_hand_are_left_out(train, told, tmp_path):
    train(*SHORT, *NAMES)
    config, damage = tmp_path / "run" / "config.json", {"project": ["x"], "run_name": None}
    config.write_text(json.dumps(json.loads(config.read_text()) | damage))
    train(*SHORT, "--resume")
    assert told[1] == ("memsave-image-classification", "first try", AUTOMATIC)


@pytest.mark.parametrize(
    "flags",
    [
        ["--project", "a/b"],
        ["--project", "50%"],
        ["--project", "x" * 129],
        ["--run_name", "two\nlines"],
        ["--run_name", "x" * 129],
    ],
)
def test_names_that_wandb_would_not_take_are_refused(flags):
    with pytest.raises(InputError, match=f"^{flags[0]} "):
        parse_arguments(RunArguments, args=["--output_dir", "x", *flags])
