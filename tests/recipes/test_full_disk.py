"""A disk that is full when a run is nearly done costs nothing: one line, exit code 2, and ``--resume`` finishes it."""

import os
import resource
import shutil
import subprocess
from collections import namedtuple

import pytest
from lives import FLAGS, IMAGES, assert_the_same_run

from memsave_recipes.run import folder as folder_module
from memsave_recipes.run import training_run
from memsave_recipes.training.checkpoints.commit import verify_manifest
from memsave_recipes.training.checkpoints.resume import find_newest
from memsave_recipes.training.checkpoints.state import RankState

RECIPES = list(FLAGS)
ROOM = 1000
"""Bytes that a file may still have: too few for ``results.json``, ``config.json`` and any weights."""
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def full_disk():
    """``with full_disk():`` no file may grow beyond ``ROOM``, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def more_room():
    """The user sees to the disk."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.fixture(scope="module")
def straight(recipe, run_once):
    """The folder of the run that nothing ends, of this recipe."""
    return run_once(*FLAGS[recipe.__name__])


@pytest.fixture
def line_of(recipe, ending):
    """Run it to its end with exit code 2; the line that it ends with."""

    def end(*flags, output="run"):
        code, line = ending(*FLAGS[recipe.__name__], *flags, output=output)
        assert code == 2
        return line

    return end


class BeganError(Exception):
    """The run was let begin."""


def begin(*args, **options):
    raise BeganError


def before(monkeypatch, module, name, action):
    """Let ``action()`` come before each call of ``module.name``."""
    function = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **options: (action(), function(*args, **options))[1])


@pytest.mark.parametrize(
    ("recipe", "module", "writer", "named"),
    [
        ("language_modeling", folder_module, "save_model", "final/"),
        ("image_classification", training_run, "write_results", "results.json"),
    ],
    indirect=["recipe"],
)
def test_what_a_run_leaves_is_whole_or_can_be_written_later(
    recipe, train, line_of, full_disk, more_room, straight, monkeypatch, tmp_path, module, writer, named
):
    with monkeypatch.context() as patch:
        before(patch, module, writer, full_disk)
        line = line_of()
    more_room()
    run = tmp_path / "run"
    assert line.startswith(f"error: --output_dir {run}: {named} cannot be written")
    assert line.endswith("see to that, then go on with --resume")
    there = {path.name for path in run.iterdir()} - {
        "metrics.jsonl",
        "config.json",
        "plan.json",
        "checkpoints",
    }
    assert there == ({"final"} if writer == "write_results" else set())
    assert find_newest(run / "checkpoints").step == 10
    train(*FLAGS[recipe.__name__], "--resume")
    assert_the_same_run(run, straight)
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize("recipe", RECIPES[:1], indirect=True)
def test_final_is_sealed_and_as_open_as_the_folder(straight):
    final = straight / "final"
    verify_manifest(final)
    assert {path.stat().st_mode & 0o777 for path in final.iterdir()} == {final.stat().st_mode & 0o666}


@pytest.mark.parametrize("recipe", RECIPES[:1], indirect=True)
def test_an_evaluation_that_fails_at_the_end_costs_nothing(recipe, train, straight, monkeypatch, tmp_path):
    def fail():
        if find_newest(tmp_path / "run" / "checkpoints"):
            raise MemoryError

    with monkeypatch.context() as patch:
        before(patch, recipe, "evaluate_classifier", fail)
        with pytest.raises(MemoryError):
            train(*IMAGES)
    train(*IMAGES, "--resume")
    assert_the_same_run(tmp_path / "run", straight)


@pytest.mark.parametrize("recipe", RECIPES[:1], indirect=True)
@pytest.mark.parametrize("flags", [[], ["--resume"]])
def test_a_disk_that_is_full_at_the_beginning(recipe, line_of, full_disk, monkeypatch, tmp_path, flags):
    before(monkeypatch, training_run, "begin_run", full_disk)
    line = line_of(*flags)
    assert "plan.json or config.json cannot be written or deleted, file too large" in line


@pytest.mark.parametrize("recipe", RECIPES[:1], indirect=True)
def test_room_for_what_a_run_leaves_is_looked_for_before_it_begins(recipe, line_of, straight, monkeypatch, tmp_path):
    weights = (straight / "final" / "model.safetensors").stat().st_size
    monkeypatch.setattr(training_run, "begin_run", lambda *args, **options: pytest.fail("it began"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 3.8 * weights + 2**20))  # with AdamW's state
    line = line_of()
    assert "left and final/ and the checkpoint before it take" in line
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(training_run, "begin_run", begin)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 4.2 * weights + 2**20))
    with pytest.raises(BeganError):
        line_of()


@pytest.mark.parametrize("recipe", RECIPES[:1], indirect=True)
def test_room_that_an_overwritten_run_takes_is_free(recipe, line_of, train, monkeypatch, tmp_path):
    train(*IMAGES, "--save_every", "5")
    monkeypatch.setattr(training_run, "begin_run", begin)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 2**20))
    with pytest.raises(BeganError):
        line_of("--overwrite")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
@pytest.mark.parametrize("recipe", RECIPES[:1], indirect=True)
def test_a_real_disk_that_fills_up(recipe, train, line_of, straight, monkeypatch, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        fill = disk / "of_another_run"
        with monkeypatch.context() as patch:
            before(patch, training_run, "save_final", lambda: fill_up(fill))
            assert "final/ cannot be written or deleted, no space left on device" in line_of(output="disk/run")
        fill.unlink()
        train(*IMAGES, "--resume", output="disk/run")
        assert_the_same_run(disk / "run", straight)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # the run that ended holds its rows open


def fill_up(path):
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


@pytest.mark.parametrize("recipe", RECIPES[:1], indirect=True)
def test_the_checkpoint_of_the_end_stays_where_checkpoints_were_asked_for(train, tmp_path):
    train(*IMAGES, "--save_every", "4")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-10", "step-8"]


@pytest.mark.parametrize("recipe", ["image_classification"], indirect=True)
def test_a_checkpoint_whose_folder_vanishes_is_one_line(recipe, ending, train, tmp_path, monkeypatch):
    """As a cleaner of old files removes it; the checkpoint before is whole, and the run goes on from it."""
    write = RankState.write

    def into_nothing(self, folder):
        if folder.name.endswith("-4"):
            shutil.rmtree(folder)
        return write(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(RankState, "write", into_nothing)
        code, line = ending(*IMAGES, "--save_every", "2")
    assert code == 2
    assert "step-4 cannot be written or deleted, no such file or directory" in line
    train(*IMAGES, "--save_every", "2", output="straight")
    train(*IMAGES, "--save_every", "2", "--resume")
    assert_the_same_run(tmp_path / "run", tmp_path / "straight")
