"""Documents of text, train and held out: Python's own library, a file, or a data set of the Hub.

Each source is read as a data set with the column ``text``. It lies in the cache of ``datasets`` as memory-mapped Arrow
files, and is read again when the source changes.

NOTE [ documents ]
1. A document is one text to the model: a file of the standard library, a row of a data set, an object of a
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

import glob
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Features, Value

from memsave_recipes.errors import InputError, check_file
from memsave_recipes.hub import loading_by_name, reason
from memsave_recipes.text import join_names

BYTES_A_TOKEN = 5  # of English in a vocabulary of 50k: 4 to 5
STANDARD_LIBRARY = "python-stdlib"
END_OF_TEXT = "<|endoftext|>"
TEXT = {"text": Value("large_string")}  # a plain string ends at 2 GiB a file
LONG_BYTES = 8 * 1024**2  # from here on, reading or tokenizing takes seconds and gets a progress bar
HELD_OUT = 0.05
MIN_DOCUMENTS = 20
VALIDATION_SHARE = 0.05  # of a streamed data set
VALIDATION_NAMES = ("validation", "valid", "val", "dev", "test")
LOADING_ERRORS = (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError)
# Tests hold broken files on purpose, packages do not belong to the library, and the tables of character sets are
# 1.4 MB of near copies, of which some would be held out although copies are trained on.
NOT_READ = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}

Splits = dict[str, datasets.Dataset]
Generator = Callable[..., Iterator[dict[str, str]]]


@dataclass(kw_only=True)
class TextArguments:
    """Which text."""

    dataset: str | None = field(default=None, metadata={"help": "python-stdlib (the default, built in) or a Hub id"})
    dataset_config_name: str | None = field(default=None, metadata={"help": "which part of a Hub data set"})
    train_file: str | None = field(default=None, metadata={"help": "text in a .txt, .jsonl or .parquet"})
    validation_file: str | None = field(default=None, metadata={"help": "default: a twentieth of the training text"})
    text_column: str = field(default="text", metadata={"help": "where the text is in a .jsonl, .parquet or Hub set"})
    streaming: bool = field(default=False, metadata={"help": "read only as much of a Hub set as --max_steps needs"})

    def __post_init__(self) -> None:
        self.dataset = self.dataset or (None if self.train_file else STANDARD_LIBRARY)


@dataclass(frozen=True, kw_only=True)
class TextSplits:
    """Two data sets with the one column ``text``, a document a row, and a line on the documents held or left out."""

    train: datasets.Dataset
    validation: datasets.Dataset
    notice: str | None


def load_documents(flags: TextArguments, *, stream_bytes: int | None = None) -> TextSplits:
    """Load the text that the flags name; NOTE [ documents ] says what a document is and which of them are held out.

    Code that comes with a data set of the Hub is never run.

    Args:
        stream_bytes: stream the Hub's data set, and stop after that many bytes of text in UTF-8.

    Raises:
        InputError: two sources; a source, a column or the text is missing or malformed.
    """
    _check_combination(flags, stream_bytes)
    dataset, config_name, text_column = flags.dataset, flags.dataset_config_name, flags.text_column
    if dataset == STANDARD_LIBRARY:
        with progress_bars(False):
            splits = read_standard_library()
    elif dataset is None:
        splits = {"train": read_file("--train_file", str(flags.train_file), text_column)}
        if flags.validation_file is not None:
            splits["validation"] = read_file("--validation_file", flags.validation_file, text_column)
    elif stream_bytes is None:
        splits = read_hub(dataset, config_name, text_column)
    else:
        splits = stream_hub(dataset, config_name, text_column, stream_bytes)
    with progress_bars(False):
        return _train_and_validation(splits, f"--dataset {dataset}" if dataset else f"--train_file {flags.train_file}")


def _check_combination(flags: TextArguments, stream_bytes: int | None) -> None:
    if (flags.dataset is None) == (flags.train_file is None):
        raise InputError("give the text by exactly one of --dataset python-stdlib, --dataset HUB_ID and --train_file")
    if flags.validation_file is not None and flags.train_file is None:
        raise InputError("--validation_file goes with --train_file: leave it out")
    if flags.dataset in (None, STANDARD_LIBRARY):
        for flag, value in (("--dataset_config_name", flags.dataset_config_name), ("--streaming", stream_bytes)):
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
    hashed_column = "path" if "path" in documents.column_names else "text"
    others = documents.column_names
    hashed = documents.map(_hash, batched=True, input_columns=hashed_column, remove_columns=others)
    hashes: np.ndarray = hashed.with_format("numpy")["hash"][:]
    return hashes


def _hash(names: list[str]) -> dict[str, list[int]]:
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    return {"hash": [int.from_bytes(digest, "big") >> 1 for digest in digests]}


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Hide the progress bars of ``datasets`` inside, unless they are to be ``shown``."""
    were_shown = not datasets.are_progress_bars_disabled()
    if not shown:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if were_shown:
            datasets.enable_progress_bars()


