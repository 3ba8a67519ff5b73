"""Documents of text, train and held out: Python's own library, files, or a data set of the Hub, as docs/data.md says.

NOTE [ documents ]
1. A document is one text to the model: nothing would be learnt across the lines of a table or a file. It must fit into
   memory, and so must a ``.json`` with an array.
2. *Held out.* Without a validation split, the 5 % of the documents with the smallest hashes are held out: hashes of the
   text, so that copies stay together, or of the path where documents have one. Of fewer than 20 documents the last 5 %
   of the text of each are held out. No seed, run or number of ranks changes that.
"""

import hashlib
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from datasets import Features, Value

from memsave_recipes.core.errors import InputError, is_text
from memsave_recipes.core.text import first_of, join_names
from memsave_recipes.data import MAX_NAMED
from memsave_recipes.data.sources import (
    HELD_OUT,
    NOTED,
    Splits,
    choose_splits,
    find_files,
    generated,
    given_keys,
    hold_out_smallest,
    holds_rows,
    not_utf_8,
    noted,
    of_each,
    of_rows,
    of_unused,
    progress_bars,
    read_files,
    rows_of,
    with_text,
)
from memsave_recipes.models.flags import option
from memsave_recipes.models.hub import loading_by_name

BYTES_A_TOKEN = 5  # of English in a vocabulary of 50k: 4 to 5
STANDARD_LIBRARY = "python-stdlib"
DOCSTRING_CHATS = "docstring-chats"
TEXT_COLUMN = "text"
ENDINGS = (".txt", ".md", ".jsonl", ".json", ".csv", ".parquet")
END_OF_TEXT = "<|endoftext|>"
TEXT = {"text": Value("large_string")}  # a plain string ends at 2 GiB a file
OF_FILES = {**TEXT, **NOTED}
TYPES = {"bool": "a truth value", "int": "a number", "float": "a number", "list": "a list", "dict": "an object"}
MIN_DOCUMENTS = 20
# Tests hold broken files on purpose, packages do not belong to the library, and the tables of character sets are
# 1.4 MB of near copies, of which some would be held out although copies are trained on.
NOT_READ = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}


@dataclass(kw_only=True)
class TextArguments:
    """Which text."""

    dataset: str | None = option(None, "built in: python-stdlib (default), docstring-chats; or a Hub id")
    dataset_config_name: str | None = option(None, "configuration of a Hub data set")
    train_file: list[str] | None = option(
        None,
        'files, folders, "patterns/*": .txt, .md, .jsonl, .json, .csv, .parquet',
        shown="first",
        resume="place",
    )
    validation_file: list[str] | None = option(
        None, "validation text; default: a twentieth of the training text", resume="place"
    )
    streaming: bool = option(False, "read only as much of a Hub set as --max_steps needs")

    def __post_init__(self) -> None:
        self.dataset = self.dataset or (None if self.train_file or self.validation_file else STANDARD_LIBRARY)


class TextSplits(NamedTuple):
    """Two data sets and a line on what is held or left out.

    A row is a document (column ``text``), or a conversation (``messages`` of role and content, and its ``place``).
    """

    train: datasets.Dataset
    validation: datasets.Dataset
    notice: str | None


def load_documents(
    flags: TextArguments, *, stream_bytes: int | None = None, only_validation: bool = False
) -> TextSplits:
    """Load the text that the flags name: NOTE [ documents ]. Code of a data set is never run.

    Args:
        stream_bytes: stream the Hub's data set, and stop after that many bytes of text in UTF-8.
        only_validation: ``--validation_file`` may be alone, and is the training split as well.

    Raises:
        InputError: a source that is missing, unreadable or malformed, or that has too little text.
    """
    check_sources(flags, stream_bytes, only_validation)
    dataset, config_name = flags.dataset, flags.dataset_config_name
    if dataset is None:
        return _load_files(flags)
    notes: list[str] = []
    if dataset == STANDARD_LIBRARY:
        with progress_bars(False):
            splits = _read_standard_library()
    elif stream_bytes is None:
        splits, notes = _read_hub(dataset, config_name)
    else:
        splits = _stream_hub(dataset, config_name, stream_bytes)
        notes = of_rows(splits.values())
    written, further = _train_and_validation(splits, dict.fromkeys(splits, f"--dataset {dataset}"))
    return _finished(written, notes + further)


def check_sources(flags: TextArguments, stream_bytes: int | None, only_validation: bool) -> None:
    """Raise ``InputError`` where the flags name two sources, or half of one, or options of another one."""
    if flags.validation_file and not flags.train_file and not (only_validation and flags.dataset is None):
        raise InputError("--validation_file needs --train_file or --eval_only: give both, or neither")
    if flags.dataset and flags.train_file:
        raise InputError("give the text by exactly one of --dataset python-stdlib, --dataset HUB_ID and --train_file")
    if flags.dataset in (None, STANDARD_LIBRARY, DOCSTRING_CHATS):
        for flag, value in (("--dataset_config_name", flags.dataset_config_name), ("--streaming", stream_bytes)):
            if value is not None:
                raise InputError(f"{flag} needs --dataset HUB_ID: leave it out")


