"""``metrics.jsonl``: the run's own record, as one of Accelerate's trackers."""

import json
import math
from pathlib import Path
from typing import Any, TextIO

from accelerate.tracking import GeneralTracker, on_main_process

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

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Writes one row; values are ``int``, ``float``, ``str``, ``bool`` or ``None``."""
        if self._file is None:
            raise RuntimeError(f"{self.path} is not open")
        row = {"step": step, **{key: _as_json(value) for key, value in values.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")

    @on_main_process
    def finish(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def cut_back(folder: Path, step: int, *, evaluated_at: int | None) -> None:
    """Take out the rows after ``step``, what a killed run left half written, and the final figures.

    A run that goes on from ``step`` writes them again. So it does with the evaluation of ``step`` itself where the
    checkpoint does not know of it: the last one that it knows is ``evaluated_at``.
    """
    path = folder / NAME
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if _is_kept(line, step, evaluated_at or 0)]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


def _is_kept(line: str, step: int, evaluated_at: int) -> bool:
    if not line.endswith("\n"):
        return False
    row = json.loads(line)
    if row["step"] is None or any(key.startswith("result/") for key in row):
        return False
    return row["step"] <= (evaluated_at if any(key.startswith("eval/") for key in row) else step)


def _as_json(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
