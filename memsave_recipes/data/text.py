"""Documents of text, train and held out: Python's own library, a file, or a data set of the Hub.

NOTE [ documents ]
1. A document is what the model sees as one whole: a file of the standard library, a row of a data set, an object of a
   ``.jsonl``. A ``.txt`` is one document, unless ``<|endoftext|>`` stands between several. Its lines or paragraphs
   would make poor documents, because nothing is learnt across their borders.
2. *Held out.* Where no validation split is given, the 5 % of the documents with the smallest hashes are held out: of
   the text, so that copies stay on one side, or of the path for the standard library. Of fewer than 20 documents the
   last 5 % of the text of each are held out instead. No seed, run or number of ranks changes that.
3. *Streaming* reads documents from the front of a data set until there are as many bytes as asked for, and keeps them
   on disk; from there on they are a data set like any other, in an order that depends on (seed, epoch) alone. The first
   documents of a sorted data set are no fair sample of it.
4. Rows without text are left out and counted. One document must fit into the host's memory; all of them need not.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import datasets
import numpy as np
from datasets import Features

from memsave_recipes.data.text_sources import (
    TEXT,
    Splits,
    progress_bars,
    read_file,
    read_hub,
    read_standard_library,
    stream_hub,
)
from memsave_recipes.errors import InputError

STANDARD_LIBRARY = "python-stdlib"
HELD_OUT = 0.05
FEW_DOCUMENTS = 20


@dataclass(frozen=True, kw_only=True)
class TextSplits:
    """Two data sets with the one column ``text``, a document a row, and one line on what was held or left out."""

    train: datasets.Dataset
    validation: datasets.Dataset
    notice: str | None


def load_documents(
    *,
    dataset: str | None = None,
    train_file: str | None = None,
    validation_file: str | None = None,
    text_column: str = "text",
    dataset_config_name: str | None = None,
    stream_bytes: int | None = None,
) -> TextSplits:
    """Load one source of text; NOTE [ documents ] says what a document is and which of them are held out.

    Args:
        dataset: ``python-stdlib`` (the running Python's own library, without its tests; offline), or what
            ``datasets.load_dataset`` takes. Code that comes with a data set is never run.
        train_file: a ``.txt`` in UTF-8, a ``.jsonl`` with one object a line, or a ``.parquet``.
        validation_file: the same for the held-out documents.
        text_column: where the text is in all but ``.txt``.
        dataset_config_name: which configuration of the Hub's data set.
        stream_bytes: stream the Hub's data set, and stop after that many bytes of text in UTF-8.

    Raises:
        InputError: no source or two; a source, a column or the text is missing, or is not what it should be.
    """
    _check_combination(dataset, train_file, validation_file, dataset_config_name, stream_bytes)
    if dataset == STANDARD_LIBRARY:
        with progress_bars(False):
            splits = read_standard_library()
    elif dataset is None:
        splits = {"train": read_file("--train_file", str(train_file), text_column)}
        if validation_file is not None:
            splits["validation"] = read_file("--validation_file", validation_file, text_column)
    elif stream_bytes is None:
        splits = read_hub(dataset, dataset_config_name, text_column)
    else:
        splits = stream_hub(dataset, dataset_config_name, text_column, stream_bytes)
    with progress_bars(False):
        return _train_and_validation(splits, f"--dataset {dataset}" if dataset else f"--train_file {train_file}")


def _check_combination(
    dataset: str | None,
    train_file: str | None,
    validation_file: str | None,
    dataset_config_name: str | None,
    stream_bytes: int | None,
) -> None:
    if (dataset is None) == (train_file is None):
        raise InputError("give the text by exactly one of --dataset python-stdlib, --dataset HUB_ID and --train_file")
    if validation_file is not None and train_file is None:
        raise InputError("--validation_file goes with --train_file: leave it out")
    if dataset in (None, STANDARD_LIBRARY):
        for flag, value in (("--dataset_config_name", dataset_config_name), ("--streaming", stream_bytes)):
            if value is not None:
                raise InputError(f"{flag} goes with --dataset HUB_ID: leave it out")


def _train_and_validation(splits: Splits, source: str) -> TextSplits:
    written = {split: _written(documents) for split, documents in splits.items()}
    num_blank = sum(map(len, splits.values())) - sum(map(len, written.values()))
    notes = [f"rows of {source} left out because they have no text: {num_blank}"] if num_blank else []
    if len(written) == 1:
        written, note = _hold_out(written["train"], source)
        notes.append(note)
    for split, documents in written.items():
        if not len(documents):
            raise InputError(f"{source} leaves no text for the {split} split: give more")
    notice = f"note: {'; '.join(notes)}" if notes else None
    only_text = {split: documents.select_columns("text") for split, documents in written.items()}
    return TextSplits(train=only_text["train"], validation=only_text["validation"], notice=notice)


def _written(documents: datasets.Dataset) -> datasets.Dataset:
    return documents.filter(_has_text, batched=True, input_columns="text")


def _has_text(texts: list[str | None]) -> list[bool]:
    return [bool(text and text.strip()) for text in texts]


def _hold_out(documents: datasets.Dataset, source: str) -> tuple[Splits, str]:
    """Both splits, and how they came to be: rule 2 of NOTE [ documents ]."""
    count = len(documents)
    if not count:
        raise InputError(f"{source} has no text: give documents that are not blank")
    if count < FEW_DOCUMENTS:
        kind = "its one document" if count == 1 else f"each of its {count} documents"
        splits = {"train": _each(documents, _head), "validation": _each(documents, _tail)}
        return splits, f"the last {HELD_OUT:.0%} of {kind} are held out of {source}"
    hashes = _hashes(documents)
    quota = ceil(HELD_OUT * count)
    is_held_out = hashes <= np.partition(hashes, quota - 1)[quota - 1]
    chosen = {"train": ~is_held_out, "validation": is_held_out}
    splits = {split: documents.select(np.flatnonzero(rows)) for split, rows in chosen.items()}
    return splits, f"{is_held_out.sum()} of the {count} documents of {source} are held out"


def _each(documents: datasets.Dataset, part: Callable[[str], dict[str, str]]) -> datasets.Dataset:
    others = documents.column_names
    return _written(documents.map(part, input_columns="text", remove_columns=others, features=Features(TEXT)))


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
    told_apart_by = "path" if "path" in documents.column_names else "text"
    others = documents.column_names
    hashed = documents.map(_hash, batched=True, input_columns=told_apart_by, remove_columns=others)
    return hashed.with_format("numpy")["hash"][:]


def _hash(names: list[str]) -> dict[str, list[int]]:
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    return {"hash": [int.from_bytes(digest, "big") >> 1 for digest in digests]}
