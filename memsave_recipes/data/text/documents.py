"""Documents of text, train and held out: Python's own library, files, or a data set of the Hub.

Each source is read as a data set with the column ``text``. It lies in the cache of ``datasets`` as memory-mapped Arrow
files, and is read again when the source changes.

NOTE [ documents ]
1. A document is one text to the model: a file of the standard library, a row of a data set, and of files of text as in
   NOTE [ formats ] of ``files.py``.
2. *Held out.* Where no validation split is given, a twentieth of the documents is held out: NOTE [ held out ] of
   ``files.py``.
3. *Streaming* reads documents from the front of a data set until there are as many bytes as asked for, and keeps them
   on disk; from there on they are a data set like any other, in an order that depends on (seed, epoch) alone. The first
   documents of a sorted data set are no fair sample of it.
4. Rows without text are left out and counted. One document must fit into the host's memory; all of them need not.
5. *Weights* mix what is left to train on: NOTE [ mixture ] of ``files.py``.
"""

import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import ceil, isfinite
from pathlib import Path
from typing import Any

import datasets
from datasets import Features, Value

from memsave_recipes.data.text.files import (
    TEXT,
    FoundFiles,
    check_text_column,
    find_files,
    hold_out,
    mix,
    no_text_column,
    read_documents,
    text_of,
    with_text,
)
from memsave_recipes.errors import InputError, require
from memsave_recipes.hub import loading_by_name
from memsave_recipes.text import join_names

BYTES_A_TOKEN = 5  # of English in a vocabulary of 50k: 4 to 5
STANDARD_LIBRARY = "python-stdlib"
DOCSTRING_CHATS = "docstring-chats"
LONG_BYTES = 8 * 1024**2  # from here on, reading or tokenizing takes seconds and gets a progress bar
VALIDATION_SHARE = 0.05  # of a streamed data set
VALIDATION_NAMES = ("validation", "valid", "val", "dev", "test")
# Tests hold broken files on purpose, packages do not belong to the library, and the tables of character sets are
# 1.4 MB of near copies, of which some would be held out although copies are trained on.
NOT_READ = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}

Splits = dict[str, datasets.Dataset]
Generator = Callable[..., Iterator[dict[str, Any]]]


@dataclass(kw_only=True)
class TextArguments:
    """Which text."""

    dataset: str | None = field(
        default=None, metadata={"help": "built in: python-stdlib (default), docstring-chats; or a Hub id"}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "which part of a Hub data set"})
    train_file: list[str] | None = field(
        default=None, metadata={"help": 'files, folders, "patterns/*": .txt, .md, .jsonl, .json, .csv, .parquet'}
    )
    validation_file: list[str] | None = field(
        default=None, metadata={"help": "the same; default: a twentieth of the training text"}
    )
    mix_weights: list[float] | None = field(
        default=None, metadata={"help": "share of the bytes of a pass, one for each word of --train_file"}
    )
    text_column: str = field(default="text", metadata={"help": "where the text is in a row of a file or a Hub set"})
    streaming: bool = field(default=False, metadata={"help": "read only as much of a Hub set as --max_steps needs"})

    def __post_init__(self) -> None:
        self.dataset = self.dataset or (None if self.train_file or self.validation_file else STANDARD_LIBRARY)
        if self.mix_weights is not None:
            self._check_weights(self.mix_weights)

    def _check_weights(self, weights: list[float]) -> None:
        num_words, shown = len(self.train_file or []), " ".join(f"{weight:g}" for weight in weights)
        rule = f"as many numbers as --train_file has words ({num_words})"
        require(len(weights) == num_words, "--mix_weights", shown, rule)
        require(all(weight > 0 and isfinite(weight) for weight in weights), "--mix_weights", shown, "above 0, each")


@dataclass(frozen=True, kw_only=True)
class TextSplits:
    """Two data sets with the one column ``text``, a document a row, and a line on the documents held or left out."""

    train: datasets.Dataset
    validation: datasets.Dataset
    notice: str | None


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


def load_documents(
    flags: TextArguments, *, stream_bytes: int | None = None, seed: int = 0, only_validation: bool = False
) -> TextSplits:
    """Load the text that the flags name; NOTE [ documents ] says what a document is and which of them are held out.

    Code that comes with a data set of the Hub is never run.

    Args:
        stream_bytes: stream the Hub's data set, and stop after that many bytes of text in UTF-8.
        seed: of the mixture, where ``--mix_weights`` are given.
        only_validation: ``--validation_file`` may stand alone, and then serves as the training split as well.

    Raises:
        InputError: two sources; a source, a column or the text is missing or malformed.
    """
    check_sources(flags, stream_bytes, only_validation)
    dataset, config_name, text_column = flags.dataset, flags.dataset_config_name, flags.text_column
    if dataset is None:
        return _load_files(flags, seed)
    if dataset == STANDARD_LIBRARY:
        with progress_bars(False):
            splits = read_standard_library()
    elif stream_bytes is None:
        splits = read_hub(dataset, config_name, text_column)
    else:
        splits = stream_hub(dataset, config_name, text_column, stream_bytes)
    return _finished(*_train_and_validation(splits, dict.fromkeys(splits, f"--dataset {dataset}")))


