"""Write a folder so that it is whole or not there, whatever happens to the process or the disk meanwhile.

NOTE [ the commit ]: OLMo-core's protocol (``train/checkpoint.py``), with digests.
1. Everything is written into a sibling, ``.tmp-NAME``. A killed save leaves such a folder, which is cleared later.
2. Every file is synced, then the manifest with their sizes and digests and a digest of these, then the sibling.
3. Renaming the sibling to ``NAME`` is the commit. Then the parent is synced.
4. Only now are older folders given up: each is renamed to ``.trash-NAME``, and then deleted.
5. A save that fails clears its sibling and touches nothing else.
6. Every rank writes and syncs its own shards, or rank 0 whole weights. Rank 0 begins before all and finishes after
   all.
7. Weights that all ranks gather, file by file, are on rank 0's disk before the next file is gathered.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from accelerate import Accelerator

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.text import format_bytes
from memsave_recipes.data.fingerprint import sha256_of_file
from memsave_recipes.training.launch.distributed import on_main_process

MANIFEST = "manifest.json"
FORMAT = 1
"""Counts up when an older checkpoint can no longer be read."""
HASHING_THREADS = 4  # SHA-256 is slower than a fast disk
TEMPORARY = ".tmp-"
TRASH = ".trash-"
SPARE_BYTES = 1024**2
"""For the files of a checkpoint that hold no tensors."""


T = TypeVar("T")
Writer = Callable[[Path], Any]
"""Writes files into the folder that it is given."""


class Damaged(Exception):
    """A folder differs from its manifest; the message says in which file, and how."""


class Entry(TypedDict):
    """A file of the manifest, by its path below the folder."""

    path: str
    size: int
    sha256: str


def commit_together(
    accelerator: Accelerator,
    folder: Path,
    name: str,
    writers: Iterable[Writer],
    disk_errors: Callable[[], AbstractContextManager[None]],
) -> None:
    """Commit what ``writers`` write on rank 0: rule 7 of NOTE [ the commit ]. For all ranks.

    Args:
        writers: all ranks take one after the other, and may gather for the next one as they do.
        disk_errors: turns errors of the disk inside into a line for the user.

    Raises:
        InputError: on all ranks, as ``disk_errors`` raises it.
    """

    def on_rank_0(action: Callable[[], T]) -> T:
        def attempt() -> T:
            with disk_errors():
                return action()

        return on_main_process(accelerator, attempt)

    temporary = on_rank_0(lambda: begin(folder, name))
    try:
        for writer in writers:
            on_rank_0(partial(_write, writer, temporary))
        on_rank_0(lambda: finish(temporary, folder / name))
    except BaseException:
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write(writer: Writer, folder: Path) -> None:
    """Write, and return nothing, which other ranks would be sent."""
    writer(folder)


def begin(folder: Path, name: str) -> Path:
    """Make the empty sibling of ``folder/name``: rule 1 of NOTE [ the commit ]."""
    temporary = folder / f"{TEMPORARY}{name}"
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in (temporary, _trash_of(folder / name)):
        delete(leftover)
    temporary.mkdir()
    return temporary


def finish(temporary: Path, target: Path, settled: Sequence[Entry] = ()) -> Path:
    """Make the filled sibling ``target``: rules 2 and 3 of NOTE [ the commit ].

    Args:
        settled: files that ranks have written, synced and hashed: rule 6.

    Raises:
        InputError: one of these is not there.
    """
    for path in filter(Path.is_file, temporary.rglob("*")):  # safetensors lets only the owner read
        path.chmod(temporary.stat().st_mode & 0o666)
    write_manifest(temporary, settled)
    if target.exists():  # it was damaged, or it would not be written again
        discard(target)
    os.rename(temporary, target)
    sync(target.parent)
    return target


def discard(path: Path) -> None:
    """Delete a folder that was committed: rule 4 of NOTE [ the commit ]."""
    trash = _trash_of(path)
    delete(trash)
    os.rename(path, trash)
    delete(trash)


def clear_leftovers(folder: Path) -> None:
    """Delete the temporary folders that killed saves left in ``folder``."""
    with disk_errors_as_input_error(folder, "the rest of a killed save"):
        for path in [*folder.glob(f"{TEMPORARY}*"), *folder.glob(f"{TRASH}*")]:
            delete(path)


def delete(path: Path) -> None:
    """Delete a file, a folder or a link, but not the target of the link; nothing where it is missing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _trash_of(path: Path) -> Path:
    return path.with_name(f"{TRASH}{path.name}")


