"""``metrics.jsonl``: the run's own record, as one of Accelerate's trackers."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from accelerate.tracking import GeneralTracker, on_main_process

from memsave_recipes.errors import InputError

NAME = "metrics.jsonl"


class MetricsFile(GeneralTracker):
    """Appends one JSON object a line to ``metrics.jsonl``: ``{"step": n, **values}``, on disk as soon as it is logged.

    Floats keep every digit. JSON has no word for the ones that are not finite, so they are the strings ``"NaN"``,
    ``"Infinity"`` and ``"-Infinity"``, which ``float()`` reads back.
    """

    name = "metrics_file"
    requires_logging_directory = False

    def __init__(self, output_dir: Path):
        super().__init__()
        self.path = Path(output_dir) / NAME
        self.num_rows = 0
        self._file: TextIO | None = None

    @property
    def tracker(self) -> Path:
        """The file, as ``accelerator.get_tracker("metrics_file", unwrap=True)`` returns it."""
        return self.path

    @on_main_process
    def start(self) -> None:
        """Opens the file at its end, so that a resumed run continues it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", buffering=1, encoding="utf-8")
        with self.path.open("rb") as written:
            self.num_rows = sum(1 for _ in written)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Writes one row; values are ``int``, ``float``, ``str``, ``bool`` or ``None``."""
        if self._file is None:
            raise RuntimeError(f"{self.path} is not open")
        row = {"step": step, **{key: _as_json(value) for key, value in values.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self.num_rows += 1
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(f"{self.path} has been deleted, its rows are lost and checkpoints may be as well")

    def sync(self) -> int:
        """Brings all rows to the disk; returns how many they are, with those of earlier lives."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        return self.num_rows

    @on_main_process
    def finish(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def cut_back(folder: Path, step: int, *, evaluated_at: int | None, num_rows: int | None) -> list[str]:
    """Take out the rows after ``step``, what a killed run left half written, and the final figures.

    A run that goes on from ``step`` writes them again. So it does with the evaluation of ``step`` itself where the
    checkpoint does not know of it: the last one that it knows is ``evaluated_at``.

    Returns:
        A line where there are fewer rows left than the ``num_rows`` of the checkpoint, if it knows them.

    Raises:
        InputError: a row is none; nothing has been changed.
    """
    path = folder / NAME
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]  # all but what a kill has cut off
    rows = [_read_row(line, f"{path} line {number}") for number, line in enumerate(whole, start=1)]
    kept = [line for line, row in zip(whole, rows, strict=True) if _is_kept(row, step, evaluated_at or 0)]
    if lines:
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(b"".join(kept))
        temporary.replace(path)
    if num_rows is not None and len(kept) < num_rows:
        return [f"note: {path} has {len(kept)} of its {num_rows} rows up to step {step}: the others are lost"]
    return []


def _read_row(line: bytes, place: str) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        match json.loads(line):
            case {"step": int() | None} as row:
                return row
    raise InputError(
        f"--resume: {place} is no row of a run: repair it, or delete the line, whose figures are then lost"
    )


def _is_kept(row: dict[str, Any], step: int, evaluated_at: int) -> bool:
    if row["step"] is None or any(key.startswith("result/") for key in row):
        return False
    return row["step"] <= (evaluated_at if any(key.startswith("eval/") for key in row) else step)


def _as_json(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
