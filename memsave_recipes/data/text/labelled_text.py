"""Labelled texts, alone or in pairs: the docstrings of installed libraries, files, or a data set of the Hub.

A label is a class, a list of classes or a number; the first one of the training texts decides for all. The classes are
of the training texts; a label that is none of them is refused with its row. Rows without text (null in a column of
text, or only blanks in all of them) are left out and counted; one without a label is refused. Without validation texts
a part of each class is held out, copies of a text together.

The class of a docstring is its library. Library names are masked, because a model could just look for them, and of all
docstrings that open with the same words only the first is kept.
"""

import ast
import glob
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from platform import python_version
from typing import Any, NamedTuple

import datasets
import numpy as np

from memsave_recipes.core.errors import InputError, require
from memsave_recipes.core.text import first_of, join_names, read_json
from memsave_recipes.data import MAX_NAMED, in_classes_of_model
from memsave_recipes.data.fingerprint import digest_of
from memsave_recipes.data.sources import (
    Splits,
    choose_held_out,
    choose_splits,
    find_files,
    generated,
    hold_out,
    of_unused,
    parse_source,
    progress_bars,
    rows_inside,
    rows_of,
    source_files,
    source_folder,
    with_text,
)
from memsave_recipes.models.flags import option
from memsave_recipes.models.hub import loading_by_name
from memsave_recipes.models.labels import MULTI, REGRESSION, SINGLE, ProblemType

BUILT_IN = "docstrings"
FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
OLD_HUB_IDS = {"glue": "nyu-mll/glue"}
PAIRS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)
TEXTS = ("text", "sentence", "content", "review")
LABELS = ("label", "labels", "class", "category")
WHOLE = re.compile(r"0|-?[1-9]\d{0,17}")  # a whole number as Python would write it, in 64 bits

DECIMAL = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?")  # as programs write a column of floats, all of them with a point
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.I)
WITH_COMMA = re.compile(r"[+-]?\d+,\d+")
NO_NUMBERS, MISSING = {"nan", "inf", "infinity"}, {"na", "n/a", "null", "none"}
LABEL_RULES = {
    SINGLE: "labels are words or whole numbers",
    MULTI: "labels are lists of words or whole numbers, each of them once",
    REGRESSION: "labels are finite numbers",
}

# Each package with its distribution: the standard library, and requirements of setup.cfg with enough to read.
LIBRARIES = {
    "python": None,
    "numpy": "numpy",
    "torch": "torch",
    "transformers": "transformers",
    "sklearn": "scikit-learn",
    "kornia": "kornia",
}
NAMES = re.compile(r"(?i)pytorch|torch|numpy|\bnp\b|python|transformers|hugging ?face|scikit-learn|sklearn|kornia")
MASK = "LIB"
MAX_TRAIN, MAX_VALIDATION = 600, 150  # texts of a library
MAX_OF_A_FILE = 10  # otherwise a few long files would be half of numpy
MIN_WORDS = 10  # of a text; and that many make an opening
COLUMNS = {
    "text": datasets.Value("string"),
    "label": datasets.ClassLabel(names=list(LIBRARIES)),
    "held_out": datasets.Value("bool"),
}


@dataclass(kw_only=True)
class LabelledTextArguments:
    """The labelled texts."""

    dataset: str | None = option(None, "docstrings (the default, built in) or a Hub id")
    dataset_config_name: str | None = option(None, "part of a Hub data set, such as sst2")
    train_file: list[str] | None = option(
        None,
        'labelled texts: files, folders, "patterns/*" (.csv, .json, .jsonl, .parquet)',
        shown="first",
        resume="place",
    )
    validation_file: list[str] | None = option(None, "the same; default: a part of --train_file", resume="place")
    text_column: list[str] | None = option(None, "one, or two of pairs; default: the first of the usual names")
    label_column: str | None = option(None, "default: the first of the usual names")

    def __post_init__(self) -> None:
        self.dataset = self.dataset or (None if self.train_file or self.validation_file else BUILT_IN)
        named = self.text_column
        require(named is None or len(named) < 3, "--text_column", " ".join(named or ()), "one column, or two of pairs")


