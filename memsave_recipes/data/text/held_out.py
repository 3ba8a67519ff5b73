"""The documents of a data set that are held out where it brings no validation split.

They are the 5 % with the smallest hashes: of the text, so that copies stay on one side, or of the path where documents
have one. Of fewer than 20 documents the last 5 % of the text of each are held out instead. No seed, run or number of
ranks changes that.
"""

import hashlib
from collections.abc import Callable
from math import ceil

import datasets
import numpy as np
from datasets import Features, Value

from memsave_recipes.errors import InputError

TEXT = {"text": Value("large_string")}  # a plain string ends at 2 GiB a file
HELD_OUT = 0.05
MIN_DOCUMENTS = 20


def hold_out(documents: datasets.Dataset, source: str) -> tuple[dict[str, datasets.Dataset], str]:
    """``train`` and ``validation`` of ``documents`` (``text``, and maybe ``path``), and how they came to be.

    Raises:
        InputError: there are no documents.
    """
    count = len(documents)
    if not count:
        raise InputError(f"{source} has no text: give documents that are not blank")
    if count < MIN_DOCUMENTS:
        kind = "its one document" if count == 1 else f"each of its {count} documents"
        splits = {"train": _each(documents, _head), "validation": _each(documents, _tail)}
        return splits, f"the last {HELD_OUT:.0%} of {kind} are held out of {source}"
    hashes = _hashes(documents)
    quota = ceil(HELD_OUT * count)
    is_held_out = hashes <= np.partition(hashes, quota - 1)[quota - 1]
    chosen = {"train": ~is_held_out, "validation": is_held_out}
    splits = {split: documents.select(np.flatnonzero(rows)) for split, rows in chosen.items()}
    return splits, f"{is_held_out.sum()} of the {count} documents of {source} are held out"


def with_text(documents: datasets.Dataset) -> datasets.Dataset:
    """Only the documents that hold more than blanks."""
    return documents.filter(_has_text, batched=True, input_columns="text")


def _has_text(texts: list[str | None]) -> list[bool]:
    return [bool(text and text.strip()) for text in texts]


def _each(documents: datasets.Dataset, part: Callable[[str], dict[str, str]]) -> datasets.Dataset:
    features = Features({**documents.features, **TEXT})
    return with_text(documents.map(part, input_columns="text", features=features))


def _head(text: str) -> dict[str, str]:
    return {"text": text[: _cut(text)]}


def _tail(text: str) -> dict[str, str]:
    return {"text": text[_cut(text) :]}


def _cut(text: str) -> int:
    """Where the last 5 % begin: after the end of a line, or else of a word, where one is not far before."""
    latest = int((1 - HELD_OUT) * len(text))
    ends = [text.rfind(mark, int((1 - 2 * HELD_OUT) * len(text)), latest) for mark in "\n "]
    return next((end + 1 for end in ends if end >= 0), latest)


def _hashes(documents: datasets.Dataset) -> np.ndarray:
    """A hash of every document, int64 (N,)."""
    hashed_column = "path" if "path" in documents.column_names else "text"
    others = documents.column_names
    hashed = documents.map(_hash, batched=True, input_columns=hashed_column, remove_columns=others)
    hashes: np.ndarray = hashed.with_format("numpy")["hash"][:]
    return hashes


def _hash(names: list[str]) -> dict[str, list[int]]:
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    return {"hash": [int.from_bytes(digest, "big") >> 1 for digest in digests]}