def read_standard_library() -> Splits:
    """``train``, with the columns ``text`` and ``path``: the ``.py`` files of the running Python's library."""
    features = Features({**TEXT, "path": Value("string")})
    root = sysconfig.get_path("stdlib")
    return {"train": _generated(_standard_library, features, f"the library at {root}", root=root, version=sys.version)}


def read_file(flag: str, name: str, text_column: str) -> datasets.Dataset:
    """The documents of a ``.txt``, ``.jsonl`` or ``.parquet``; ``flag`` is for the messages.

    Raises:
        InputError: no such file, another ending, or a content that does not fit its ending.
    """
    check_file(flag, name)
    path = Path(name)
    state, source = path.stat(), f"{flag} {name}"
    options = {"path": str(path.resolve()), "version": f"{state.st_size} {state.st_mtime_ns}"}
    with progress_bars(state.st_size > LONG_BYTES):
        match path.suffix.lower():
            case ".txt":
                return _generated(_txt_documents, Features(TEXT), source, **options)
            case ".jsonl":
                return _generated(_jsonl_documents, Features(TEXT), source, text_column=text_column, **options)
            case ".parquet":
                return _only_text(_read_parquet(name, source), text_column, source)
    raise InputError(f"{flag} {name} ends in none of .txt, .jsonl and .parquet: convert or rename it")


def read_hub(dataset: str, config_name: str | None, text_column: str) -> Splits:
    """``train`` and, where there is one, ``validation`` of a data set of the Hub.

    Raises:
        InputError: it cannot be loaded, or has no train split or no such column of strings.
    """
    source = f"--dataset {dataset}"
    with _loading(dataset):
        splits = datasets.load_dataset(dataset, config_name)
    return {split: _only_text(splits[name], text_column, source) for split, name in _chosen(splits, source).items()}


def stream_hub(dataset: str, config_name: str | None, text_column: str, num_bytes: int) -> Splits:
    """Like ``read_hub``, but only the first documents: up to ``num_bytes`` of text, of ``validation`` 5 % of that.

    Raises:
        InputError: as ``read_hub``.
    """
    source = f"--dataset {dataset}"
    with _loading(dataset):
        builder = datasets.load_dataset_builder(dataset, config_name)
        chosen = _chosen(builder.as_streaming_dataset(), source)
    options = {
        "dataset": dataset,
        "config_name": config_name,
        "text_column": text_column,
        "version": builder.cache_dir,  # holds the Hub's commit, or the names and times of local files
    }
    sizes = {"train": num_bytes, "validation": ceil(VALIDATION_SHARE * num_bytes)}
    return {
        split: _generated(_streamed, Features(TEXT), source, split=name, num_bytes=sizes[split], **options)
        for split, name in chosen.items()
    }


def _read_parquet(name: str, source: str) -> datasets.Dataset:
    try:
        return datasets.load_dataset("parquet", data_files=glob.escape(name), split="train")
    except LOADING_ERRORS as error:
        raise InputError(f"{source} cannot be read: {reason(error)}; check the file") from error