@dataclass(frozen=True, kw_only=True)
class LabelledText:
    """Two splits with the columns ``text``, of pairs also ``text_pair``, and ``label``.

    A label is the index of a class, a list of them, or a number, by ``problem_type``; numbers are one unnamed class.
    Without training texts, ``train`` is ``validation``. ``of_files`` are lines on the rows and files that were read.
    """

    train: datasets.Dataset
    validation: datasets.Dataset
    label_names: tuple[str, ...]
    problem_type: ProblemType = SINGLE
    of_files: tuple[str, ...] = ()

    @property
    def baseline(self) -> dict[str, float]:
        """``majority_share``, the accuracy of always answering the most frequent class of the held-out texts."""
        if self.problem_type != SINGLE:
            return {}
        labels = self.validation["label"][:]
        return {"majority_share": Counter(labels).most_common(1)[0][1] / len(labels)}

    @property
    def notice(self) -> str:
        """A line on the size of the splits, on what labels are, and the accuracy of the largest class."""
        sizes = f"{len(self.validation):,} held out"
        if self.train is not self.validation:
            sizes = f"{len(self.train):,} training texts, {sizes}"
        classes = f"{len(self.label_names)} classes, any number of them a text: {self.problem_type}"
        if self.problem_type == SINGLE:
            share = self.baseline["majority_share"]
            classes = f"{len(self.label_names)} classes, the largest with {share:.1%} of those held out"
        if self.problem_type == REGRESSION:
            labels = self.train["label"][:]
            classes = f"labels are numbers from {min(labels):g} to {max(labels):g}: {self.problem_type}"
        return "; ".join([sizes, classes, *self.of_files])

    def documents(self) -> Iterator[str]:
        """Yield the training texts, those of pairs one by one, for a tokenizer to be trained on."""
        for column in ("text", "text_pair"):
            if column in self.train.column_names:
                yield from self.train[column]


def load_labelled_text(
    flags: LabelledTextArguments,
    *,
    seed: int = 0,
    model_labels: Sequence[str] | None = None,
    model_problem: ProblemType | None = None,
) -> LabelledText:
    """Load the labelled texts that the flags name: built in, of files, or of the Hub (``glue`` is ``nyu-mll/glue``).

    With ``model_labels`` and ``model_problem``, the classes of a model that is only evaluated and what its labels are,
    ``--validation_file`` may be alone. Without validation texts, a part by the ``seed`` is held out.

    Raises:
        InputError: two sources; a file, split, column, row, text or label is missing; fewer than two classes; a
            label outside the classes. Rows are counted from 1, in each file.
    """
    splits, notes = _read_source(flags, only_validation=model_labels is not None)
    with progress_bars(False):
        first = splits.get("train") or splits["validation"]
        columns = _find_columns(first[0], flags.text_column or (), flags.label_column)
        problem = model_problem or _problem_of(first, columns)
        selected = {
            split: [_select(table, columns, problem, is_given=model_problem is not None) for table in tables]
            for split, tables in splits.items()
        }
        names, index_of = _classes(selected.get("train") or selected["validation"], problem)
        if model_labels is not None:
            names, places = in_classes_of_model(names, model_labels, first[0].source)
            index_of = {label: places[index] for label, index in index_of.items()}
        whole = {
            split: datasets.concatenate_datasets([_as_learned(table, names, index_of, problem) for table in tables])
            for split, tables in selected.items()
        }
        kept = {
            split: with_text(rows, [name for name in columns.values() if name != "label"])
            for split, rows in whole.items()
        }
    for split, rows in kept.items():
        if not len(rows):
            raise InputError(f"{_name_of(splits[split])} has no text: give rows that are not blank")
    if without_text := sum(map(len, whole.values())) - sum(map(len, kept.values())):
        notes = (f"rows left out because they have no text: {without_text}", *notes)
    unused = {f"column {name}" for table in first for name in table.rows.column_names if name not in columns}
    notes = (*notes, *of_unused(unused), *(_of_names(names) if problem == SINGLE else ()))
    if "validation" not in kept:
        kept = _hold_out(kept["train"], problem, seed, _name_of(splits["train"]))
        part = "a tenth" if problem == REGRESSION else "a tenth of each class"
        notes = (*notes, f"without a validation split, {part} is held out by --seed {seed}")
    return LabelledText(
        train=kept.get("train", kept["validation"]),
        validation=kept["validation"],
        label_names=tuple(names),
        problem_type=problem,
        of_files=notes,
    )


