"""One run a folder: a lock that the system takes back when the process ends, however it ends."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate import Accelerator
from filelock import FileLock, Timeout

from memsave_recipes.agreement import by_rank_0
from memsave_recipes.checkpoints.commit import told_in_one_line
from memsave_recipes.errors import InputError

LOCK = "run.lock"


@contextmanager
def locked_run_folder(accelerator: Accelerator, folder: Path) -> Iterator[None]:
    """Hold ``folder`` until the block or the process ends. Rank 0 holds it for all.

    What had to be made for it goes again where nothing has been written into it, since such a run never began.

    Raises:
        InputError: on all ranks, where another run holds it, or it cannot be written.
    """
    lock = FileLock(folder / LOCK)
    made = by_rank_0(accelerator, lambda: _acquire(lock, folder))
    try:
        yield
    finally:
        _release(lock, made)


def _acquire(lock: FileLock, folder: Path) -> list[Path]:
    """The folders that had to be made, the innermost first."""
    with told_in_one_line(folder / LOCK, LOCK, way_out="or name another folder"):
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(blocking=False)
        except Timeout as error:
            raise InputError(
                f"--output_dir {folder} belongs to a run that has not ended: wait for it, or name another folder"
            ) from error
        except FileNotFoundError as error:
            raise InputError(f"--output_dir {folder}: no folder can be made there, name another one") from error
    return made


def _release(lock: FileLock, made: list[Path]) -> None:
    path = Path(lock.lock_file)
    if lock.is_locked:
        path.unlink(missing_ok=True)  # before others can have it; who opened it earlier is refused, or opens it again
        with suppress(OSError):  # it holds a run
            for folder in made:
                folder.rmdir()
    lock.release()