def check_space(output_dir: Path, num_bytes: int, what: str = "a checkpoint takes", *, freed_bytes: int = 0) -> None:
    """Refuse to begin a save of ``num_bytes`` that the disk cannot take.

    Args:
        what: subject and verb of the message.
        freed_bytes: deleted before the save.

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
def disk_errors_as_input_error(
    folder: Path, name: str, *, hint: str = "then go on with --resume from the checkpoint before"
) -> Iterator[None]:
    """Turn errors of the system, which are the disk's, into one line that names the flag; others pass."""
    try:
        yield
    except Exception as error:
        number = _number_of(error)
        if not number or isinstance(error, ConnectionError | TimeoutError):  # of other ranks, or of no disk
            raise
        reason = os.strerror(number).lower() + (" (see `ulimit -f`)" if number == errno.EFBIG else "")
        raise InputError(
            f"--output_dir {folder.parent}: {name} cannot be written or deleted, {reason}: see to that, {hint}"
        ) from error


def _number_of(error: Exception) -> int:
    """Return the errno; safetensors has an exception of its own, whose text ends in ``(os error 28)``."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    in_text = re.search(r"\(os error (\d+)\)", str(error))
    return int(in_text[1]) if in_text else 0


def write_manifest(folder: Path, settled: Sequence[Entry] = ()) -> None:
    """Sync every file of ``folder``, then write its manifest and sync that.

    Args:
        settled: the entries of files that this rank or others have synced.

    Raises:
        InputError: one of these is not there.
    """
    known = {folder / entry["path"] for entry in settled}
    for path in known:
        if not path.is_file():
            raise InputError(
                f"--output_dir {folder.parent.parent}: rank 0 does not see {path.name}, which another rank has written "
                "there: put it on a disk that all machines share"
            )
    entries = [*settled, *settle(folder, (path for path in _files(folder) if path not in known))]
    manifest = folder / MANIFEST
    manifest.write_text(_text(entries), encoding="utf-8")
    sync(manifest)
    for path in sorted(folder.rglob("*/")):
        sync(path)
    sync(folder)


def settle(folder: Path, paths: Iterable[Path]) -> list[Entry]:
    """Sync files of ``folder``, and return their entries in the manifest; digests are computed meanwhile."""
    with ThreadPoolExecutor(max_workers=HASHING_THREADS) as threads:
        digests = {path: threads.submit(sha256_of_file, path) for path in paths}
        for path in digests:
            sync(path)
        return [_entry(folder, path, digest.result()) for path, digest in digests.items()]


def verify_manifest(folder: Path) -> None:
    """Compare every byte of ``folder`` with its manifest.

    Raises:
        Damaged: a file is missing, unknown, of another size or content, or cannot be read.
    """
    try:
        entries = _read_entries(folder)
        files = _files(folder)
        for path in files:
            if path.exists() and not path.is_file():  # reading a pipe would wait for its writer
                raise Damaged(f"{path.name} is no file")
        _check_sizes(
            expected={entry["path"]: entry["size"] for entry in entries},
            found={path.relative_to(folder).as_posix(): path.stat().st_size for path in files},
        )
        with ThreadPoolExecutor(max_workers=HASHING_THREADS) as threads:
            digests = threads.map(sha256_of_file, [folder / entry["path"] for entry in entries])
            for entry, digest in zip(entries, digests, strict=True):
                if digest != entry["sha256"]:
                    raise Damaged(f"{entry['path']} has other bytes than were written")
    except OSError as error:
        raise Damaged(f"{Path(error.filename or folder).name} cannot be read: {error.strerror}") from error


def sync(path: Path) -> None:
    """Wait until the disk holds ``path``, a file's content or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> list[Path]:
    """List everything but folders and the manifest."""
    return sorted(path for path in folder.rglob("*") if not path.is_dir() and path != folder / MANIFEST)


def _entry(folder: Path, path: Path, digest: str) -> Entry:
    return {"path": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "sha256": digest}


def _text(entries: list[Entry]) -> str:
    digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    return json.dumps({"format": FORMAT, "sha256_of_files": digest, "files": entries}, indent=1) + "\n"


def _read_entries(folder: Path) -> list[Entry]:
    path = folder / MANIFEST
    if not path.is_file():
        raise Damaged(f"{MANIFEST} is missing")
    content = path.read_bytes()
    try:
        manifest = json.loads(content)
        written_by: object = manifest["format"]
        entries: list[Entry] = manifest["files"]
        is_canonical = _text(entries).encode() == content and all(map(_is_entry, entries))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is not what was written") from error
    if not is_canonical:
        known = written_by == FORMAT
        raise Damaged(f"{MANIFEST} is not what was written" if known else f"it has format {written_by}, not {FORMAT}")
    return entries


def _is_entry(entry: object) -> bool:
    match entry:
        case {"path": str(), "size": int(), "sha256": str()}:
            return True
    return False


def _check_sizes(expected: dict[str, int], found: dict[str, int]) -> None:
    for name in sorted(expected.keys() | found.keys()):
        if name not in expected:
            raise Damaged(f"{name} does not belong there")
        if name not in found:
            raise Damaged(f"{name} is missing")
        if found[name] != expected[name]:
            raise Damaged(f"{name} has {found[name]} of {expected[name]} bytes")