class _Table(NamedTuple):
    """A split or one of its files, and its source for messages."""

    source: str
    rows: datasets.Dataset
    path: str = ""


def _name_of(tables: Sequence[_Table]) -> str:
    return first_of([table.source for table in tables], 1)


def _read_source(
    flags: LabelledTextArguments, *, only_validation: bool
) -> tuple[dict[str, list[_Table]], tuple[str, ...]]:
    """Read the tables of each split; return them and lines on files that are read or not."""
    dataset, config_name = flags.dataset, flags.dataset_config_name
    if config_name and dataset in (None, BUILT_IN):
        raise InputError(f"--dataset_config_name {config_name} needs --dataset HUB_ID: leave it out")
    if dataset and not (flags.train_file or flags.validation_file):
        if dataset != BUILT_IN:
            return _read_hub(dataset, config_name), ()
        return {split: [_Table("--dataset docstrings", rows)] for split, rows in load_docstrings().items()}, ()
    if dataset or not (flags.train_file or only_validation):
        raise InputError(
            "give the texts by --dataset docstrings, by --dataset HUB_ID, or by --train_file and --validation_file, "
            "which may be left out"
        )
    splits, notes = {}, []
    for split, words in (("train", flags.train_file), ("validation", flags.validation_file)):
        if words:
            found = find_files(f"--{split}_file", words, FORMATS)
            notes += found.notes(f"--{split}_file")
            splits[split] = [_read_file(f"--{split}_file", path) for path in found.files]
    return splits, tuple(notes)


def _read_hub(dataset: str, config_name: str | None) -> dict[str, list[_Table]]:
    source = f"--dataset {dataset}"
    name = OLD_HUB_IDS.get(dataset, dataset)
    with loading_by_name(name, source, "check --dataset_config_name, or use --dataset docstrings"):
        splits = datasets.load_dataset(name, config_name)
    chosen = choose_splits(splits, source)
    return {split: [_Table(f"{source}, split {name}", splits[name])] for split, name in chosen.items()}


@progress_bars(False)
def _read_file(flag: str, path: Path) -> _Table:
    source = f"{flag} {path}"
    if not path.stat().st_size:
        raise InputError(f"{source} is empty: name a file with labelled texts")
    kind = FORMATS[path.suffix.lower()]
    files = {"train": glob.escape(str(path))}
    with loading_by_name(str(path), source, f"check that it is {kind.upper()}"):
        if kind == "csv":
            return _Table(source, _with_whole_numbers(_read_csv(path, source)), str(path))
        rows = datasets.load_dataset(kind, data_files=files, split="train")
        return _Table(source, _with_dates_as_written(rows, path, source) if kind == "json" else rows, str(path))


def _read_csv(path: Path, source: str) -> datasets.Dataset:
    """Read a table: a label is what the file says, and in a text NA, null and None are words, not missing values."""
    _, first = next(rows_of(str(path), source), (0, None))
    if first is None:
        raise InputError(f"{source} has no rows: name a file with labelled texts")
    as_text = datasets.Features(dict.fromkeys(first, datasets.Value("string")))
    state = path.stat()
    return generated(
        _cells, as_text, source, path=str(path), named=source, version=f"{state.st_size} {state.st_mtime_ns}"
    )


def _cells(path: str, named: str, version: str) -> Iterator[dict[str, str | None]]:
    for _, row in rows_of(path, named):
        yield {column: value or None for column, value in row.items()}


def _with_dates_as_written(rows: datasets.Dataset, path: Path, source: str) -> datasets.Dataset:
    """Take the words that the reader of JSON has made points in time of from the file once more."""
    guessed = [name for name, feature in rows.features.items() if getattr(feature, "dtype", "").startswith("timestamp")]
    written = [row for _, row in rows_of(str(path), source)] if guessed else []
    for column in guessed:
        values = [row.get(column) for row in written]
        rows = rows.remove_columns(column).add_column(column, values, feature=datasets.Value("string"))
    return rows


def _with_whole_numbers(rows: datasets.Dataset) -> datasets.Dataset:
    """Cast the columns that hold nothing but whole numbers, as they are written, to numbers."""
    for column in rows.column_names:
        values = rows[column][:]
        if all(value is None or WHOLE.fullmatch(value) for value in values) and any(values):
            rows = rows.cast_column(column, datasets.Value("int64"))
    return rows


