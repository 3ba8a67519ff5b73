"""Labelled texts, alone or in pairs: the docstrings of installed libraries, files, or a data set of the Hub.

A label is a class, a list of classes or a number; the first one of the training texts decides for all. The classes are
of the training texts; a label that is none of them is refused with its row. Rows without text (null in a column of
text, or only blanks in all of them) are left out and counted; one without a label is refused.

The class of a docstring is its library. Library names are masked, because a model could just look for them, and of all
docstrings that open with the same words only the first is kept.
"""

import ast
import csv
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

from memsave_recipes.data import MAX_NAMED, in_classes_of_model
from memsave_recipes.data.sources import (
    SPLIT_NAMES,
    Splits,
    choose_splits,
    find_files,
    first_of,
    generated,
    hold_out,
    parse_source,
    progress_bars,
    rows_of,
    source_files,
    source_folder,
    with_text,
)
from memsave_recipes.errors import InputError, option
from memsave_recipes.hub import loading_by_name
from memsave_recipes.losses import MULTI, REGRESSION, SINGLE, ProblemType
from memsave_recipes.text import join_names

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
        None, 'labelled texts: files, folders, "patterns/*" (.csv, .json, .jsonl, .parquet)'
    )
    validation_file: list[str] | None = option(None, "the same; needs --train_file or --eval_only")
    text_column: str | None = option(None, "default: the first of the usual names")
    text_pair_column: str | None = option(None, "column of the second text of pairs")
    label_column: str | None = option(None, "default: the first of the usual names")
    problem_type: ProblemType | None = option(
        None, "what labels are; default: lists are several classes of a text, fractions are regression"
    )

    def __post_init__(self) -> None:
        self.dataset = self.dataset or (None if self.train_file or self.validation_file else BUILT_IN)


@dataclass(frozen=True, kw_only=True)
class LabelledText:
    """Two splits with the columns ``text``, of pairs also ``text_pair``, and ``label``.

    A label is the index of a class, a list of them, or a number, by ``problem_type``; numbers are one unnamed class.
    Without training texts, ``train`` is ``validation``. ``of_files`` are lines on the files that were read.
    """

    train: datasets.Dataset
    validation: datasets.Dataset
    label_names: tuple[str, ...]
    problem_type: ProblemType = SINGLE
    num_without_text: int = 0
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
        left_out = (
            [f"rows left out because they have no text: {self.num_without_text}"] if self.num_without_text else []
        )
        return "; ".join([sizes, classes, *left_out, *self.of_files])

    def documents(self) -> Iterator[str]:
        """Yield the training texts, those of pairs one by one, for a tokenizer to be trained on."""
        for column in ("text", "text_pair"):
            if column in self.train.column_names:
                yield from self.train[column]


def load_labelled_text(
    flags: LabelledTextArguments,
    *,
    model_labels: Sequence[str] | None = None,
    model_problem: ProblemType | None = None,
) -> LabelledText:
    """Load the labelled texts that the flags name: built in, of files, or of the Hub (``glue`` is ``nyu-mll/glue``).

    With ``model_labels`` and ``model_problem``, the classes of a model that is only evaluated and what its labels are,
    ``--validation_file`` may be alone.

    Raises:
        InputError: two sources; a file, split, column, row, text or label is missing; fewer than two classes; a
            label outside the classes. Rows are counted from 1, in each file.
    """
    splits, notes = _read_source(flags, only_validation=model_labels is not None)
    with progress_bars(False):
        first = splits.get("train", splits["validation"])
        columns = _find_columns(first[0], flags.text_column, flags.text_pair_column, flags.label_column)
        problem = flags.problem_type or model_problem or _problem_of(first, columns)
        selected = {split: [_select(table, columns, problem) for table in tables] for split, tables in splits.items()}
        names, index_of = _classes(selected.get("train", selected["validation"]), problem)
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
    return LabelledText(
        train=kept.get("train", kept["validation"]),
        validation=kept["validation"],
        label_names=tuple(names),
        problem_type=problem,
        num_without_text=sum(map(len, whole.values())) - sum(map(len, kept.values())),
        of_files=notes,
    )


