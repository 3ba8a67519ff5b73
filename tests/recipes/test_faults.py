"""What goes wrong outside a run ends it in one line and with its own code, and costs no checkpoint."""

import os
import resource
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from ends_of_ranks import ends_of
from lives import loaded
from memory_budget import Budget

from memsave_recipes.checkpoints.resume import find_newest
from memsave_recipes.checkpoints.state import TrainState
from memsave_recipes.run.failures import run_recipe
from memsave_recipes.training.batching import GlobalBatch

RECIPE = "image_classification"
SHORT = ["--model", "vgg_small", "--global_batch_size", "16", "--max_steps", "6", "--logging_steps", "6"]


@pytest.fixture
def limit_file_size():
    """Files may not grow beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def end_of(recipe, folder, *flags):
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(SystemExit) as end:
        run_recipe(lambda: recipe.main([*SHORT, *flags, "--report_to", "none", "--output_dir", str(folder)]))
    return end.value.code


def the_line(capsys):
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def test_a_disk_that_is_full_costs_no_checkpoint(recipe, monkeypatch, limit_file_size, tmp_path, capsys):
    write = TrainState.write

    def write_with_no_room_from_step_4_on(self, folder, record):
        if record["step"] == 4:
            limit_file_size(1_000_000)
        write(self, folder, record)

    monkeypatch.setattr(TrainState, "write", write_with_no_room_from_step_4_on)
    assert end_of(recipe, tmp_path / "run", "--save_every", "2") == 2
    line = the_line(capsys)
    assert "step-4 cannot be written or deleted, a file would be larger" in line
    assert "go on with --resume from the checkpoint before" in line
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-2"]
    assert find_newest(checkpoints).step == 2


@pytest.mark.parametrize("place", ["/sys/run", "a_file/run", "loop/run"])
def test_a_folder_that_cannot_be_written_is_found_before_there_is_a_model(recipe, monkeypatch, tmp_path, capsys, place):
    (tmp_path / "a_file").touch()
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setattr(recipe, "build_image_classifier", lambda *args, **options: pytest.fail("a model was built"))
    monkeypatch.setattr(recipe, "load_images", lambda *args, **options: pytest.fail("data was loaded"))
    assert end_of(recipe, tmp_path / place) == 2
    assert f"--output_dir {tmp_path / place}: run.lock cannot be written" in the_line(capsys)


def test_a_folder_that_no_system_makes_is_refused(recipe, capsys):
    assert end_of(recipe, Path("/proc/a/run")) == 2
    assert the_line(capsys) == "error: --output_dir /proc/a/run: no folder can be made there, name another one"


@pytest.mark.parametrize("name", ["run", "run/below"])
def test_a_link_that_leads_nowhere_is_no_folder(recipe, tmp_path, capsys, name):
    (tmp_path / "run").symlink_to(tmp_path / "not mounted")
    assert end_of(recipe, tmp_path / name) == 2
    assert f"{tmp_path / 'run'} is a link that leads nowhere: mount its disk" in the_line(capsys)
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("name", ["checkpoints", "final"])
def test_what_a_link_leads_to_is_not_overwritten(recipe, tmp_path, capsys, name):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    assert end_of(recipe, tmp_path / "run", "--overwrite") == 2
    assert f"--overwrite: {tmp_path / 'run' / name} is a link to a folder, which is left alone" in the_line(capsys)
    assert (tmp_path / "run" / name / "kept").exists()


def test_a_mistake_leaves_nothing_behind(recipe, tmp_path):
    assert end_of(recipe, tmp_path / "run", "--activation_checkpointing", "segments:99") == 2
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_leaves_the_folder_that_was_there(recipe, tmp_path):
    (tmp_path / "a").mkdir()
    assert end_of(recipe, tmp_path / "a" / "b" / "run", "--activation_checkpointing", "segments:99") == 2
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


@pytest.mark.parametrize(
    ("words", "is_wanted"),
    [
        (["--debug"], True),
        (["--debug", "true"], True),
        (["--debug=yes"], True),
        (["--debug", "--seed", "1"], True),
        (["--debug", "no"], False),
        (["--config", "debug.yaml"], True),
        (["--config", "debug.yaml", "--debug", "false"], False),
        (["--config", "absent.yaml", "--debug"], True),
        ([], False),
    ],
)
def test_debug_adds_the_traceback(recipe, monkeypatch, tmp_path, capsys, words, is_wanted):
    monkeypatch.chdir(tmp_path)
    Path("debug.yaml").write_text("debug: true\n")
    words = ["--learning_rate", "-0.1", *words]
    monkeypatch.setattr(sys, "argv", ["recipe", *words])
    assert end_of(recipe, tmp_path / "run", *words) == 2
    told = capsys.readouterr().err
    assert ("Traceback (most recent call last)" in told) == is_wanted
    assert told.splitlines()[-1].startswith("error: ")


def without_memory_on_rank_1(accelerator, *, words):
    """The recipe, whose fifth step finds next to none on rank 1."""
    forwards = GlobalBatch.forwards

    def with_a_budget(self, model):
        with Budget(2**20) if self.step == 4 and accelerator.process_index == 1 else nullcontext():
            yield from forwards(self, model)

    GlobalBatch.forwards = with_a_budget
    with loaded(RECIPE) as recipe:
        run_recipe(lambda: recipe.main(words))


def test_no_memory_on_one_of_two_ranks_ends_both(run_trial, tmp_path):
    words = [*SHORT, "--save_every", "2", "--report_to", "none", "--output_dir", str(tmp_path / "run")]
    codes, told = run_trial(ends_of, partial(without_memory_on_rank_1, words=words), tmp_path)
    assert codes == [3, 3]
    assert "out of memory in step 5 on rank 1 of 2" in "".join(told)
    assert "Connection closed by peer" not in "".join(told)
    assert find_newest(tmp_path / "run" / "checkpoints").step == 4
