"""One run a folder: a lock that the system takes back when the process ends, however it ends."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate import Accelerator
from filelock import FileLock, Timeout

from memsave_recipes.checkpoints.agreement import by_rank_0
from memsave_recipes.checkpoints.commit import told_in_one_line
from memsave_recipes.errors import InputError

LOCK = "run.lock"


@contextmanager
def locked_run_folder(accelerator: Accelerator, folder: Path) -> Iterator[None]:
    """``lock_run_folder`` until the block ends.

    Raises:
        InputError: as ``lock_run_folder``.
    """
    lock = lock_run_folder(accelerator, folder)
    try:
        yield
    finally:
        unlock_run_folder(lock)


def lock_run_folder(accelerator: Accelerator, folder: Path) -> FileLock:
    """Hold ``folder`` until the process ends or the lock is released; the folder is made. Rank 0 holds it for all.

    Raises:
        InputError: on all ranks, where another run holds it, or it cannot be written.
    """
    lock = FileLock(folder / LOCK)
    by_rank_0(accelerator, lambda: _acquire(lock, folder))
    return lock


def unlock_run_folder(lock: FileLock) -> None:
    """Let others have the folder; one that holds nothing, since its run never began, goes."""
    path = Path(lock.lock_file)
    if lock.is_locked:
        path.unlink(missing_ok=True)  # before others can have it; who opened it earlier is refused, or opens it again
        with suppress(OSError):  # it holds a run
            path.parent.rmdir()
    lock.release()


def _acquire(lock: FileLock, folder: Path) -> None:
    with told_in_one_line(folder / LOCK, LOCK):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise InputError(
                f"--output_dir {folder} belongs to a run that has not ended: wait for it, or name another folder"
            ) from error