class _Table(NamedTuple):
    """A split or one of its files, and its source for messages."""

    source: str
    rows: datasets.Dataset


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
    if not flags.validation_file or dataset or not (flags.train_file or only_validation):
        raise InputError(
            "give the texts by --dataset docstrings, by --dataset HUB_ID, or by --train_file and --validation_file"
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
    chosen = choose_splits(splits, source, needed=SPLIT_NAMES)
    return {split: [_Table(f"{source}, split {name}", splits[name])] for split, name in chosen.items()}


@progress_bars(False)
def _read_file(flag: str, path: Path) -> _Table:
    source = f"{flag} {path}"
    if not path.stat().st_size:
        raise InputError(f"{source} is empty: name a file with labelled texts")
    kind = FORMATS[path.suffix.lower()]
    files = {"train": glob.escape(str(path))}
    with loading_by_name(str(path), source, f"check that it is {kind.upper()}"):
        if kind != "csv":
            rows = datasets.load_dataset(kind, data_files=files, split="train")
            return _Table(source, _with_dates_as_written(rows, path, source) if kind == "json" else rows)
        # A label is what the file says, and in a text NA, null and None are words, not missing values.
        with path.open(newline="", encoding="utf-8-sig") as file:
            columns = [name or f"Unnamed: {at}" for at, name in enumerate(next(csv.reader(file), []))]  # as pandas does
        as_text = datasets.Features(dict.fromkeys(columns, datasets.Value("string")))
        options = {"features": as_text, "na_values": [""], "keep_default_na": False}
        rows = datasets.load_dataset(kind, data_files=files, split="train", **options)
    return _Table(source, _with_whole_numbers(rows))


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
        if all(value is None or WHOLE.fullmatch(value) for value in rows[column]) and any(rows[column]):
            rows = rows.cast_column(column, datasets.Value("int64"))
    return rows


def _find_columns(table: _Table, text: str | None, pair: str | None, label: str | None) -> dict[str, str]:
    """Find their names for the columns, and ours; where no usual one is there, the first, which ``_select`` refuses."""
    available = table.rows.column_names
    if text is None and pair is None:
        pairs = [names for names in PAIRS if set(names) <= set(available)]
        text, pair = pairs[0] if pairs else (None, None)
    text, label = (
        named or next((name for name in usual if name in available), usual[0])
        for named, usual in ((text, TEXTS), (label, LABELS))
    )
    ours = {text: "text", label: "label"} | ({pair: "text_pair"} if pair else {})
    if len(ours) < (3 if pair else 2):
        raise InputError(f"{table.source}: --text_column, --text_pair_column, --label_column must name different ones")
    return ours


def _problem_of(tables: Sequence[_Table], columns: dict[str, str]) -> ProblemType:
    """Tell what labels are by the first one; of a CSV, which has words alone, by all of them."""
    column = next(theirs for theirs, ours in columns.items() if ours == "label")
    labels = [label for table in tables if column in table.rows.column_names for label in table.rows[column]]
    if labels and isinstance(labels[0], list):
        return MULTI
    is_written = all(isinstance(label, str) and DECIMAL.fullmatch(label) for label in labels)
    return REGRESSION if labels and (is_written or isinstance(labels[0], float)) else SINGLE


def _select(table: _Table, columns: dict[str, str], problem: ProblemType) -> _Table:
    """Select these columns, under our names, with texts or null, and a label in every row."""
    source, rows = table
    for theirs, ours in columns.items():
        if theirs not in rows.column_names:
            raise InputError(
                f"{source} has no column {theirs}, only {join_names(rows.column_names, MAX_NAMED)}: "
                f"name it by --{ours}_column"
            )
        for number, value in enumerate(rows[theirs][:], start=1):
            _check_value(value, ours, f"{source}: row {number}", theirs, problem)
    selected = rows.select_columns(list(columns)).rename_columns(columns)
    texts = {column: datasets.Value("string") for column in selected.column_names if column != "label"}
    return _Table(source, selected.cast(datasets.Features({**selected.features, **texts})))


def _check_value(value: Any, ours: str, place: str, theirs: str, problem: ProblemType) -> None:
    if ours != "label" and not isinstance(value, str | None):
        raise InputError(f"{place} has no text in its column {theirs}: name another one by --{ours}_column")
    if ours == "label" and value is None:
        raise InputError(f"{place} has no {theirs}: add it or remove the row")
    if ours == "label" and not _is_label(value, problem):
        raise InputError(
            f"{place} has the label {str(value)[:80]}, and {LABEL_RULES[problem]}: name another column by "
            "--label_column, or see --problem_type"
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
    found = [label for table in tables for label in table.rows["label"]]
    if problem == MULTI:
        found = [label for labels in found for label in labels]
    labels = set(found)
    if len({isinstance(label, bool) for label in found}) > 1:  # True and 1 are one to Python
        raise InputError(f"{_name_of(tables)} has true or false among other labels: write all of them alike")
    if len(labels) < 2:
        raise InputError(f"{_name_of(tables)} has texts of {len(labels)} class(es): give at least 2 to tell apart")
    feature = tables[0].rows.features["label"]
    feature = getattr(feature, "feature", feature)  # of a list
    if isinstance(feature, datasets.ClassLabel):
        return feature.names, {str(index): index for index in range(feature.num_classes)}
    are_numbers = all(isinstance(label, int) for label in labels)
    names = list(dict.fromkeys(map(str, sorted(labels, key=None if are_numbers else str))))
    return names, {name: index for index, name in enumerate(names)}


def _as_learned(table: _Table, names: list[str], index_of: dict[str, int], problem: ProblemType) -> datasets.Dataset:
    """Return the rows with the index of a class for a label, or those of its classes, or a number."""
    source, rows = table

    def index(label: Any, number: int) -> int:
        if str(label) not in index_of:
            raise InputError(
                f"{source}: row {number} has the label {label}, which is none of the {len(names)} classes "
                f"({join_names(names, MAX_NAMED)}): correct it or remove the row"
            )
        return index_of[str(label)]

    labels: list[Any] = list(enumerate(rows["label"], start=1))
    if problem == REGRESSION:
        labels, feature = [float(label) for _, label in labels], datasets.Value("float32")
    elif problem == MULTI:
        labels = [[index(one, number) for one in label] for number, label in labels]
        feature = datasets.List(datasets.Value("int64"))
    else:
        labels, feature = [index(label, number) for number, label in labels], datasets.Value("int64")
    return rows.remove_columns("label").add_column("label", labels, feature=feature)


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