def _load_files(flags: TextArguments) -> TextSplits:
    words = {"train": flags.train_file or [], "validation": flags.validation_file or []}
    found = {split: find_files(f"--{split}_file", named, ENDINGS) for split, named in words.items() if named}
    sources = {split: f"--{split}_file {first_of(words[split], 1)}" for split in found}
    splits = {
        split: read_files(files, _documents_of, Features(OF_FILES), sources[split], flag=f"--{split}_file")
        for split, files in found.items()
    }
    notes = [note for split, files in found.items() for note in files.notes(sources[split])]
    notes += of_rows(splits.values())
    written, further = _train_and_validation(splits, sources)
    return _finished(written, notes + further)


def _documents_of(files: Iterable[str], flag: str, version: str) -> Iterator[dict[str, Any]]:
    """Yield rows: ``text``, ``None`` or blank where there is none, and NOTED."""
    for path in files:
        source = f"{flag} {path}"
        if path.lower().endswith((".txt", ".md")):
            yield from ({"text": text, **noted()} for text in _texts_of_plain_file(path, source))
        else:
            yield from _rows_with_text(path, source)


def _rows_with_text(path: str, source: str) -> Iterator[dict[str, Any]]:
    text_column = _text_column_of(path, source)
    for number, row in rows_of(path, source, column=text_column):
        place = f"row {number} of {source}"
        _check_object(row, place)
        unused = [f"column {key}" for key in given_keys(row) - {text_column}]
        held = place if holds_rows(path, row) else ""
        yield {"text": text_of(row.get(text_column), place, text_column), **noted(unused, held)}


def _text_column_of(path: str, source: str) -> str:
    """Find the column of the documents: ``text`` where a row has it, else the only one that holds texts."""
    columns: dict[str, bool] = {}
    for number, row in rows_of(path, source, column=TEXT_COLUMN):
        _check_object(row, f"row {number} of {source}")
        if TEXT_COLUMN in row:
            return TEXT_COLUMN
        for name, value in row.items():
            columns[name] = columns.get(name, False) or isinstance(value, str)
    return _only_text_column(columns, source) if columns else TEXT_COLUMN


def _check_object(row: Any, place: str) -> None:
    if not isinstance(row, dict):
        raise InputError(f"{place} is not a JSON object: each row must be one")


def _only_text_column(columns: Mapping[str, bool], source: str) -> str:
    """Return ``text``, or the only one of the ``columns`` that holds texts; raises where there is none."""
    texts = [name for name, holds_text in columns.items() if holds_text]
    if TEXT_COLUMN in columns or len(texts) == 1:
        return TEXT_COLUMN if TEXT_COLUMN in columns else texts[0]
    found = f"(columns: {join_names(columns, MAX_NAMED)})"
    raise InputError(f"{source} has no column text, nor one alone that holds text {found}: rename that to text")


def _texts_of_plain_file(path: str, source: str) -> Iterator[str | None]:
    """Yield the texts between the ``<|endoftext|>``, without the empty lines around them; ``None`` where all are."""
    pending: list[str] = []
    is_blank = True
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for line in chain(file, [END_OF_TEXT]):
                *ended, rest = line.split(END_OF_TEXT)
                for end in ended:
                    if text := "".join([*pending, end]).strip("\r\n"):
                        yield text
                        is_blank = False
                    pending = []
                pending.append(rest)
    except UnicodeDecodeError as error:
        raise not_utf_8(source, error) from error
    if is_blank:
        yield None


def text_of(value: Any, place: str, text_column: str) -> str | None:
    """Return the text of a row. Raise ``InputError`` where it is something else, or cannot be written as UTF-8."""
    if value is None:
        return None
    if not isinstance(value, str):
        kind = TYPES.get(type(value).__name__, f"a {type(value).__name__}")
        raise InputError(f"{place} has {kind} in its column {text_column!r}, not a text: correct or remove it")
    if not is_text(value):
        raise InputError(f"{place} holds half of a surrogate pair in {text_column!r}: repair the row")
    return value


def _finished(splits: Splits, notes: Sequence[str]) -> TextSplits:
    texts = {split: documents.select_columns("text") for split, documents in splits.items()}
    return TextSplits(**texts, notice=f"note: {'; '.join(notes)}" if notes else None)


@progress_bars(False)
def _train_and_validation(splits: Splits, sources: dict[str, str]) -> tuple[Splits, list[str]]:
    """Return both splits without rows that have no text, and notes; a validation split alone serves as both."""
    written = {split: with_text(documents) for split, documents in splits.items()}
    num_blank: Counter[str] = Counter()
    for split, documents in splits.items():
        num_blank[sources[split]] += len(documents) - len(written[split])
    notes = [
        f"rows of {source} left out because they have no text: {count}" for source, count in num_blank.items() if count
    ]
    if "validation" not in written:
        written, note = _hold_out(written["train"], sources["train"])
        notes.append(note)
    written.setdefault("train", written["validation"])
    for split, documents in written.items():
        if not len(documents):
            raise InputError(
                f"{sources.get(split) or sources['validation']} leaves no text for the {split} split: give more"
            )
    return written, notes