def _find_columns(table: _Table, texts: Sequence[str], label: str | None) -> dict[str, str]:
    """Find their names for the columns, and ours; where no usual one is there, the first, which ``_select`` refuses."""
    available = table.rows.column_names
    usual_text, label_found = (
        next((name for name in usual if name in available), usual[0]) for usual in (TEXTS, LABELS)
    )
    pairs = (names for names in PAIRS if set(names) <= set(available))
    texts = texts or next(pairs, (usual_text,))
    ours = {**dict(zip(texts, ("text", "text_pair"), strict=False)), label or label_found: "label"}
    if len(ours) <= len(texts):
        raise InputError(f"{table.source}: --text_column and --label_column must name different ones")
    return ours


def _problem_of(tables: Sequence[_Table], columns: dict[str, str]) -> ProblemType:
    """Tell what labels are by the first one; of a CSV, which has words alone, by all of them."""
    column = next(theirs for theirs, ours in columns.items() if ours == "label")
    labels = [label for table in tables if column in table.rows.column_names for label in table.rows[column][:]]
    if not labels or isinstance(labels[0], list) or _is_bracketed(labels[0]):
        return MULTI if labels else SINGLE
    is_written = all(isinstance(label, str) and DECIMAL.fullmatch(label) for label in labels)
    return REGRESSION if is_written or isinstance(labels[0], float) or _lack_numbers(labels) else SINGLE


def _lack_numbers(labels: list[Any]) -> bool:
    """Tell whether texts are numbers up to some that are none, which are refused then."""
    texts = [label for label in labels if isinstance(label, str)]
    if any(map(WITH_COMMA.fullmatch, texts)):
        return all(NUMBER.fullmatch(text.replace(",", ".", 1)) for text in texts)
    numbers = [label for label in texts if NUMBER.fullmatch(label)]
    others = {label.lower().lstrip("+-") for label in texts if not NUMBER.fullmatch(label)}
    known = NO_NUMBERS | (MISSING if any(map(DECIMAL.fullmatch, numbers)) else set())
    return bool(numbers and others) and others <= known


def _is_bracketed(label: Any) -> bool:
    """Tell whether a text looks like a list, or is a set, a tuple or an object."""
    text = label.strip() if isinstance(label, str) else ""
    is_list = text.startswith("[") and text.endswith("]")
    return is_list or (text.startswith(("(", "{")) and isinstance(_literal(text), tuple | set | dict))


def _literal(text: Any) -> Any:
    """Return a value that is written as JSON, or as Python writes it; ``None`` for another text, or no text."""
    with suppress(ValueError, TypeError):
        return read_json(text)
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = ast.literal_eval(text)
        # The list "['a' 'b']" of NumPy is one word to Python.
        return None if isinstance(value, list) and repr(value) != text.strip() else value
    return None


def _select(table: _Table, columns: dict[str, str], problem: ProblemType, *, is_given: bool) -> _Table:
    """Select these columns, under our names, with texts or null, and a label in every row.

    Unless it ``is_given`` what labels are, a text that looks like a list is no word.
    """
    source, rows, path = table
    if path.lower().endswith(".csv"):
        _check_quotes(table, columns)
    for theirs, ours in columns.items():
        if theirs not in rows.column_names:
            raise InputError(
                f"{source} has no column {theirs}, only {join_names(rows.column_names, MAX_NAMED)}: "
                f"name it by --{ours.removesuffix('_pair')}_column"
            )
        if ours == "label":
            rows = _with_labels(table, theirs, problem, is_given)
            continue
        for number in (at for at, value in enumerate(rows[theirs][:], start=1) if not isinstance(value, str | None)):
            raise InputError(
                f"{source}: row {number} has no text in its column {theirs}: name another one by --text_column"
            )
    selected = rows.select_columns(list(columns)).rename_columns(columns)
    texts = {column: datasets.Value("string") for column in selected.column_names if column != "label"}
    return _Table(source, selected.cast(datasets.Features({**selected.features, **texts})))


