"""Where data comes from: files that the words of a flag name, rows of tables, splits of data sets, the cache.

Source files of installed libraries, for the built-in texts, are parsed, never imported, and held out whole, so that
similar texts of one file are in one split.
"""

import ast
import codecs
import csv
import glob
import hashlib
import json
import os
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import zip_longest
from math import ceil
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from memsave_recipes.core.errors import InputError, check_file, is_text
from memsave_recipes.core.text import first_of, join_names, printable
from memsave_recipes.data import MAX_NAMED
from memsave_recipes.data.fingerprint import digest_of
from memsave_recipes.models.hub import loading_by_name

LONG_BYTES = 8 * 1024**2  # from here on, reading or tokenizing takes seconds and gets a progress bar
# Folders whose files no library counts as its own.
NOT_ITS_OWN = {"test", "tests", "testing", "site-packages", "dist-packages", "vendor", "_vendor", "externals"}
HELD_OUT = 0.05  # of texts without a validation split
VALIDATION_FRACTION = 0.1  # of labelled samples
ROWS_AT_ONCE, MANY_ROWS = 256, 1000
VALIDATION_NAMES = ("validation", "validation_matched", "valid", "val", "dev", "test")
SPLIT_NAMES = {"train": ("train",), "validation": VALIDATION_NAMES}

NOTED = {"unused": datasets.Value("string"), "holds_rows": datasets.Value("string")}  # what a run says of rows

Splits = dict[str, datasets.Dataset]
Row = tuple[int, Any]  # its number in its file, from 1, and its values by their columns


@dataclass(frozen=True, kw_only=True)
class FoundFiles:
    """The files of the words of a flag, none twice; files of other endings are skipped, and repeated ones counted."""

    files: list[Path]
    num_words: int
    num_skipped: int
    num_repeated: int

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(path.stat().st_size for path in self.files)

    def notes(self, source: str) -> list[str]:
        """Say how many files are read, where the words do not, and how many are not; ``source`` names them."""
        numbers = {"with other endings skipped": self.num_skipped, "named twice and read once": self.num_repeated}
        not_read = ", ".join(f"{number} {name}" for name, number in numbers.items() if number)
        if not not_read and len(self.files) == self.num_words:
            return []
        return [f"files of {source}: {len(self.files)}" + (f" ({not_read})" if not_read else "")]


def find_files(flag: str, words: Sequence[str], endings: Collection[str]) -> FoundFiles:
    """Find the files of ``endings`` (in lower case) that ``words`` of a ``flag`` name, in the order of their names.

    A word is a file, whatever its name means to a pattern; a folder, for all files below it; or a pattern. Links to
    folders, which can lead in circles, are not followed. A file that several words name has the place of the first.

    Raises:
        InputError: a word that names nothing, or nothing with such an ending; a name that is not UTF-8.
    """
    found: dict[str, Path] = {}
    num_wanted = num_skipped = 0
    for word in words:
        named = _named_by(flag, word)
        wanted = [path for path in named if path.suffix.lower() in endings]
        if not wanted:
            raise InputError(_nothing_to_read(flag, word, endings))
        for path in wanted:
            if not is_text(str(path)):
                raise InputError(f"{flag} {word} names a file {os.fsencode(path)!r}, which is not UTF-8: rename it")
            check_file(flag, path)
            found.setdefault(os.path.realpath(path), path)
        num_wanted += len(wanted)
        num_skipped += len(named) - len(wanted)
    return FoundFiles(
        files=[*found.values()],
        num_words=len(words),
        num_skipped=num_skipped,
        num_repeated=num_wanted - len(found),
    )


def _named_by(flag: str, word: str) -> list[Path]:
    if not glob.has_magic(word) and not os.path.isdir(word):
        check_file(flag, word)
    matches = [word] if os.path.exists(word) else sorted(glob.glob(word, recursive=True))
    if not matches:
        raise InputError(f"{flag} {word} matches no file: check the pattern and the folder that it is looked up in")
    return [path for match in matches for path in (_below(match) if os.path.isdir(match) else [Path(match)])]


def _below(folder: str) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def _nothing_to_read(flag: str, word: str, endings: Collection[str]) -> str:
    if os.path.isfile(word):
        return f"{flag} {word} ends in none of {join_names(endings)}: convert or rename it"
    kind = "has no file below it" if os.path.isdir(word) else "matches no file"
    return f"{flag} {word} {kind} that ends in one of {join_names(endings)}: check the path"


