"""What goes wrong outside a run ends it in one line and with its own code, and costs no checkpoint."""

import os
import resource
from contextlib import nullcontext
from functools import partial

import pytest
from ends_of_ranks import ends_of
from lives import loaded
from memory_budget import Budget

from memsave_recipes.run.failures import run_recipe
from memsave_recipes.training.batching import GlobalBatch
from memsave_recipes.training.checkpoints import saver
from memsave_recipes.training.checkpoints.resume import find_newest

RECIPE = "image_classification"
SHORT = ["--model", "vgg_small", "--global_batch_size", "16", "--max_steps", "6", "--logging_steps", "6"]


@pytest.fixture
def limit_file_size():
    """Files may not grow beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_costs_no_checkpoint(ending, monkeypatch, limit_file_size, tmp_path):
    begin = saver.begin

    def begin_with_no_room_from_step_4_on(folder, name):
        if name == "step-4":
            limit_file_size(1_000_000)
        return begin(folder, name)

    monkeypatch.setattr(saver, "begin", begin_with_no_room_from_step_4_on)
    code, line = ending(*SHORT, "--save_every", "2")
    assert code == 2
    assert "step-4 cannot be written or deleted, file too large" in line
    assert "go on with --resume from the checkpoint before" in line
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-2"]
    assert find_newest(checkpoints).step == 2


@pytest.mark.parametrize("place", ["/sys/run", "a_file/run", "loop/run"])
def test_a_folder_that_cannot_be_written_is_found_before_there_is_a_model(recipe, ending, monkeypatch, tmp_path, place):
    (tmp_path / "a_file").touch()
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setattr(recipe, "build_image_classifier", lambda *args, **options: pytest.fail("a model was built"))
    monkeypatch.setattr(recipe, "load_images", lambda *args, **options: pytest.fail("data was loaded"))
    code, line = ending(*SHORT, output=place)
    assert code == 2
    assert f"--output_dir {tmp_path / place}: run.lock cannot be written" in line


def test_a_folder_that_no_system_makes_is_refused(refuse):
    line = refuse(*SHORT, output="/proc/a/run")
    assert line == "error: --output_dir /proc/a/run: no folder can be made there, name another one"


@pytest.mark.parametrize("name", ["run", "run/below"])
def test_a_link_that_leads_nowhere_is_no_folder(refuse, tmp_path, name):
    (tmp_path / "run").symlink_to(tmp_path / "not mounted")
    line = refuse(*SHORT, output=name)
    assert f"{tmp_path / 'run'} is a link that leads nowhere: mount its disk" in line
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("name", ["checkpoints", "final"])
def test_what_a_link_leads_to_is_not_overwritten(refuse, tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    line = refuse(*SHORT, "--overwrite")
    assert f"--overwrite: {tmp_path / 'run' / name} is a link to a folder, which is left alone" in line
    assert (tmp_path / "run" / name / "kept").exists()


def test_a_mistake_leaves_nothing_behind(refuse, tmp_path):
    refuse(*SHORT, "--activation_checkpointing", "segments:99")
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_leaves_the_folder_that_was_there(refuse, tmp_path):
    (tmp_path / "a").mkdir()
    refuse(*SHORT, "--activation_checkpointing", "segments:99", output="a/b/run")
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


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