def _with_labels(table: _Table, column: str, problem: ProblemType, is_given: bool) -> datasets.Dataset:
    """Return the rows with lists for texts that hold them; refuse what is no label, or another kind than the first."""
    source, rows, path = table
    values = written = rows[column][:]
    if problem == REGRESSION and type(rows.features[column]).__name__ == "Json":  # makes a number of a text beside some
        written = [row.get(column) for _, row in rows_of(path, source)]
    if problem == MULTI:
        values = [found if isinstance(found := _literal(value), list) else value for value in written]
    for number, (value, word) in enumerate(zip(values, written, strict=True), start=1):
        if value is None:
            raise InputError(f"{source}: row {number} has no {column}: add it or remove the row")
        is_other = problem == REGRESSION and isinstance(word, str) != isinstance(written[0], str)
        if is_other or not _is_label(value, problem) or (problem == SINGLE and not is_given and _is_bracketed(value)):
            raise InputError(
                f"{source}: row {number} has the label {str(word)[:80]}, and {LABEL_RULES[problem]}: name another "
                "column by --label_column"
            )
    if not (problem == MULTI and any(isinstance(word, str) for word in written)):
        return rows
    are_numbers = all(isinstance(one, int) and abs(one) < 2**63 for value in values for one in value)
    values = values if are_numbers else [list(map(str, value)) for value in values]
    feature = datasets.List(datasets.Value("int64" if are_numbers else "string"))
    return rows.remove_columns(column).add_column(column, values, feature=feature)


def _check_quotes(table: _Table, columns: dict[str, str]) -> None:
    """Refuse a cell whose lines read as rows of the table, with a label of others: a stray quote has swallowed them."""
    names, rows = table.rows.column_names, table.rows[:]
    column = next(theirs for theirs, ours in columns.items() if ours == "label")
    at_label, labels = (names.index(column), set(map(str, rows[column]))) if column in names else (0, set())
    for number, cells in enumerate(zip(*(rows[name] for name in names), strict=True), start=1):
        texts = ["" if cell is None else str(cell) for cell in cells]
        for at in range(len(texts)):
            inside = rows_inside(texts, at, at_label)
            if inside and all(len(row) == len(names) and row[at_label] in labels for row in inside):
                raise InputError(
                    f"{table.source}: row {number} has whole rows in its column {names[at]}, so a stray double quote "
                    "opens it: take it out, or write it twice"
                )


def _is_label(value: Any, problem: ProblemType) -> bool:
    if problem == REGRESSION:
        with suppress(TypeError, ValueError, OverflowError):
            return not isinstance(value, bool) and isfinite(float(value))
        return False
    if problem == MULTI:
        is_list = isinstance(value, list) and all(isinstance(one, str | int) for one in value)
        return is_list and len(set(map(str, value))) == len(value)
    return isinstance(value, str | int)


def _classes(tables: Sequence[_Table], problem: ProblemType) -> tuple[list[str], dict[str, int]]:
    """Return the names of the classes, and the class of each label as it is written in the data."""
    if problem == REGRESSION:
        return ["LABEL_0"], {}  # transformers' name for one without a name
    found = [label for table in tables for label in table.rows["label"][:]]
    if problem == MULTI:
        found = [label for labels in found for label in labels]
    labels = set(found)
    if len({isinstance(label, bool) for label in found}) > 1:  # True and 1 are one to Python
        raise InputError(f"{_name_of(tables)} has true or false among other labels: write all of them alike")
    if (
        problem == MULTI
        and len(labels) == 2
        and {str(label).lower() for label in labels} <= {"0", "1", "true", "false"}
        and all(len(row) == len(labels) for table in tables for row in table.rows["label"][:])
    ):
        raise InputError(f"{_name_of(tables)} has vectors of 0 and 1 as labels: list the classes of each text")
    if len(labels) < 2:
        raise InputError(f"{_name_of(tables)} has texts of {len(labels)} class(es): give at least 2 to tell apart")
    feature = tables[0].rows.features["label"]
    feature = getattr(feature, "feature", feature)  # of a list
    if isinstance(feature, datasets.ClassLabel):
        return feature.names, {str(index): index for index in range(feature.num_classes)}
    are_numbers = all(isinstance(label, int) for label in labels)
    names = list(dict.fromkeys(map(str, sorted(labels, key=None if are_numbers else str))))
    return names, {name: index for index, name in enumerate(names)}