def _generated(generator: Generator, features: Features, source: str, **options: Any) -> datasets.Dataset:
    """The rows of ``generator(**options)``, cached under the hash of both; ``version`` is there for the hash alone."""
    options |= {"generator": generator, "source": source}
    try:
        return datasets.Dataset.from_generator(_not_empty, features=features, gen_kwargs=options)
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, OSError):
            raise InputError(f"{source} cannot be read: {error.__cause__}; check file and disk") from error
        raise


def _not_empty(generator: Generator, source: str, **options: Any) -> Iterator[dict[str, str]]:
    rows = generator(**options)
    first = next(rows, None)
    if first is None:
        raise InputError(f"{source} has no text: give documents that are not blank")
    yield first
    yield from rows


def _standard_library(root: str, version: str) -> Iterator[dict[str, str]]:
    seen = {""}  # copies, of which one might be held out
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - NOT_READ)
        for name in sorted(names):
            if not name.endswith(".py") or name.startswith("_sysconfigdata"):
                continue  # the latter describes the machine that built this Python
            path = Path(folder, name)
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if text.strip() not in seen:
                seen.add(text.strip())
                yield {"text": text, "path": path.relative_to(root).as_posix()}


def _txt_documents(path: str, version: str) -> Iterator[dict[str, str]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield from ({"text": document} for document in _between_ends(file) if document)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason}): convert it, for example with iconv") from error


def _between_ends(lines: Iterator[str]) -> Iterator[str]:
    """The texts between the ``<|endoftext|>``, without the empty lines around them."""
    pending: list[str] = []
    for line in lines:
        *ended, rest = line.split(END_OF_TEXT)
        for end in ended:
            yield "".join([*pending, end]).strip("\r\n")
            pending = []
        pending.append(rest)
    yield "".join(pending).strip("\r\n")


def _jsonl_documents(path: str, text_column: str, version: str) -> Iterator[dict[str, str]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield {"text": _text_of_row(line, f"{path} row {number}", text_column)}


def _text_of_row(line: bytes, place: str, text_column: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} is not JSON ({error}): a .jsonl holds one object a line") from error
    if not isinstance(row, dict):
        raise InputError(f"{place} is no JSON object: a .jsonl holds one object a line")
    text = row.get(text_column)
    if not isinstance(text, str):
        raise _no_text_column(place, text_column, row)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{place} holds half of a surrogate pair in {text_column!r}: repair the row") from error
    return text


def _streamed(
    dataset: str, config_name: str | None, split: str, text_column: str, num_bytes: int, version: str
) -> Iterator[dict[str, str]]:
    num_read = 0
    with _loading(dataset):
        for row in datasets.load_dataset(dataset, config_name, split=split, streaming=True):
            if text_column not in row or not isinstance(row[text_column], str | None):
                raise _no_text_column(f"--dataset {dataset}", text_column, row)
            text = row[text_column] or ""
            yield {"text": text}
            num_read += len(text.encode())
            if num_read >= num_bytes:
                return


def _chosen(found: Any, source: str) -> dict[str, str]:
    """Which of the splits serve as ``train`` and ``validation``."""
    if "train" not in found:
        raise InputError(f"{source} has no train split, only {join_names(found)}: use another one")
    validation = [("validation", name) for name in VALIDATION_NAMES if name in found]
    return {"train": "train", **dict(validation[:1])}


def _only_text(rows: datasets.Dataset, text_column: str, source: str) -> datasets.Dataset:
    if "string" not in str(getattr(rows.features.get(text_column), "dtype", None)):
        raise _no_text_column(source, text_column, rows.features)
    return rows.select_columns([text_column]).rename_columns({text_column: "text"})


def _no_text_column(source: str, text_column: str, columns: Any) -> InputError:
    return InputError(
        f"{source} has no string {text_column!r} among its {join_names(columns)}: name the text with --text_column"
    )


def _loading(dataset: str) -> AbstractContextManager[None]:
    return loading_by_name(dataset, f"--dataset {dataset}", "use python-stdlib or --train_file")
