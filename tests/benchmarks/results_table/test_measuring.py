"""Works that are measured for the table: their flags are the recipes' own, and a finished run is not run again."""

import subprocess
from functools import partial
from pathlib import Path

import pytest
from lives import loaded

from memsave_recipes.training.parsing import parse_arguments

ROOT = Path(__file__).parents[3]


@pytest.fixture
def works(load):
    return load("result_rows.works")


def test_the_flags_are_those_of_the_recipe(works, tmp_path):
    for work in works.WORKS.values():
        path = ROOT / f"recipes/{work.recipe}.py"
        with loaded(work.recipe) as recipe:
            flags = recipe.Arguments
        for plan in work.plans:
            command = works.command_of(work, plan, tmp_path)
            (args,) = parse_arguments(flags, args=command[command.index(str(path)) + 1 :])
            assert args.output_dir == str(tmp_path)
        assert any("--activation_checkpointing none" in f"{work.flags} {flags}" for flags in work.plans.values())


def test_finished_runs_become_rows_and_are_not_run_again(
    main, works, make_run, checkpointed, write, tmp_path, monkeypatch
):
    launched = []

    def launch(command, **options):
        launched.append(folder := Path(command[-1]))
        make = make_run if folder.name == "plain" else partial(checkpointed, plan=folder.name)
        write(make(folder.name, device="cpu"), folder)

    monkeypatch.setattr(subprocess, "run", launch)
    monkeypatch.setattr(works, "ROOT", tmp_path)
    for _ in range(2):
        assert main(["run", "gpt2", "--to", str(tmp_path / "rows")]) == 0
    assert [folder.name for folder in launched] == ["plain", "full", "budget"]
    assert len(list((tmp_path / "rows").glob("*.json"))) == 3


def test_an_unknown_work_is_refused(main, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "gpt9"])
    assert ended.value.code == 2
    assert "gpt9" in capsys.readouterr().err
