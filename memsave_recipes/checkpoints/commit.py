"""Write a folder so that it is either whole or not there, whatever happens to the process or the disk meanwhile.

NOTE [ the commit ]
1. Everything is written into a sibling, ``.tmp-NAME``. What a killed save leaves has such a name and is cleared later.
2. Every file goes to the disk, then the manifest with their sizes and digests, then the sibling's own names. Who may
   read the folder may read its files: safetensors lets only the owner.
3. Renaming the sibling to ``NAME`` is the commit: before it the folder is not there, after it it is whole. Then the
   parent's names go to the disk, so that the rename outlives a loss of power.
4. Only now are older folders given up: each is renamed to ``.trash-NAME`` first, so that one half deleted is never
   taken for a checkpoint, and then deleted.
5. A save that fails clears its sibling and touches nothing else.

The protocol is OLMo-core's (``train/checkpoint.py``), with digests. Not covered: a disk that lies about fsync, and file
systems on which a rename is not atomic.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from memsave_recipes.checkpoints.manifest import seal, sync
from memsave_recipes.errors import InputError
from memsave_recipes.units import format_bytes

TEMPORARY = ".tmp-"
TRASH = ".trash-"
REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your quota of the disk is used up",
    errno.EFBIG: "a file would be larger than this process or file system may write (see `ulimit -f`)",
    errno.EROFS: "it is on a disk that is read-only",
    errno.EACCES: "it may not be written by you",
    errno.EPERM: "it may not be written by you",
    errno.EIO: "the disk fails",
    errno.ENOTDIR: "a part of its path is a file",
    errno.ENAMETOOLONG: "its path is too long",
    errno.ELOOP: "a part of its path is a link to itself",
    errno.ESTALE: "the disk of another machine has been taken away",
}
SPARE_BYTES = 1024**2
"""For what a checkpoint holds beside its tensors."""


def commit(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    """``make_whole`` for the checkpoints of a run, which are all that is in ``folder``.

    Raises:
        InputError: the disk is full, read-only or failing.
    """
    with told_in_one_line(folder, name):
        return make_whole(folder, name, write)


def make_whole(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Let ``write(temporary)`` fill a folder and make it ``folder/name``: rules 1 to 3 and 5 of NOTE [ the commit ]."""
    temporary, target = folder / f"{TEMPORARY}{name}", folder / name
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in (temporary, _trash_of(target)):
        delete(leftover)
    temporary.mkdir()
    try:
        write(temporary)
        _let_others_read(temporary)
        seal(temporary)
        if target.exists():  # it was damaged, or it would not be written again
            discard(target)
        os.rename(temporary, target)
        sync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def discard(path: Path) -> None:
    """Delete a folder that was committed: rule 4 of NOTE [ the commit ]."""
    trash = _trash_of(path)
    delete(trash)
    os.rename(path, trash)
    delete(trash)


def clear_leftovers(folder: Path) -> None:
    """Delete what killed saves left in ``folder``."""
    with told_in_one_line(folder, "what a killed save left"):
        for path in [*folder.glob(f"{TEMPORARY}*"), *folder.glob(f"{TRASH}*")]:
            delete(path)


def check_space(output_dir: Path, num_bytes: int, what: str = "a checkpoint takes", *, freed_bytes: int = 0) -> None:
    """Refuse to begin a save of ``num_bytes`` that the disk cannot take.

    Args:
        what: is saved, for the message.
        freed_bytes: that will be deleted before.

    Raises:
        InputError: too little space is free.
    """
    there = next(path for path in (output_dir, *output_dir.parents) if path.exists())
    free = shutil.disk_usage(there).free + freed_bytes
    if free < num_bytes + SPARE_BYTES:
        raise InputError(
            f"--output_dir {output_dir} has {format_bytes(free)} left and {what} "
            f"{format_bytes(num_bytes + SPARE_BYTES)}: free some space, then go on with --resume"
        )


@contextmanager
def told_in_one_line(
    folder: Path, name: str, *, way_out: str = "then go on with --resume from the checkpoint before"
) -> Iterator[None]:
    """Turn what a disk refuses into one line that names the flag; anything else stays what it is."""
    try:
        yield
    except Exception as error:
        reason = REASONS.get(_number_of(error))
        if reason is None:
            raise
        raise InputError(
            f"--output_dir {folder.parent}: {name} cannot be written or deleted, {reason}: see to that, {way_out}"
        ) from error


def _number_of(error: Exception) -> int:
    """The errno; safetensors has an exception of its own, whose text ends in ``(os error 28)``."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    in_text = re.search(r"\(os error (\d+)\)", str(error))
    return int(in_text[1]) if in_text else 0


def _trash_of(path: Path) -> Path:
    return path.with_name(f"{TRASH}{path.name}")


def _let_others_read(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(folder.stat().st_mode & 0o666)


def delete(path: Path) -> None:
    """Whatever ``path`` is, if it is there; of a link, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
