"""A folder of images against the list ``SHA256SUMS`` in it, which ``sha256sum`` of coreutils writes.

Many a damaged image decodes, to wrong pixels: with a bit flipped 48 of 60 JPEGs did, with a zeroed tail all of 60. A
list that was made when the images were whole can tell. The digests are kept in the cache of ``datasets`` until a file
changes its time; ``sha256sum --check SHA256SUMS`` reads every byte again.
"""

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets

from memsave_recipes.errors import InputError

LIST = "SHA256SUMS"
LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
HASHING_THREADS = 8  # reading and hashing leave Python's lock


def check_against_list(splits: dict[str, datasets.Dataset], data_dir: str) -> int:
    """Compare every image with ``SHA256SUMS`` of its folder.

    Args:
        splits: with the column ``image``, which holds the path of each.

    Returns:
        How many were compared: all or, where there is no list, none.

    Raises:
        InputError: an image has other bytes, is not in the list or not in the folder; or the list is none.
    """
    if not Path(data_dir, LIST).exists():
        return 0
    root = os.path.abspath(data_dir)
    listed = _read_list(root)
    names = {split: [os.path.relpath(image["path"], root) for image in rows["image"]] for split, rows in splits.items()}
    found = {name for split in names.values() for name in split}
    _refuse(data_dir, found - listed.keys(), f"not in {LIST}", "delete, or add with sha256sum")
    _refuse(data_dir, _lost(listed.keys() - found, root, found), f"in {LIST}, but not there", "restore, or take out")
    changed = {
        name
        for split, rows in splits.items()
        for name, digest in zip(names[split], _digests(rows), strict=True)
        if digest != listed[name]
    }
    _refuse(data_dir, changed, f"other bytes than {LIST} says", "restore, or make the list again if that is meant")
    return len(found)


def _read_list(root: str) -> dict[str, str]:
    """The digest of each name; names are below ``root``."""
    path, listed = Path(root, LIST), {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="surrogateescape").splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        if match is None:
            raise InputError(f"{path} line {number} is no SHA-256 and a name: make the list with sha256sum")
        listed[os.path.relpath(os.path.join(root, match[2]), root)] = match[1].lower()
    return listed


def _lost(names: set[str], root: str, found: set[str]) -> set[str]:
    """What is no longer there, of the splits that are read."""
    read = {Path(name).parts[0] for name in found}
    return {name for name in names if Path(name).parts[0] in read and not os.path.exists(os.path.join(root, name))}


def _digests(rows: datasets.Dataset) -> list[str]:
    hashed = rows.map(
        _hash, batched=True, input_columns="image", remove_columns=rows.column_names, desc="hashing images"
    )
    return hashed["sha256"][:]


def _hash(images: list[dict[str, Any]]) -> dict[str, list[str]]:
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        return {"sha256": list(threads.map(_sha256, [image["path"] for image in images]))}


def _sha256(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; check file and disk") from error


def _refuse(data_dir: str, names: set[str], rule: str, way_out: str) -> None:
    """Say it of the first of ``names``, if there are any."""
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise InputError(f"--data_dir {data_dir}: {rule}: {min(names)}{others}; {way_out}")
