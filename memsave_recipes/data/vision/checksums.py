"""Check images against a list of their digests, and against those that a resumed run was trained on.

A folder may hold a list ``SHA256SUMS``, which ``sha256sum`` of coreutils writes. Many a damaged image decodes, to wrong
pixels: with a bit flipped 48 of 60 JPEGs did, with a zeroed tail all of 60. A list that was made when the images were
whole can tell. The digests are kept in the cache of ``datasets`` until a file changes its time; ``sha256sum --check
SHA256SUMS`` reads every byte again.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np

from memsave_recipes.data.text.documents import LONG_BYTES, progress_bars
from memsave_recipes.data.vision.decoding import Stored, of_each_image
from memsave_recipes.errors import InputError
from memsave_recipes.fingerprint import Fingerprint, Samples, digest_of, sha256_of_file

LIST = "SHA256SUMS"
LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
ROWS_AT_ONCE = 1000
SPLITS = {"train": "training images", "validation": "held-out images"}


def check_against_list(splits: dict[str, datasets.Dataset], data_dir: str) -> dict[str, str]:
    """Compare every image with ``SHA256SUMS`` of its folder.

    Args:
        splits: with the column ``image``, which holds the path of each.

    Returns:
        The digest of each that was compared, by its name below the folder; empty where there is no list.

    Raises:
        InputError: an image has other bytes, is not in the list or not in the folder; or the list is none.
    """
    if not Path(data_dir, LIST).exists():
        return {}
    root = os.path.abspath(data_dir)
    listed = _read_list(root)
    names = {split: names_below(rows, data_dir) for split, rows in splits.items()}
    found = {name for split in names.values() for name in split}
    _refuse(data_dir, found - listed.keys(), f"not in {LIST}", "delete, or add with sha256sum")
    _refuse(data_dir, _lost(listed.keys() - found, root, found), f"in {LIST}, but not there", "restore, or take out")
    changed = {
        name
        for split, rows in splits.items()
        for name, digest in zip(names[split], of_each_image(rows, _sha256, "hashing images"), strict=True)
        if digest != listed[name]
    }
    _refuse(data_dir, changed, f"other bytes than {LIST} says", "restore, or make the list again if that is meant")
    return {name: listed[name] for name in found}


def fingerprint_of_images(
    splits: dict[str, datasets.Dataset], data_dir: str | None, listed: dict[str, str]
) -> Fingerprint:
    """The images' fingerprint, for a resumed run to compare: rules 2 and 3 of NOTE [ the same data ].

    Args:
        splits: with the columns ``image``, still encoded, and ``label``.
        data_dir: the folder that they are files of; ``None`` for a data set.
        listed: the result of ``check_against_list``.

    Raises:
        InputError: a file cannot be found any more.
    """
    label_names = tuple(splits["train"].features["label"].names)
    named = {SPLITS[split]: rows for split, rows in splits.items()}
    if data_dir is None:
        samples = {name: _samples_of_dataset(rows, name) for name, rows in named.items()}
        return Fingerprint(samples=samples, label_names=label_names)
    files = {name: _files(rows, os.path.abspath(data_dir)) for name, rows in named.items()}
    return Fingerprint(
        samples=_samples(files, lambda file: f"{file.name} {file.size} {file.label}"),
        contents=_samples(files, lambda file: listed[file.name]) if listed else {},
        times=_samples(files, lambda file: f"{file.time_ns}"),
        label_names=label_names,
    )


class _File(NamedTuple):
    """An image in a folder, by its path below that; bytes, and when it was last modified."""

    name: str
    size: int
    time_ns: int
    label: int


def _files(rows: datasets.Dataset, root: str) -> list[_File]:
    files = []
    for batch in rows.iter(ROWS_AT_ONCE):
        for image, label in zip(batch["image"], batch["label"], strict=True):
            state = _stat(image["path"])
            files.append(_File(os.path.relpath(image["path"], root), state.st_size, state.st_mtime_ns, label))
    return files


def _samples(files: dict[str, list[_File]], text_of: Callable[[_File], str]) -> dict[str, Samples]:
    return {split: _samples_of(found, text_of) for split, found in files.items()}


def _samples_of(files: list[_File], text_of: Callable[[_File], str]) -> Samples:
    digests = np.array([digest_of(text_of(file).encode()) for file in files], dtype=np.int64)
    return Samples(digests=digests, name_of=lambda index: files[index].name)


def _samples_of_dataset(rows: datasets.Dataset, split: str) -> Samples:
    columns = ["image", "label"]
    with progress_bars(rows.data.nbytes > LONG_BYTES):
        hashed = rows.map(
            _digests_of, batched=True, input_columns=columns, remove_columns=columns, desc="hashing images"
        )
    digests = hashed.with_format("numpy")["digest"][:]
    return Samples(digests=digests, name_of=lambda index: f"number {index + 1} of the {split}")


def _digests_of(images: list[dict[str, Any]], labels: list[int]) -> dict[str, list[int]]:
    rows = zip(images, labels, strict=True)
    return {"digest": [digest_of(f"{label} ".encode() + _content(image)) for image, label in rows]}


def _content(image: dict[str, Any]) -> bytes:
    """The bytes of one that is stored in the data set; of one that is a file, its name and size."""
    stored: bytes | None = image["bytes"]
    if stored is not None:
        return stored
    return f"{os.path.basename(image['path'])} {_stat(image['path']).st_size}".encode()


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
    """The missing files of the splits that are read; a flat folder, where none is named train, is read as a whole."""
    read = {Path(name).parts[0] for name in found}
    if "train" not in read:
        read = {Path(name).parts[0] for name in names}
    return {name for name in names if Path(name).parts[0] in read and not os.path.exists(os.path.join(root, name))}


def names_below(rows: datasets.Dataset, folder: str) -> list[str]:
    """The paths of the images below a folder."""
    root = os.path.abspath(folder)
    return [os.path.relpath(image["path"], root) for image in rows["image"]]


def _sha256(image: Stored) -> str:
    with _readable(image["path"]):
        return sha256_of_file(image["path"])


def _stat(path: str) -> os.stat_result:
    with _readable(path):
        return os.stat(path)


@contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; check file and disk") from error


def _refuse(data_dir: str, names: set[str], rule: str, way_out: str) -> None:
    """Say it of the first of ``names``, if there are any."""
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise InputError(f"--data_dir {data_dir}: {rule}: {min(names)}{others}; {way_out}")
