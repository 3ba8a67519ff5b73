"""Runs: what a finished run left in its folder, as plain data.

``results.json`` holds the final figures, ``config.json`` the flags and the environment, ``metrics.jsonl`` one row a
logging step. Any figure may be absent.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from memsave_recipes.errors import InputError

OF_A_RUN = ("results.json", "config.json", "metrics.jsonl")
FIGURES = ("model", "memory", "perf", "eval")  # a results.json without any of them is another program's
NOT_FINITE = ("NaN", "Infinity", "-Infinity")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run. ``name`` is its folder's; ``history`` the rows of ``metrics.jsonl`` in the order of writing.

    ``path`` tells it from every other run: its folder, or ``entity/project/id`` of one that W&B keeps.
    """

    name: str
    path: Path
    results: dict[str, Any]
    config: dict[str, Any]
    history: list[dict[str, Any]]

    def figure(self, *keys: str) -> float | None:
        """A number of the results, as ``figure("memory", "peak_allocated_gib")``; ``None`` if absent or not finite."""
        value = _at(self.results, keys)
        return value if _is_number(value) and math.isfinite(value) else None

    def names(self, key: str) -> list[str]:
        """The names of the numbers in a part of the results, as ``names("eval")``."""
        part = self.results.get(key)
        return [name for name in part if self.figure(key, name) is not None] if isinstance(part, dict) else []

    def text(self, *keys: str) -> str | None:
        """A text of the results, as ``text("plan")``; ``None`` where it is absent."""
        value = _at(self.results, keys)
        return value if isinstance(value, str) else None


def read_run(folder: Path | str) -> Run:
    """Reads a run folder.

    Raises:
        InputError: a file is missing, so the run is not finished or none of ours, or a file cannot be read.
    """
    folder = Path(folder).resolve()
    missing = [name for name in OF_A_RUN if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder} is not a finished run (no {', no '.join(missing)}): finish it or leave it out")
    results = _parse(_read(folder / "results.json"), "results.json", folder)
    if not any(key in results for key in FIGURES):
        raise InputError(f"{folder} has a results.json with none of our figures, so it is no run of ours: leave it out")
    return Run(
        name=folder.name,
        path=folder,
        results=results,
        config=_parse(_read(folder / "config.json"), "config.json", folder),
        history=_parse_rows(_read(folder / "metrics.jsonl"), folder),
    )


def find_runs(path: Path | str) -> list[Path]:
    """What runs have left at or below ``path``, finished or not, sorted: their folders, and W&B logs (``*.wandb``).

    The log that a run keeps in its own folder tells of the same run again, so it is left out.

    Raises:
        InputError: there is no such path, or no run in it.
    """
    path = Path(path)
    if os.path.isfile(path) and path.suffix == ".wandb":
        return [path]
    if not os.path.isdir(path):  # unlike pathlib, without an error for what can be no path
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
    """The training loss by step, from ``train/loss``; a step that was logged twice has its last value."""
    losses = [(row.get("step"), row.get("train/loss")) for row in run.history]
    return {step: float(loss) for step, loss in losses if isinstance(step, int) and _is_number(loss)}


def history_row(row: dict[str, Any]) -> dict[str, Any]:
    """``row`` with the numbers that JSON has no word for."""
    return {key: float(value) if value in NOT_FINITE else value for key, value in row.items()}


def _at(nested: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        nested = nested.get(key) if isinstance(nested, dict) else None
    return nested


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): mend that or leave the run out") from error


def _parse(text: bytes, name: str, folder: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise InputError(f"{folder} has a damaged {name} ({error}): run it again or leave it out") from error
    if not isinstance(content, dict):
        raise InputError(f"{folder} has a {name} that is no JSON object, so it is no run of ours: leave it out")
    return content


def _parse_rows(text: bytes, folder: Path) -> list[dict[str, Any]]:
    lines = enumerate(text.splitlines(), start=1)
    return [history_row(_parse(line, f"metrics.jsonl line {n}", folder)) for n, line in lines]
