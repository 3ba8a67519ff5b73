"""Files of text: those that the words of a flag name, and their documents: mixed by weights, and held out.

NOTE [ words for files ]
1. A word is a file, a folder or a pattern. A file is read whatever its name otherwise means to a pattern.
2. A folder stands for all files below it, a pattern (``*``, ``?``, ``[a-z]``, ``**`` for folders at any depth) for
   the files and folders that match, both in the order of their names. Hidden ones are skipped, and files of endings
   that nothing reads are counted. Links to folders are not followed, since they can lead in circles.
3. A file that several words name is read once, at the place of the first.

NOTE [ formats ]
1. A ``.txt`` or ``.md`` in UTF-8 is one document, unless ``<|endoftext|>`` stands between several. Its lines or
   paragraphs would make poor documents, because nothing is learnt across their borders.
2. A row is a document in a ``.jsonl`` (one object a line), a ``.json`` (the same, or an array of objects), a ``.csv``
   (separated by commas, with a header) and a ``.parquet``.
3. A row without text has null, an empty text or blanks in the column of the text, or lacks that column where other rows
   of the file have it. It is counted and left out. A file without the column is refused, and a value that is no text.
4. Files are read document by document. Only a ``.json`` with an array is read as a whole, which takes several times
   its size in memory: as a ``.jsonl`` it may have any size.

NOTE [ mixture ]
1. A pass over a mixture has as much text as its sources have together; the weights say how much of that comes from
   each, in bytes of UTF-8 and up to a document. Bytes, because tokens follow them, whereas documents may differ in
   length from source to source.
2. A source with more text than its share leaves documents out, at random by the seed; they are the same ones in every
   pass. One with less repeats all its documents equally often, and some of them once more.
3. Documents of all sources follow one another in a random order by the seed, so that each part of the line of tokens
   has the mixture, and so has the text that a tokenizer is trained on.

NOTE [ held out ]
Where a data set brings no validation split, the 5 % of the documents with the smallest hashes are held out: hashes of
the text, so that copies stay on one side, or of the path where documents have one. Of fewer than 20 documents the last
5 % of the text of each are held out instead. No seed, run or number of ranks changes that.
"""

import codecs
import csv
import glob
import hashlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from datasets import Features, Value

from memsave_recipes.errors import InputError, check_file, is_text
from memsave_recipes.hub import reason
from memsave_recipes.text import join_names

ENDINGS = (".txt", ".md", ".jsonl", ".json", ".csv", ".parquet")
END_OF_TEXT = "<|endoftext|>"
LOADING_ERRORS = (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError)
MAX_NAMED = 12  # columns in a message
TYPES = {"bool": "a truth value", "int": "a number", "float": "a number", "list": "a list", "dict": "an object"}

Row = tuple[int, dict[str, Any]]
"""Its number in its file, from 1, and its values by their columns."""


@dataclass(frozen=True, kw_only=True)
class FoundFiles:
    """The files of each word of a flag, none of them twice.

    Args:
        by_word: in the order in which they are read.
        num_skipped: those of other endings in folders and among the matches of patterns.
        num_repeated: how often a word named a file that one before it, or itself, had named already.
    """

    by_word: tuple[tuple[Path, ...], ...]
    num_skipped: int
    num_repeated: int

    @property
    def files(self) -> list[Path]:
        """Those of all words."""
        return [path for paths in self.by_word for path in paths]

    def notes(self, source: str) -> list[str]:
        """How many files are read, where the words do not say so, and how many are not; ``source`` names them."""
        numbers = {"with other endings skipped": self.num_skipped, "named twice and read once": self.num_repeated}
        not_read = ", ".join(f"{number} {name}" for name, number in numbers.items() if number)
        if not not_read and len(self.files) == len(self.by_word):
            return []
        return [f"files of {source}: {len(self.files)}" + (f" ({not_read})" if not_read else "")]


def list_files(flag: str, words: Sequence[str], endings: Collection[str] = ENDINGS) -> list[Path]:
    """The files that ``words`` name: NOTE [ words for files ].

    Args:
        flag: such as ``--train_file``, for the messages.
        endings: of the files that are wanted, in lower case.

    Raises:
        InputError: a word that names nothing, or nothing with such an ending; a name that is not UTF-8.
    """
    return find_files(flag, words, endings).files


def find_files(flag: str, words: Sequence[str], endings: Collection[str] = ENDINGS) -> FoundFiles:
    """As ``list_files``, with the word that each file belongs to and the numbers of those left out."""
    seen: set[str] = set()
    by_word, num_skipped, num_repeated = [], 0, 0
    for word in words:
        named = _named_by(flag, word)
        wanted = [path for path in named if path.suffix.lower() in endings]
        if not wanted:
            raise InputError(_nothing_to_read(flag, word, endings))
        for path in wanted:
            _check(flag, word, path)
        new = list(_unseen(wanted, seen))
        by_word.append(tuple(new))
        num_skipped += len(named) - len(wanted)
        num_repeated += len(wanted) - len(new)
    return FoundFiles(by_word=tuple(by_word), num_skipped=num_skipped, num_repeated=num_repeated)


