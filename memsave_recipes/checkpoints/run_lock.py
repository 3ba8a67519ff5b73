"""One run a folder: a lock that the system takes back when the process ends, however it ends."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate import Accelerator
from filelock import FileLock, Timeout

from memsave_recipes.checkpoints.commit import disk_errors_as_input_error
from memsave_recipes.distributed import on_main_process
from memsave_recipes.errors import InputError

LOCK = "run.lock"


class RunLock:
    """The lock of a run's folder, for rank 0 alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / LOCK
        self._lock = FileLock(self.path)
        self._file: os.stat_result | None = None

    def acquire(self) -> list[Path]:
        """Returns the folders that had to be made, the innermost first.

        Raises:
            InputError: another run holds it, or it cannot be written.
        """
        with disk_errors_as_input_error(self.path, LOCK, way_out="or name another folder"):
            made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock.acquire(blocking=False)
                self._file = self.path.stat()
            except Timeout as error:
                raise InputError(
                    f"--output_dir {self.folder} belongs to a run that has not ended: wait for it, or name another "
                    "folder"
                ) from error
            except FileNotFoundError as error:
                raise InputError(
                    f"--output_dir {self.folder}: no folder can be made there, name another one"
                ) from error
        return made

    def keep(self) -> None:
        """Take it again where its file has been deleted, as cleaners of old files do, and say so.

        Raises:
            InputError: another run has taken it meanwhile.
        """
        if self._is_whole():
            return
        self._lock.release()
        try:
            self.acquire()
        except InputError as refused:
            raise InputError(
                f"{self.path} was deleted while this run held it, and another run has begun in its folder: this one "
                "ends, nothing more of it is saved"
            ) from refused
        print(f"note: {self.path} had been deleted, and is held again: keep cleaners of old files away from it")

    def release(self, made: list[Path]) -> None:
        """Give it back, and remove the folders that were ``made`` for it, if they are empty."""
        if self._lock.is_locked and self._is_whole():
            self.path.unlink()  # before others can have it; who opened it earlier is refused, or opens it again
            with suppress(OSError):  # it holds a run
                for folder in made:
                    folder.rmdir()
        self._lock.release()

    def _is_whole(self) -> bool:
        """Whether the file that is locked is the one that others would lock."""
        try:
            return self._file is not None and os.path.samestat(self._file, self.path.stat())
        except FileNotFoundError:
            return False


@contextmanager
def locked_run_folder(accelerator: Accelerator, folder: Path) -> Iterator[RunLock]:
    """Hold ``folder`` until the block or the process ends. Rank 0 holds it for all.

    Folders made for it are removed again if they are empty, since such a run never began.

    Raises:
        InputError: on all ranks, where another run holds it, or it cannot be written.
    """
    lock = RunLock(folder)
    made = on_main_process(accelerator, lock.acquire)
    try:
        yield lock
    finally:
        lock.release(made)