def _hold_out(documents: datasets.Dataset, source: str) -> tuple[Splits, str]:
    """Split into ``train`` and ``validation`` by rule 2 of NOTE [ documents ], with a line that says how."""
    count = len(documents)
    if not count:
        raise InputError(f"{source} has no text: give documents that are not blank")
    if count < MIN_DOCUMENTS:
        kind = "its one document" if count == 1 else f"each of its {count} documents"
        splits = {"train": _cut_each(documents, held_out=False), "validation": _cut_each(documents, held_out=True)}
        return splits, f"the last {HELD_OUT:.0%} of {kind} are held out of {source}"
    named = "path" if "path" in documents.column_names else "text"
    hashes = of_each(documents, column=named, function=_hash, dtype="int64")
    splits = hold_out_smallest(documents, np.array(hashes))
    return splits, f"{len(splits['validation'])} of the {count} documents of {source} are held out"


def _cut_each(documents: datasets.Dataset, *, held_out: bool) -> datasets.Dataset:
    options = {"features": Features({**documents.features, **TEXT}), "fn_kwargs": {"held_out": held_out}}
    return with_text(documents.map(_cut, input_columns="text", **options))


def _cut(text: str, held_out: bool) -> dict[str, str]:
    """Take the last 5 %, or what is before: after the end of a line or word where one is near."""
    latest = int((1 - HELD_OUT) * len(text))
    ends = [text.rfind(mark, int((1 - 2 * HELD_OUT) * len(text)), latest) for mark in "\n "]
    begin = next((end + 1 for end in ends if end >= 0), latest)
    return {"text": text[begin:] if held_out else text[:begin]}


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def _read_standard_library() -> Splits:
    """Read ``train``, with the columns ``text`` and ``path``: the ``.py`` files of the running Python's library."""
    features = Features({**TEXT, "path": Value("string")})
    root = sysconfig.get_path("stdlib")
    return {"train": generated(_standard_library, features, f"the library at {root}", root=root, version=sys.version)}


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


def _read_hub(dataset: str, config_name: str | None) -> tuple[Splits, list[str]]:
    source = f"--dataset {dataset}"
    with _loading(dataset):
        splits = datasets.load_dataset(dataset, config_name)
    chosen = {split: splits[name] for split, name in choose_splits(splits, source).items()}
    columns = {split: _only_text_column(_kinds_of(rows.features), source) for split, rows in chosen.items()}
    texts = {split: _only_text(rows, columns[split], source) for split, rows in chosen.items()}
    unused = {f"column {name}" for split, rows in chosen.items() for name in {*rows.column_names} - {columns[split]}}
    return texts, of_unused(unused)


def _kinds_of(features: Features) -> dict[str, bool]:
    """Tell of each column whether it holds texts."""
    return {name: "string" in str(getattr(feature, "dtype", "list")) for name, feature in features.items()}


def _only_text(rows: datasets.Dataset, text_column: str, source: str) -> datasets.Dataset:
    kind = str(getattr(rows.features[text_column], "dtype", "list"))
    if "string" not in kind and kind != "null":
        raise InputError(f"{source} has no text in its column {text_column!r}, but {kind}: give another data set")
    return rows.select_columns([text_column]).rename_columns({text_column: "text"})


def _stream_hub(dataset: str, config_name: str | None, num_bytes: int) -> Splits:
    """Read only the first documents: up to ``num_bytes`` of text, of ``validation`` 5 % of that."""
    source = f"--dataset {dataset}"
    with _loading(dataset):
        builder = datasets.load_dataset_builder(dataset, config_name)
        chosen = choose_splits(builder.as_streaming_dataset(), source)
    options = {
        "dataset": dataset,
        "config_name": config_name,
        "version": builder.cache_dir,  # holds the Hub's commit, or the names and times of local files
    }
    sizes = {"train": num_bytes, "validation": ceil(HELD_OUT * num_bytes)}
    return {
        split: generated(_streamed, Features({**TEXT, **NOTED}), source, split=name, num_bytes=sizes[split], **options)
        for split, name in chosen.items()
    }


def _streamed(
    dataset: str, config_name: str | None, split: str, num_bytes: int, version: str
) -> Iterator[dict[str, Any]]:
    num_read, text_column, source = 0, "", f"--dataset {dataset}"
    with _loading(dataset):
        for row in datasets.load_dataset(dataset, config_name, split=split, streaming=True):
            kinds = {name: isinstance(value, str) for name, value in row.items()}
            text_column = text_column or _only_text_column(kinds, source)
            text = text_of(row[text_column], source, text_column) or ""
            yield {"text": text, **noted(f"column {key}" for key in row if key != text_column)}
            num_read += len(text.encode())
            if num_read >= num_bytes:
                return


def _loading(dataset: str) -> AbstractContextManager[None]:
    return loading_by_name(dataset, f"--dataset {dataset}", "use python-stdlib or --train_file")
