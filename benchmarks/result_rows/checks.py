"""Rows of the results table are read back, and refused where no run can have their figures.

NOTE [ the schema is a dataclass ]: jsonschema is no dependency of ours, and the rules that matter compare fields with
one another (a peak and the weights below it), which it cannot express. So types come from the annotations of
``ResultRow``, and rules from ``problems_of``.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.text import format_bytes, read_json, sanitized
from memsave_recipes.tools.compare import LARGEST
from result_rows.rows import SCHEMA_VERSION, ResultRow

MEMORY_SLACK = 1.1  # of a device's memory: sheets and drivers differ by less
SHARES = ("accuracy", "top5_accuracy", "f1", "f1_macro", "f1_micro")


def read_row(path: Path) -> ResultRow:
    """The row in a file.

    Raises:
        InputError: it cannot be read, is of another version, or has other fields or types; all of it in one message.
    """
    try:
        content = sanitized(read_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): add the run again") from error
    problems = list(_schema_problems(content))
    if problems:
        raise InputError(f"{path}: {'; '.join(problems)}")
    return ResultRow(**content)


def _schema_problems(content: Any) -> Iterator[str]:
    if not isinstance(content, dict):
        yield "is no JSON object"
        return
    if content.get("schema_version") != SCHEMA_VERSION:
        yield f"schema_version {content.get('schema_version')} is not {SCHEMA_VERSION}: add the run again"
        return
    hints = get_type_hints(ResultRow)
    names = [field.name for field in fields(ResultRow)]
    yield from (f"unknown key {key}: remove it" for key in content.keys() - set(names))
    for name in names:
        if name not in content:
            yield f"key {name} is missing: write null where it is not known"
        elif not _is_of(content[name], hints[name]):
            yield f"{name} is not of type {hints[name]}"


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the type; a whole number is a float, a truth value is no number."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is dict:
        return isinstance(value, dict) and all(_is_of(one, inner[1]) for one in value.values())
    if kind is list:
        return isinstance(value, list) and all(_is_of(one, inner[0]) for one in value)
    if inner:
        return any(_is_of(value, one) for one in inner)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    return isinstance(value, hint) and not isinstance(value, bool)


def problems_of(row: ResultRow) -> Iterator[str]:
    """A line for each figure that no run can have."""
    counts = ("num_processes", "micro_batch_size", "accumulation_steps", "num_parameters", "num_threads", "num_windows")
    amounts = ("weights_bytes", "predicted_peak_bytes", "peak_bytes", "device_memory_bytes")
    for name in (*counts, *amounts, "samples_per_s", "time_ratio"):
        value = getattr(row, name)
        if value is not None and value <= 0:
            yield f"{name} {value} is not above 0"
    if row.saved_for_backward_bytes is not None and row.saved_for_backward_bytes < 0:
        yield f"saved_for_backward_bytes {row.saved_for_backward_bytes} is below 0"
    yield from _memory_problems(row)
    yield from _speed_problems(row)
    yield from _quality_problems(row)


def _memory_problems(row: ResultRow) -> Iterator[str]:
    for name in ("predicted_peak_bytes", "peak_bytes"):
        peak = getattr(row, name)
        if peak is not None and row.weights_bytes is not None and peak < row.weights_bytes:
            yield f"{name} {format_bytes(peak)} is below the weights' {format_bytes(row.weights_bytes)}"
    if row.peak_bytes and row.device_memory_bytes and row.peak_bytes > MEMORY_SLACK * row.device_memory_bytes:
        device = format_bytes(row.device_memory_bytes)
        yield f"peak_bytes {format_bytes(row.peak_bytes)} is above the device's {device}"


def _speed_problems(row: ResultRow) -> Iterator[str]:
    if row.samples_per_s is not None and row.device is None:
        yield "samples_per_s has no device that it was measured on"
    if row.samples_per_s is None and (row.time_ratio is not None or row.samples_per_s_quartiles is not None):
        yield "time_ratio and samples_per_s_quartiles are of a speed, and samples_per_s is null"
    quartiles = row.samples_per_s_quartiles
    if quartiles is not None and not (len(quartiles) == 2 and 0 < quartiles[0] <= quartiles[1]):
        yield f"samples_per_s_quartiles {quartiles} are not two speeds in order"


def _quality_problems(row: ResultRow) -> Iterator[str]:
    if row.metric is not None and row.metric not in row.evaluation:
        yield f"metric {row.metric} is not in evaluation"
    for name, value in row.evaluation.items():
        if name in SHARES and not 0 <= value <= 1:
            yield f"{name} {value} is not in [0, 1]"


def read_rows(folder: Path) -> tuple[list[ResultRow], list[str]]:
    """The rows of a folder, and a line for each problem of a file.

    Raises:
        InputError: there is no such folder.
    """
    if not os.path.isdir(folder):
        raise InputError(f"{folder} is not a folder of rows: name one that `add` has written to")
    rows: list[ResultRow] = []
    problems, files = [], defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        try:
            row = read_row(path)
        except InputError as error:
            problems.append(error.one_line)
            continue
        rows.append(row)
        files[row.name].append(path.name)
        problems += [f"{path}: {problem}" for problem in problems_of(row)]
    for name, same in files.items():
        if len(same) > 1:
            problems.append(f"{folder}: {', '.join(same)} are the same run: keep one")
        elif same != [f"{name}.json"]:
            problems.append(f"{folder / same[0]} is not named by its content: rename it to {name}.json")
    return rows, problems
