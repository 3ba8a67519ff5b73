"""Finished runs, read from their folders as plain data.

``results.json`` holds the final figures, ``config.json`` the flags and the environment, ``metrics.jsonl`` one row for
each logging step. Any figure may be absent.

NOTE [ foreign runs ]: a folder may come from anyone, so its content is sanitized here, once for the terminal and for
every format: (1) names and texts are ``printable``; (2) figures and points of curves beyond ``LARGEST`` are not finite,
so no ratio and no axis leaves the range of a float; (3) a file that cannot be read so is an ``InputError`` that names
the folder, and the other runs are shown.
"""

import math
import os
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeGuard

from memsave_recipes.errors import InputError
from memsave_recipes.text import MIB, printable, read_json, sanitized

OF_A_RUN = ("results.json", "config.json", "metrics.jsonl")
FIGURES = ("model", "memory", "perf", "eval")  # a results.json without any of them is from another program
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
TRAIN_LOSS, EVAL_LOSS, SAMPLES_SEEN = "train/loss", "eval/loss", "progress/samples_seen"
LARGEST = 1e100
LAST_STEP = 2**53
MAX_LETTERS = 16 * MIB  # of a file of one object, or a row of the history; they take a few KiB


class History:
    """The logged rows of a run, in the order of writing.

    The curves that are compared and drawn are held as plain numbers. ``rows`` are not held: they are iterated once
    here, and again by code that needs whole rows.
    """

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self.rows = rows
        self._curves = {key: (array("q"), array("d")) for key in (TRAIN_LOSS, EVAL_LOSS, SAMPLES_SEEN)}
        for row in rows:
            self._add(row)

    def curve(self, key: str) -> dict[int, float]:
        """A figure by step; a step that was logged twice has its last value."""
        return dict(zip(*self._curves[key], strict=True))

    def _add(self, row: dict[str, Any]) -> None:
        step = step_of(row)
        if step is None:
            return
        for key, (steps, values) in self._curves.items():
            value = _number(row.get(key))
            if value is not None:
                steps.append(step)
                values.append(value)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run. ``name`` is its ``--run_name``, else that of its folder.

    ``path`` is unique: its folder, or ``entity/project/id`` of a run on W&B.
    """

    name: str
    path: Path
    results: dict[str, Any]
    config: dict[str, Any]
    history: History

    def figure(self, *keys: str) -> float | None:
        """A number of the results, as ``figure("memory", "peak_allocated_gib")``; ``None`` if absent or not finite."""
        value = _at(self.results, keys)
        return value if _is_number(value) and abs(value) <= LARGEST else None

    def names(self, key: str) -> list[str]:
        """The names of the numbers in a part of the results, as ``names("eval")``."""
        part = self.results.get(key)
        return [name for name in part if self.figure(key, name) is not None] if isinstance(part, dict) else []

    def text(self, *keys: str) -> str | None:
        """A text of the results, as ``text("plan")``; ``None`` where it is absent."""
        value = _at(self.results, keys)
        return value if isinstance(value, str) else None


def read_run(folder: Path | str) -> Run:
    """Reads a run folder. NOTE [ foreign runs ].

    Raises:
        InputError: a file is missing, cannot be read, or is from another program.
    """
    folder = Path(folder).resolve()
    missing = [name for name in OF_A_RUN if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder} is not a finished run (no {', no '.join(missing)}): finish it or leave it out")
    results = _read_object("results.json", folder)
    if not any(key in results for key in FIGURES):
        raise InputError(f"{folder} has a results.json with none of our figures, so it is no run of ours: leave it out")
    config = _read_object("config.json", folder)
    run_name = config.get("run_name")
    return Run(
        name=printable(run_name if isinstance(run_name, str) and run_name else folder.name),
        path=folder,
        results=results,
        config=config,
        history=History(_LoggedRows(folder)),
    )


def find_runs(path: Path | str) -> list[Path]:
    """The runs at or below ``path``, finished or not, sorted: their folders, and W&B logs (``*.wandb``).

    A W&B log inside a run's folder is that run again, so it is left out.

    Raises:
        InputError: there is no such path, or no run in it.
    """
    path = Path(path)
    if os.path.isfile(path) and path.suffix == ".wandb":
        return [path]
    if not os.path.isdir(path):  # unlike pathlib, without an error for a text that cannot be a path
        raise InputError(f"{path} is not a folder: name one that holds runs")
    found = []
    for folder, subfolders, files in os.walk(path):
        if "results.json" in files or "metrics.jsonl" in files:
            found.append(Path(folder))
            subfolders[:] = [name for name in subfolders if name != "wandb"]
        found += [Path(folder, name) for name in files if name.endswith(".wandb")]
    if not found:
        raise InputError(f"{path} holds no run: name an --output_dir, or a folder of them")
    return sorted(found)


def loss_curve(run: Run) -> dict[int, float]:
    """The training loss by step."""
    return run.history.curve(TRAIN_LOSS)


def step_of(row: dict[str, Any]) -> int | None:
    """The step of a logged row; ``None`` where it is not a valid step number."""
    step = row.get("step")
    return step if _is_number(step) and isinstance(step, int) and abs(step) <= LAST_STEP else None


def history_row(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of ``row``, NaN and infinities included."""
    numbers = ((printable(key), _number(value)) for key, value in row.items())
    return {key: number for key, number in numbers if number is not None}


@dataclass(frozen=True)
class _LoggedRows:
    """The rows of a ``metrics.jsonl``, read anew each time."""

    folder: Path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        number = 0
        with _reading(self.folder, "metrics.jsonl") as file:
            while line := file.readline(MAX_LETTERS):
                number += 1
                yield _parse(line, f"metrics.jsonl line {number}", self.folder)


def _at(nested: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        nested = nested.get(key) if isinstance(nested, dict) else None
    return nested


def _number(value: Any) -> float | None:
    """``value`` if it is a number; beyond ``LARGEST`` it is infinite."""
    if isinstance(value, str):
        return float(value) if value in NOT_FINITE else None
    if not _is_number(value):
        return None
    if abs(value) > LARGEST:
        return math.inf if value > 0 else -math.inf
    return value


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


@contextmanager
def _reading(folder: Path, name: str) -> Iterator[TextIO]:
    try:
        with open(folder / name, encoding="utf-8-sig") as file:
            yield file
    except OSError as error:
        raise InputError(
            f"{folder / name} cannot be read ({error.strerror}): mend that or leave the run out"
        ) from error
    except UnicodeDecodeError as error:
        raise _damaged(name, folder, error) from error


def _read_object(name: str, folder: Path) -> dict[str, Any]:
    with _reading(folder, name) as file:
        text = file.read(MAX_LETTERS)
    content = _parse(text, name, folder)
    try:
        printable_content: dict[str, Any] = sanitized(content)
    except ValueError as error:
        raise _damaged(name, folder, error) from error
    return printable_content


def _parse(text: str, name: str, folder: Path) -> dict[str, Any]:
    try:
        content = read_json(text)
    except ValueError as error:
        raise _damaged(name, folder, error) from error
    if not isinstance(content, dict):
        raise InputError(f"{folder} has a {name} that is no JSON object, so it is no run of ours: leave it out")
    return content


def _damaged(name: str, folder: Path, error: Exception) -> InputError:
    return InputError(f"{folder} has a damaged {name} ({error}): run it again or leave it out")
