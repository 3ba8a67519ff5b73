"""A committed folder is whole or not there, on the disk before it has its name, and a failure costs nothing older."""

import errno
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from memsave_recipes.core.errors import InputError
from memsave_recipes.training.checkpoints.commit import (
    Damaged,
    check_space,
    clear_leftovers,
    commit_together,
    disk_errors_as_input_error,
    verify_manifest,
)
from memsave_recipes.training.checkpoints.resume import committed, find_newest, prune
from memsave_recipes.training.launch.start import Accelerator


def commit(folder, name, write):
    commit_together(Accelerator(), folder, name, [write], partial(disk_errors_as_input_error, folder, name))
    return folder / name


def write_two_files(folder):
    (folder / "weights").write_bytes(b"12345")
    (folder / "inner").mkdir()
    (folder / "inner" / "record").write_text("{}")


def fail_with(number):
    def write(folder):
        (folder / "weights").write_bytes(b"123")
        raise OSError(number, os.strerror(number))

    return write


@pytest.fixture
def disk_calls(monkeypatch):
    """What the disk is asked for, in order."""
    calls, names = [], {}
    really = {name: getattr(os, name) for name in ("open", "fsync", "rename")}

    def open_(path, *args, **kwargs):
        descriptor = really["open"](path, *args, **kwargs)
        names[descriptor] = Path(path).name
        return descriptor

    def fsync(descriptor):
        calls.append(f"sync {names[descriptor]}")
        really["fsync"](descriptor)

    def rename(source, target):
        calls.append(f"rename {Path(source).name} {Path(target).name}")
        really["rename"](source, target)

    for name, function in {"open": open_, "fsync": fsync, "rename": rename}.items():
        monkeypatch.setattr(os, name, function)
    return calls


def test_everything_is_on_the_disk_before_the_name_and_the_name_before_anything_is_given_up(tmp_path, disk_calls):
    for step in (1, 2):
        disk_calls.clear()
        commit(tmp_path, f"step-{step}", write_two_files)
    prune(tmp_path, "step", newest=2, keep=1)
    assert disk_calls == [
        "sync record",
        "sync weights",
        "sync manifest.json",
        "sync inner",
        "sync .tmp-step-2",
        "rename .tmp-step-2 step-2",
        f"sync {tmp_path.name}",
        "rename step-1 .trash-step-1",
    ]
    assert os.listdir(tmp_path) == ["step-2"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_what_the_disk_refuses_is_one_line_and_costs_nothing_older(tmp_path, number):
    folder = tmp_path / "run" / "checkpoints"
    commit(folder, "step-1", write_two_files)
    with pytest.raises(
        InputError, match=f"--output_dir {tmp_path / 'run'}: step-2 cannot be written .* --resume"
    ) as error:
        commit(folder, "step-2", fail_with(number))
    assert "\n" not in str(error.value)
    assert os.listdir(folder) == ["step-1"]
    verify_manifest(folder / "step-1")


def test_a_defect_of_ours_keeps_its_traceback(tmp_path):
    with pytest.raises(ZeroDivisionError):
        commit(tmp_path, "step-1", lambda folder: 1 / 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(InputError, match="permission denied"):
        commit(tmp_path / "checkpoints", "step-1", write_two_files)


def test_a_read_only_disk(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(InputError, match="read-only file system"):
        commit(tmp_path / "checkpoints", "step-1", write_two_files)


def test_no_save_begins_without_room_for_it(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10 * 2**20, 0, 5 * 2**20))
    check_space(folder, 4 * 2**20)
    with pytest.raises(InputError, match=f"--output_dir {folder} has 5 MiB left and a checkpoint takes 6 MiB"):
        check_space(folder, 5 * 2**20)


def test_what_killed_saves_left_is_cleared_and_never_taken_for_a_checkpoint(tmp_path):
    commit(tmp_path, "step-1", write_two_files)
    shutil.copytree(tmp_path / "step-1", tmp_path / ".tmp-step-2")
    shutil.copytree(tmp_path / "step-1", tmp_path / ".trash-step-0")
    assert find_newest(tmp_path).step == 1
    clear_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["step-1"]


def test_a_save_in_place_of_a_damaged_one(tmp_path):
    commit(tmp_path, "step-1", write_two_files)
    (tmp_path / "step-1" / "weights").write_bytes(b"")
    commit(tmp_path, "step-1", write_two_files)
    verify_manifest(tmp_path / "step-1")
    assert os.listdir(tmp_path) == ["step-1"]


def test_pruning_keeps_the_newest_and_gives_up_damaged_and_later_ones(tmp_path):
    for step in (2, 4, 10, 12, 20):
        commit(tmp_path, f"step-{step}", write_two_files)
    commit(tmp_path, "best-2", write_two_files)
    prune(tmp_path, "step", newest=12, keep=2, damaged=[tmp_path / "step-10"])
    assert sorted(os.listdir(tmp_path)) == ["best-2", "step-12", "step-4"]


def test_checkpoints_are_ordered_by_number_and_other_names_are_not_looked_at(tmp_path):
    for name in ("step-9", "step-10", "step-x", "best-11", "checkpoint_3", "step-12.bak"):
        (tmp_path / name).mkdir()
    assert [step for step, _ in committed(tmp_path)] == [10, 9]


def test_no_checkpoints_at_all_is_no_mistake(tmp_path):
    assert find_newest(tmp_path / "nowhere") is None


def test_files_can_be_read_by_whom_the_folder_can(tmp_path):
    path = commit(tmp_path, "step-1", lambda folder: save_file({"w": torch.zeros(3)}, folder / "weights"))
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {path.stat().st_mode & 0o666}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: (path / "weights").write_bytes(b"1234"), "weights has 4 of 5 bytes"),
        (lambda path: (path / "weights").write_bytes(b"12346"), "weights has other bytes than were written"),
        (lambda path: (path / "weights").unlink(), "weights is missing"),
        (lambda path: (path / "random_states_0.pkl").touch(), "random_states_0.pkl does not belong there"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_text("[" * 100_000), "manifest.json is not what was written"),
        (lambda path: edit(path / "manifest.json", '"format": 1', '"format": 7'), "it has format 7, not 1"),
        (lambda path: edit(path / "manifest.json", "  ", " "), "manifest.json is not what was written"),
    ],
)
def test_what_is_damaged_is_named(tmp_path, change, words):
    path = commit(tmp_path, "step-1", write_two_files)
    verify_manifest(path)
    change(path)
    with pytest.raises(Damaged, match=words):
        verify_manifest(path)


def edit(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def test_the_errors_of_safetensors_are_understood():
    for text, words in (
        ("No space left on device (os error 28)", "no space left on device"),
        ("(os error 2)", "no such file or directory"),
    ):
        with pytest.raises(InputError, match=words), disk_errors_as_input_error(Path("run/c"), "step-1"):
            raise RuntimeError(f"Error while serializing: I/O error: {text}")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(errno.ENOENT, "x"), "no such file or directory"),
        (IsADirectoryError(errno.EISDIR, "x"), "is a directory"),
        (OSError(errno.ENXIO, "x"), "no such device or address"),
    ],
)
def test_every_error_of_a_disk_is_one_line(error, words):
    with pytest.raises(InputError, match=words), disk_errors_as_input_error(Path("run/c"), "step-1"):
        raise error
    for other in (ConnectionResetError(errno.ECONNRESET, "a lost rank"), OSError("without a number")):
        with pytest.raises(type(other)), disk_errors_as_input_error(Path("run/c"), "step-1"):
            raise other