def _of_names(names: Sequence[str]) -> Iterator[str]:
    """Say which classes may be meant as one, or a class as several, by the way in which they are typed."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\.0+$", "", " ".join(name.casefold().split())), []).append(name)
    if same := [repr(name) for group in alike.values() if len(group) > 1 for name in group]:
        yield f"classes that differ by blanks, case or a decimal alone: {first_of(same, MAX_NAMED)}"
    for mark in "|;,":
        parts = {name: [part.strip() for part in name.split(mark)] for name in names}
        count = Counter(part for found in parts.values() for part in set(found))
        joined = [
            repr(name) for name, found in parts.items() if len(found) > 1 and max(count[part] for part in found) > 1
        ]
        if joined:
            yield f"classes that read as several: {first_of(joined, MAX_NAMED)}; a list of classes is written [...]"


def _as_learned(table: _Table, names: list[str], index_of: dict[str, int], problem: ProblemType) -> datasets.Dataset:
    """Return the rows with the index of a class for a label, or those of its classes, or a number."""
    source, rows, _ = table

    def index(label: Any, number: int) -> int:
        if str(label) not in index_of:
            raise InputError(
                f"{source}: row {number} has the label {label}, which is none of the {len(names)} classes "
                f"({join_names(names, MAX_NAMED)}): correct it or remove the row"
            )
        return index_of[str(label)]

    labels: list[Any] = list(enumerate(rows["label"][:], start=1))
    if problem == REGRESSION:
        labels, feature = [float(label) for _, label in labels], datasets.Value("float32")
    elif problem == MULTI:
        labels = [[index(one, number) for one in label] for number, label in labels]
        feature = datasets.List(datasets.Value("int64"))
    else:
        labels, feature = [index(label, number) for number, label in labels], datasets.Value("int64")
    return rows.remove_columns("label").add_column("label", labels, feature=feature)


def _hold_out(rows: datasets.Dataset, problem: ProblemType, seed: int, source: str) -> Splits:
    """Hold out a part of each class, the first one of several; copies of a text stay together."""
    pairs = zip(*(rows[column][:] for column in ("text", "text_pair") if column in rows.column_names), strict=True)
    digests = np.array([digest_of("\0".join(texts).encode()) for texts in pairs])
    _, firsts, text_of = np.unique(digests, return_index=True, return_inverse=True)
    labels = [[0] if problem == REGRESSION else label if problem == MULTI else [label] for label in rows["label"][:]]
    classes = np.unique([(labels[at] or [-1])[0] for at in firsts], return_inverse=True)[1]
    held_out = choose_held_out(classes, [str(digests[at]) for at in firsts], seed)
    if not len(held_out):
        raise InputError(f"{source} has one text a class, so none can be held out: add some, or --validation_file")
    return hold_out(rows, np.isin(text_of, held_out))


@progress_bars(False)
def load_docstrings() -> Splits:
    """Read ``train`` and ``validation`` with the columns ``text`` and ``label``: some seconds, then cached."""
    for library in LIBRARIES:
        if not any(source_folder(library).rglob("*.py")):
            raise InputError(f"--dataset docstrings finds no source files of {library}: pass --train_file or a Hub id")
    versions = [version(distribution) if distribution else python_version() for distribution in LIBRARIES.values()]
    rows = generated(_docstrings, datasets.Features(COLUMNS), "--dataset docstrings", version=" ".join(versions))
    splits = hold_out(rows, np.array(rows["held_out"][:]))
    return {split: rows.remove_columns("held_out") for split, rows in splits.items()}


def _docstrings(version: str) -> Iterator[dict[str, object]]:
    openings: set[str] = set()
    for label, library in enumerate(LIBRARIES):
        wanted = {False: MAX_TRAIN, True: MAX_VALIDATION}
        for held_out, path in source_files(library):
            if not wanted[held_out]:
                continue
            texts = _new_texts(path, openings)[: min(MAX_OF_A_FILE, wanted[held_out])]
            wanted[held_out] -= len(texts)
            yield from ({"text": text, "label": label, "held_out": held_out} for text in texts)


def _new_texts(path: Path, openings: set[str]) -> list[str]:
    """Return the docstrings of a file's functions and classes that open like none in ``openings``, which they join."""
    texts = []
    for node in ast.walk(parse_source(path)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        text = NAMES.sub(MASK, ast.get_docstring(node) or "")
        words = re.findall(r"\w+", text.lower())
        opening = " ".join(words[:MIN_WORDS])
        if len(words) >= MIN_WORDS and opening not in openings:
            openings.add(opening)
            texts.append(text)
    return texts
