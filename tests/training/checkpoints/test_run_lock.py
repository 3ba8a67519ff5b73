"""A run keeps its folder to itself, also where somebody deletes the file that says so."""

import fcntl
from threading import Timer

import pytest

from memsave_recipes.core.errors import InputError
from memsave_recipes.training.checkpoints import RunLock, saver


@pytest.fixture
def held(tmp_path):
    lock = RunLock(tmp_path / "run")
    made = lock.acquire()
    yield lock
    lock.release(made)


def test_a_lock_that_was_deleted_is_taken_again_and_said(held, capsys):
    held.keep()
    assert capsys.readouterr().out == ""
    held.path.unlink()
    held.keep()
    assert capsys.readouterr().out.startswith(f"note: {held.path} had been deleted, and is held again")
    with pytest.raises(InputError, match="belongs to a run that has not ended"):
        RunLock(held.folder).acquire()


def test_a_folder_in_its_place_is_one_line(tmp_path):
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(InputError, match="is a directory"):
        RunLock(tmp_path).acquire()


def test_a_run_whose_folder_another_has_taken_ends(held):
    held.path.unlink()
    other = RunLock(held.folder)
    made = other.acquire()
    with pytest.raises(InputError, match="another run has begun in its folder"):
        held.keep()
    held.release([])  # and leaves the other one's alone
    assert other.path.exists()
    other.release(made)
    assert not other.path.exists()


def test_ranks_that_take_the_place_of_lost_ones_wait_for_these_to_end(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    lock = RunLock(tmp_path)
    lost = lock.path.open("w")
    fcntl.flock(lost, fcntl.LOCK_EX)
    Timer(0.3, lost.close).start()
    made = lock.acquire()
    monkeypatch.setattr(saver, "GIVEN_BACK_S", 0.1)
    with pytest.raises(InputError, match="belongs to a run that has not ended"):
        RunLock(tmp_path).acquire()
    lock.release(made)
