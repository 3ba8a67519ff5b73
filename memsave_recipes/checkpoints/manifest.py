"""A folder that can prove it is whole: every file's size and SHA-256, in a manifest that is written last.

The manifest holds a digest of its own entries and is compared with its canonical text, so that a changed byte in it is
found as well. This tells damage, not malice: who can write the folder can write a manifest that fits.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1
"""Counts up when an older checkpoint can no longer be read."""
HASHING_THREADS = 4  # SHA-256 is slower than a fast disk


class Damaged(Exception):
    """A folder is not what its manifest says; the message says which file, and how."""


def seal(folder: Path) -> None:
    """Bring every file of ``folder`` to the disk, then write its manifest and bring that to the disk.

    The digests are computed while the disk is writing, several at a time: none of that holds Python's lock.
    """
    with ThreadPoolExecutor(max_workers=HASHING_THREADS) as beside:
        digests = {path: beside.submit(_sha256, path) for path in _files(folder)}
        for path in digests:
            sync(path)
        entries = [_entry(folder, path, digest.result()) for path, digest in digests.items()]
    manifest = folder / MANIFEST
    manifest.write_text(_text(entries), encoding="utf-8")
    sync(manifest)
    for path in sorted(folder.rglob("*/")):
        sync(path)
    sync(folder)


def check_seal(folder: Path) -> None:
    """Read every byte of ``folder`` and compare.

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
            digests = threads.map(_sha256, [folder / entry["path"] for entry in entries])
            for entry, digest in zip(entries, digests, strict=True):
                _check_digest(entry, digest)
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
    """Whatever is no folder and not the manifest."""
    return sorted(path for path in folder.rglob("*") if not path.is_dir() and path != folder / MANIFEST)


def _entry(folder: Path, path: Path, digest: str) -> dict[str, Any]:
    return {"path": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "sha256": digest}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _text(entries: list[dict[str, Any]]) -> str:
    digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    return json.dumps({"format": FORMAT, "sha256_of_files": digest, "files": entries}, indent=1) + "\n"


def _read_entries(folder: Path) -> list[dict[str, Any]]:
    path = folder / MANIFEST
    if not path.is_file():
        raise Damaged(f"{MANIFEST} is missing")
    content = path.read_bytes()
    try:
        manifest = json.loads(content)
        written_by, entries = manifest["format"], manifest["files"]
        is_canonical = _text(entries).encode() == content and all(map(_is_entry, entries))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is not what was written") from error
    if not is_canonical:
        known = written_by == FORMAT
        raise Damaged(f"{MANIFEST} is not what was written" if known else f"it has format {written_by}, not {FORMAT}")
    return entries


def _is_entry(entry: Any) -> bool:
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


def _check_digest(entry: dict[str, Any], digest: str) -> None:
    if digest != entry["sha256"]:
        raise Damaged(f"{entry['path']} has other bytes than were written")