def check_sources(flags: TextArguments, stream_bytes: int | None, only_validation: bool) -> None:
    """Raises ``InputError`` where the flags name two sources, or half of one, or options of another one."""
    if flags.validation_file and not flags.train_file and not (only_validation and flags.dataset is None):
        raise InputError("--validation_file goes with --train_file, or alone with --eval_only: give both, or neither")
    if flags.dataset and flags.train_file:
        raise InputError("give the text by exactly one of --dataset python-stdlib, --dataset HUB_ID and --train_file")
    if flags.dataset in (None, STANDARD_LIBRARY, DOCSTRING_CHATS):
        for flag, value in (("--dataset_config_name", flags.dataset_config_name), ("--streaming", stream_bytes)):
            if value is not None:
                raise InputError(f"{flag} goes with --dataset HUB_ID: leave it out")


def _load_files(flags: TextArguments, seed: int) -> TextSplits:
    words = {"train": flags.train_file or [], "validation": flags.validation_file or []}
    sources = {split: _source(f"--{split}_file", words[split]) for split in words if words[split]}
    found = {split: find_files(f"--{split}_file", words[split]) for split in sources}
    splits = {
        split: _read_files(files, f"--{split}_file", sources[split], flags.text_column)
        for split, files in found.items()
    }
    notes = [note for split, files in found.items() for note in files.notes(sources[split])]
    written, further = _train_and_validation(splits, sources)
    if flags.mix_weights is not None:
        with progress_bars(False):
            written["train"], note = mix(written["train"], words["train"], flags.mix_weights, seed)
        further.append(note)
    return _finished(written, notes + further)


def _source(flag: str, words: Sequence[str]) -> str:
    return f"{flag} {words[0]}" + (f" and {len(words) - 1} more" if len(words) > 1 else "")


def _read_files(found: FoundFiles, flag: str, source: str, text_column: str) -> datasets.Dataset:
    states = [(path, path.stat(), number) for number, paths in enumerate(found.by_word) for path in paths]
    files = tuple(
        (os.path.abspath(path), f"{state.st_size} {state.st_mtime_ns}", number) for path, state, number in states
    )
    features = Features({**TEXT, "source": Value("int32")})
    with progress_bars(sum(state.st_size for _, state, _ in states) > LONG_BYTES):
        return generated(read_documents, features, source, files=files, flag=flag, text_column=text_column)


def _finished(splits: Splits, notes: Sequence[str]) -> TextSplits:
    texts = {split: documents.select_columns("text") for split, documents in splits.items()}
    return TextSplits(**texts, notice=f"note: {'; '.join(notes)}" if notes else None)


@progress_bars(False)
def _train_and_validation(splits: Splits, sources: dict[str, str]) -> tuple[Splits, list[str]]:
    """Both splits without rows that have no text, and notes; a validation split alone serves as both."""
    written = {split: with_text(documents) for split, documents in splits.items()}
    num_blank: Counter[str] = Counter()
    for split, documents in splits.items():
        num_blank[sources[split]] += len(documents) - len(written[split])
    notes = [
        f"rows of {source} left out because they have no text: {count}" for source, count in num_blank.items() if count
    ]
    if "validation" not in written:
        written, note = hold_out(written["train"], sources["train"])
        notes.append(note)
    written.setdefault("train", written["validation"])
    for split, documents in written.items():
        if not len(documents):
            raise InputError(
                f"{sources.get(split) or sources['validation']} leaves no text for the {split} split: give more"
            )
    return written, notes


def read_standard_library() -> Splits:
    """``train``, with the columns ``text`` and ``path``: the ``.py`` files of the running Python's library."""
    features = Features({**TEXT, "path": Value("string")})
    root = sysconfig.get_path("stdlib")
    return {"train": generated(_standard_library, features, f"the library at {root}", root=root, version=sys.version)}


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
        split: generated(_streamed, Features(TEXT), source, split=name, num_bytes=sizes[split], **options)
        for split, name in chosen.items()
    }


def generated(generator: Generator, features: Features, source: str, **options: Any) -> datasets.Dataset:
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


def _streamed(
    dataset: str, config_name: str | None, split: str, text_column: str, num_bytes: int, version: str
) -> Iterator[dict[str, str]]:
    num_read = 0
    with _loading(dataset):
        for row in datasets.load_dataset(dataset, config_name, split=split, streaming=True):
            if text_column not in row:
                raise no_text_column(f"--dataset {dataset}", text_column, row)
            text = text_of(row[text_column], f"--dataset {dataset}", text_column) or ""
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
    check_text_column(rows.features, source, text_column)
    return rows.select_columns([text_column]).rename_columns({text_column: "text"})


def _loading(dataset: str) -> AbstractContextManager[None]:
    return loading_by_name(dataset, f"--dataset {dataset}", "use python-stdlib or --train_file")