def rows_of(path: str, source: str, *, column: str | None = None) -> Iterator[Row]:
    """Read the rows of a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet``, one by one but for a ``.json`` of an array.

    Args:
        column: the only one whose values are needed, so that of a ``.parquet`` that has it no others are read.

    Raises:
        InputError: the file is not what its ending says. Rows are counted from 1, those of a ``.jsonl`` are its lines.
    """
    match Path(path).suffix.lower():
        case ".parquet":
            return _rows_of_parquet(path, source, column)
        case ".csv":
            return _rows_of_csv(path, source)
        case ".json" if _begins_with_bracket(path):
            return enumerate(_parsed(Path(path).read_bytes(), source), start=1)
    return _rows_of_lines(path, source)


def _rows_of_lines(path: str, source: str) -> Iterator[Row]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _parsed(line, f"row {number} of {source}")


def _begins_with_bracket(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _parsed(content: bytes, place: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        rule = "give one object a line, or in a .json an array of objects"
        raise InputError(f"{place} is not JSON ({error}): {rule}") from error


def _rows_of_csv(path: str, source: str) -> Iterator[Row]:
    limit, read = csv.field_size_limit(sys.maxsize), 0  # a document may be longer than 128 KiB
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            columns = [name or f"Unnamed: {at}" for at, name in enumerate(header)]  # as pandas names them
            if twice := {name for name in columns if columns.count(name) > 1}:
                raise InputError(f"{source} has the column {join_names(twice)} twice in its header: rename one")
            read = reader.line_num
            for number, values in enumerate(filter(None, reader), start=1):
                if len(values) > len(columns):
                    rule = "put double quotes around a text with a comma, and no comma at the end"
                    raise InputError(f"row {number} of {source} has more values than there are columns: {rule}")
                if values == header:
                    raise InputError(f"row {number} of {source} is the header once more: remove it")
                yield number, dict(zip_longest(columns, values))
                read = reader.line_num
    except UnicodeDecodeError as error:
        raise not_utf_8(source, error) from error
    except csv.Error as error:
        raise InputError(f"{source} is no CSV after line {read} ({error}): check the quotes") from error
    finally:
        csv.field_size_limit(limit)


def _rows_of_parquet(path: str, source: str, column: str | None) -> Iterator[Row]:
    """Read the rows; columns beside ``column`` are only said to be there: ``True``."""
    with loading_by_name(path, source, "check the file"):
        found = datasets.load_dataset("parquet", data_files=glob.escape(path), split="train", streaming=True)
        rows = found.decode(False)
        others = dict.fromkeys(rows.features if column in rows.features else (), True)
        for number, row in enumerate(rows.select_columns(column) if others else rows, start=1):
            yield number, {**others, **row}


def of_left_out(num_read: int, endings: Counter[str]) -> list[str]:
    """Name the files of other ``endings``: ``36 of 40 files read: 4 .heic left out``; no line where there are none."""
    counts = [f"{count:,} {ending or 'without an ending'}" for ending, count in sorted(endings.items())]
    total = num_read + endings.total()
    return [f"{num_read:,} of {total:,} files read: {', '.join(counts)} left out"] if counts else []


def of_unused(keys: Collection[str]) -> list[str]:
    """Name the keys that nobody reads in a line, ``column id is not used``; no line where there are none."""
    columns = sorted(key.removeprefix("column ") for key in keys if key.startswith("column "))
    named = [f"column{'s' * (len(columns) > 1)} {first_of(columns, MAX_NAMED)}"] if columns else []
    if others := sorted(key for key in keys if not key.startswith("column ")):
        named.append(first_of(others, MAX_NAMED))
    return [printable(f"{', '.join(named)} {'is' if len(keys) == 1 else 'are'} not used")] if keys else []


def rows_inside(cells: Sequence[str], at: int, label_at: int | None = None) -> list[list[str]]:
    """Read the lines of cell ``at`` as rows of its table, as if no quote had opened it; none of a cell of one line.

    With ``label_at``, rows of which the cell holds no value in that column are left out.
    """
    if "\n" not in cells[at]:
        return []
    first, *inner, last = (next(csv.reader([line]), []) for line in cells[at].split("\n"))
    begins = [[*cells[:at], *first]] if label_at is None or label_at >= at else []
    ends = [[*last, *cells[at + 1 :]]] if label_at is None or label_at < len(last) else []
    return [*begins, *inner, *ends]


def holds_rows(path: str, row: Any) -> bool:
    """Tell whether lines of a cell of a CSV read as whole rows, as where a stray quote has swallowed them.

    Lines of prose with as many commas do not: a space follows these.
    """
    if not path.lower().endswith(".csv") or len(row) < 2:
        return False
    cells = ["" if cell is None else cell for cell in row.values()]
    found = (rows_inside(cells, at) for at in range(len(cells)))
    return any(rows and all(_looks_like_one_of(inside, cells) for inside in rows) for rows in found)


def _looks_like_one_of(inside: list[str], cells: list[str]) -> bool:
    return len(inside) == len(cells) and not any(cell.startswith(" ") for cell in inside[1:])


def given_keys(row: Any) -> set[str]:
    """Return the keys with a value."""
    return {key for key, item in row.items() if item not in (None, "", [], {})} if isinstance(row, dict) else set()


def noted(unused: Iterable[str] = (), holds_rows: str = "") -> dict[str, str]:
    """Return the columns ``NOTED`` of a row: its keys that nobody reads, and its place if it ``holds_rows``."""
    return {"unused": json.dumps(sorted(unused), ensure_ascii=False), "holds_rows": holds_rows}


def of_rows(splits: Iterable[datasets.Dataset]) -> list[str]:
    """Say once what ``NOTED`` holds of the rows of all splits."""
    columns = {name: {value for rows in splits for value in rows.unique(name)} for name in NOTED}
    notes = of_unused({key for keys in columns["unused"] for key in json.loads(keys)})
    if places := sorted(columns["holds_rows"] - {""}):
        rule = "if a stray double quote opens one, write it twice"
        notes.append(f"a text holds lines that read as rows of the table ({first_of(places, 1)}): {rule}")
    return notes


def not_utf_8(source: str, error: UnicodeDecodeError) -> InputError:
    """Return the refusal of a file."""
    return InputError(f"{source} is not UTF-8 text ({error.reason}): convert it, for example with iconv")


def choose_splits(available: Iterable[str], source: str, *hints: str) -> dict[str, str]:
    """Find the names of ``train`` and ``validation`` in a source; raise ``InputError`` where there is no ``train``."""
    available = list(available)
    chosen = {}
    for split, names in SPLIT_NAMES.items():
        present = [name for name in names if name in available]
        if present:
            chosen[split] = present[0]
        elif split == "train":
            found = join_names(available, MAX_NAMED)
            hint = ", ".join((f"one must be named {' or '.join(names)}", *hints))
            raise InputError(f"{source} has no {split} split (found: {found}): {hint}")
    return chosen


def hold_out(rows: datasets.Dataset, is_held_out: np.ndarray) -> Splits:
    """Split rows into ``train`` and, where ``is_held_out``, bool (N,), ``validation``."""
    chosen = {"train": ~is_held_out, "validation": is_held_out}
    return {split: rows.select(np.flatnonzero(numbers)) for split, numbers in chosen.items()}


def hold_out_smallest(rows: datasets.Dataset, hashes: np.ndarray) -> Splits:
    """Hold out the 5 % of the rows with the smallest hashes, int64 (N,), so that copies stay together."""
    quota = ceil(HELD_OUT * len(hashes))
    return hold_out(rows, hashes <= np.partition(hashes, quota - 1)[quota - 1])


def choose_held_out(labels: np.ndarray, names: Sequence[str], seed: int) -> np.ndarray:
    """Choose the samples to hold out, sorted, by a hash of seed and name; none where no class can spare one.

    Every class keeps one to train on, and at least one is held out. scikit-learn's stratified split, which ``datasets``
    uses, refuses a class of one sample, and fewer held-out samples than classes. ``labels`` are int64 (N,), from 0; the
    order of ``names`` does not matter.
    """
    hashes = np.array([digest_of(f"{seed} {name}".encode()) for name in names])
    sizes = np.bincount(labels)
    by_class = np.lexsort((hashes, labels))
    rank = np.empty_like(by_class)  # of an image within its class, from 0
    rank[by_class] = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    # The first in a class of n has the share up to 1 / n of it, half of that on average.
    share = (rank + 0.5) / sizes[labels]
    in_turn = np.lexsort((hashes, share))
    can_go = in_turn[rank[in_turn] < sizes[labels[in_turn]] - 1]
    return np.sort(can_go[: max(1, round(VALIDATION_FRACTION * len(labels)))])


def of_each(
    rows: datasets.Dataset,
    *,
    column: str,
    function: Callable[[Any], Any],
    dtype: str,
    threads: int = 0,
    desc: str | None = None,
) -> list[Any]:
    """Apply ``function`` to each value of a column, in ``threads``; ``datasets`` keeps the answers (``dtype``)."""
    with progress_bars(desc is not None and len(rows) > MANY_ROWS):
        answered = rows.map(
            _answers,
            batched=True,
            batch_size=ROWS_AT_ONCE,
            input_columns=column,
            remove_columns=rows.column_names,
            features=datasets.Features(answer=datasets.Value(dtype)),
            fn_kwargs={"function": function, "threads": threads},
            desc=desc,
        )
    answers: list[Any] = answered["answer"][:]
    return answers


def with_text(rows: datasets.Dataset, columns: Sequence[str] = ("text",)) -> datasets.Dataset:
    """Leave out rows where one of the ``columns`` is null, or all are blank."""
    return rows.filter(_have_text, batched=True, input_columns=list(columns))


def _have_text(*columns: list[str | None]) -> list[bool]:
    return [None not in row and any(text and text.strip() for text in row) for row in zip(*columns, strict=True)]


def _answers(values: list[Any], function: Callable[[Any], Any], threads: int) -> dict[str, list[Any]]:
    if not threads:
        return {"answer": list(map(function, values))}
    with ThreadPoolExecutor(threads) as pool:
        return {"answer": list(pool.map(function, values))}


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Hide the progress bars of ``datasets`` inside, unless they are to be ``shown`` and there is a terminal."""
    were_shown = not datasets.are_progress_bars_disabled()
    if not (shown and sys.stderr.isatty()):
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if were_shown:
            datasets.enable_progress_bars()


def generated(
    generator: Callable[..., Iterator[dict[str, Any]]], features: datasets.Features, source: str, **options: Any
) -> datasets.Dataset:
    """Cache the rows of ``generator(**options)`` under the hash of both; ``version`` is there for the hash alone.

    Raises ``InputError`` where there are no rows, or a file or the cache cannot be read.
    """
    options |= {"generator": generator, "source": source}
    try:
        return datasets.Dataset.from_generator(_not_empty, features=features, gen_kwargs=options)
    except (OSError, datasets.exceptions.DatasetGenerationError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, InputError):
            raise cause from None
        if isinstance(cause, OSError):
            raise InputError(f"{source} cannot be read: {cause}; check file and disk") from error
        raise


def read_files(
    found: FoundFiles, generator: Callable[..., Iterator[Any]], features: datasets.Features, source: str, **options: Any
) -> datasets.Dataset:
    """Cache the rows of ``generator(files, ...)``, of paths, until a file changes."""
    files = tuple(map(os.path.abspath, found.files))
    version = " ".join(f"{state.st_size} {state.st_mtime_ns}" for state in map(os.stat, found.files))
    with progress_bars(found.num_bytes > LONG_BYTES):
        return generated(generator, features, source, files=files, version=version, **options)


def _not_empty(generator: Callable[..., Iterator[Any]], source: str, **options: Any) -> Iterator[Any]:
    rows = generator(**options)
    first = next(rows, None)
    if first is None:
        raise InputError(f"{source} has no text: give documents that are not blank")
    yield first
    yield from rows


def source_files(library: str) -> Iterator[tuple[bool, Path]]:
    """Yield each source file, in an order without meaning: whether it is held out (3 of 16 are), and its path."""
    root = source_folder(library)
    files = {}
    for path in root.rglob("*.py"):
        inside = path.relative_to(root)
        if not NOT_ITS_OWN & set(inside.parts):
            files[hashlib.sha256(f"{library}/{inside.as_posix()}".encode()).hexdigest()] = path
    for digest in sorted(files):
        yield digest[-1] in "012", files[digest]


def source_folder(library: str) -> Path:
    """Find a library's source files without an import of it."""
    if library == "python":
        return Path(sysconfig.get_path("stdlib"))
    specification = find_spec(library)
    folders = (specification.submodule_search_locations if specification else None) or ["no such folder"]
    return Path(folders[0])


def parse_source(path: Path) -> ast.Module:
    """Parse a file; return an empty module where this Python cannot: templates, and code for other versions."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes that a future Python refuses
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])