def _named_by(flag: str, word: str) -> list[Path]:
    """All files of ``word``, whatever their endings."""
    if not glob.has_magic(word) and not os.path.isdir(word):
        check_file(flag, word)
    matches = [word] if os.path.exists(word) else sorted(glob.glob(word, recursive=True))
    if not matches:
        raise InputError(f"{flag} {word} matches no file: check the pattern and the folder that it is looked up in")
    return [path for match in matches for path in (_below(match) if os.path.isdir(match) else [Path(match)])]


def _check(flag: str, word: str, path: Path) -> None:
    if not is_text(str(path)):
        raise InputError(f"{flag} {word} names a file {os.fsencode(path)!r}, which is not UTF-8: rename it")
    check_file(flag, path)


def _below(folder: str) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def _nothing_to_read(flag: str, word: str, endings: Collection[str]) -> str:
    if os.path.isfile(word):
        return f"{flag} {word} ends in none of {join_names(endings)}: convert or rename it"
    kind = "has no file below it" if os.path.isdir(word) else "matches no file"
    return f"{flag} {word} {kind} that ends in one of {join_names(endings)}: check the path"


def _unseen(paths: Sequence[Path], seen: set[str]) -> Iterator[Path]:
    """Those of files that are not in ``seen``, which they join."""
    for path in paths:
        real = os.path.realpath(path)
        if real not in seen:
            seen.add(real)
            yield path


def read_documents(
    files: Iterable[tuple[str, str, int]], flag: str, text_column: str
) -> Iterator[dict[str, str | int | None]]:
    """The documents of files as rows: ``text``, ``None`` or blank where there is none, and ``source``.

    Args:
        files: of each its path, its version, which is there for caches alone, and the number of its source.
        flag: such as ``--train_file``, for the messages.

    Raises:
        InputError: NOTE [ formats ] is broken. Rows are counted from 1, those of a ``.jsonl`` are its lines.
    """
    for path, _, source in files:
        yield from ({"text": text, "source": source} for text in _texts_of(path, f"{flag} {path}", text_column))


def no_text_column(place: str, text_column: str, columns: Iterable[str]) -> InputError:
    """What to say of rows at ``place`` that have only other ``columns``."""
    found = f"(columns: {join_names(columns, MAX_NAMED)})"
    return InputError(f"{place} has no text column {text_column!r} {found}: name it with --text_column")


def text_of(value: Any, place: str, text_column: str) -> str | None:
    """The text of a row, checked.

    Raises:
        InputError: it is something else, or cannot be written as UTF-8.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        kind = TYPES.get(type(value).__name__, f"a {type(value).__name__}")
        way_out = "correct it, or name another column with --text_column"
        raise InputError(f"{place} has {kind} in its column {text_column!r}, not a text: {way_out}")
    if not is_text(value):
        raise InputError(f"{place} holds half of a surrogate pair in {text_column!r}: repair the row")
    return value


def _texts_of(path: str, source: str, text_column: str) -> Iterator[str | None]:
    match Path(path).suffix.lower():
        case ".txt" | ".md":
            return _texts_of_plain_file(path, source)
        case ".parquet":
            return _texts_of_parquet(path, source, text_column)
        case ".csv":
            return _texts_of_rows(_rows_of_csv(path, source, text_column), source, text_column)
        case ".json" if _begins_with_bracket(path):
            return _texts_of_rows(_rows_of_array(path, source), source, text_column)
    return _texts_of_rows(_rows_of_lines(path, source), source, text_column)


def _texts_of_plain_file(path: str, source: str) -> Iterator[str | None]:
    is_blank = True
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for text in filter(None, _between_ends(file)):
                yield text
                is_blank = False
    except UnicodeDecodeError as error:
        raise _not_utf_8(source, error) from error
    if is_blank:
        yield None


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


def _texts_of_rows(rows: Iterator[Row], source: str, text_column: str) -> Iterator[str | None]:
    first, is_there = None, False
    for number, row in rows:
        first = first or (number, row.keys())
        is_there = is_there or text_column in row
        yield text_of(row.get(text_column), f"row {number} of {source}", text_column)
    if first and not is_there:
        raise no_text_column(f"row {first[0]} of {source}", text_column, first[1])


def _rows_of_lines(path: str, source: str) -> Iterator[Row]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _object(_parsed(line, f"row {number} of {source}"), f"row {number} of {source}")


def _rows_of_array(path: str, source: str) -> Iterator[Row]:
    values = _parsed(Path(path).read_bytes(), source)
    yield from ((number, _object(row, f"row {number} of {source}")) for number, row in enumerate(values, start=1))


def _begins_with_bracket(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _parsed(content: bytes, place: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        rule = "give one object a line, or in a .json an array of objects"
        raise InputError(f"{place} is not JSON ({error}): {rule}") from error


def _object(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise InputError(f"{place} is no JSON object: each row must be one")
    return row


def _rows_of_csv(path: str, source: str, text_column: str) -> Iterator[Row]:
    limit = csv.field_size_limit(sys.maxsize)  # a document may be longer than 128 KiB
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            if text_column not in (columns := reader.fieldnames or [text_column]):
                raise no_text_column(source, text_column, columns)
            for number, row in enumerate(reader, start=1):
                if None in row:
                    rule = "put double quotes around a text with a comma"
                    raise InputError(f"row {number} of {source} has more values than there are columns: {rule}")
                yield number, row
    except UnicodeDecodeError as error:
        raise _not_utf_8(source, error) from error
    except csv.Error as error:
        raise InputError(f"{source} is no CSV after line {reader.line_num} ({error}): check the quotes") from error
    finally:
        csv.field_size_limit(limit)


def _texts_of_parquet(path: str, source: str, text_column: str) -> Iterator[str | None]:
    try:
        rows = datasets.load_dataset("parquet", data_files=glob.escape(path), split="train", streaming=True)
        check_text_column(rows.features, source, text_column)
        yield from (row[text_column] for row in rows.select_columns(text_column))
    except InputError:
        raise
    except LOADING_ERRORS as error:
        raise InputError(f"{source} cannot be read: {reason(error)}; check the file") from error


def check_text_column(features: datasets.Features, source: str, text_column: str) -> None:
    """Raises ``InputError`` where a table has no such column, or one of something else."""
    if text_column not in features:
        raise no_text_column(source, text_column, features)
    kind = str(getattr(features[text_column], "dtype", "list"))
    if "string" not in kind and kind != "null":
        way_out = "name another one with --text_column"
        raise InputError(f"{source} has no text in its column {text_column!r}, but {kind}: {way_out}")


def _not_utf_8(source: str, error: UnicodeDecodeError) -> InputError:
    return InputError(f"{source} is not UTF-8 text ({error.reason}): convert it, for example with iconv")


class _Part(NamedTuple):
    """What a pass takes from a source: documents by their indices, and their bytes."""

    indices: np.ndarray  # (M,)
    num_bytes: int


def mix(
    documents: datasets.Dataset, names: Sequence[str], weights: Sequence[float], seed: int
) -> tuple[datasets.Dataset, str]:
    """A pass over ``documents`` (``text``, and ``source`` from 0 on) by NOTE [ mixture ], and a line about it.

    Args:
        names: of the sources.
        weights: of the sources, above 0, with any sum.

    Raises:
        InputError: a source has no documents.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    num_bytes = _num_bytes(documents)
    source_of = documents.with_format("numpy")["source"][:]
    members = [np.flatnonzero(source_of == number) for number in range(len(names))]
    for name, indices in zip(names, members, strict=True):
        if not len(indices):
            raise InputError(f"--mix_weights: {name} has no text to train on: leave it and its weight out")
    shares = np.asarray(weights) / np.sum(weights) * num_bytes.sum()
    parts = [_drawn(indices, num_bytes, share, generator) for indices, share in zip(members, shares, strict=True)]
    mixed = documents.select(generator.permutation(np.concatenate([part.indices for part in parts])))
    return mixed, _note(names, members, parts)


def _drawn(indices: np.ndarray, num_bytes: np.ndarray, share: float, generator: np.random.Generator) -> _Part:
    """Documents with ``share`` bytes: all as often as they fit in whole, and random ones once more; one at least."""
    order = generator.permutation(indices)
    repeats, rest = divmod(share, int(num_bytes[indices].sum()))
    sums = np.concatenate([[0], np.cumsum(num_bytes[order])])
    nearest = int(np.abs(sums - rest).argmin())
    drawn = np.concatenate([np.tile(indices, int(repeats)), order[: nearest or (not repeats)]])
    return _Part(drawn, int(num_bytes[drawn].sum()))


def _note(names: Sequence[str], members: Sequence[np.ndarray], parts: Sequence[_Part]) -> str:
    total = sum(part.num_bytes for part in parts)
    taken = [
        f"{len(part.indices):,} documents from {name} (of {len(indices):,}; {part.num_bytes / total:.1%} of the bytes)"
        for name, indices, part in zip(names, members, parts, strict=True)
    ]
    return f"a pass takes {', '.join(taken)}"


def _num_bytes(documents: datasets.Dataset) -> np.ndarray:
    """Of each document in UTF-8, int64 (N,)."""
    measured = documents.map(_measure, batched=True, input_columns="text", remove_columns=documents.column_names)
    sizes: np.ndarray = measured.with_format("numpy")["num_bytes"][:]
    return sizes


def _measure(texts: list[str]) -> dict[str, list[int]]:
    return {"num_bytes": [len(text.encode()) for text in texts]}


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
