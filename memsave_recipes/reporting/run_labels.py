"""What a dashboard is told about a run before the run trains."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker


@dataclass(frozen=True, kw_only=True)
class RunLabels:
    """Runs of one ``group`` do the same work and are meant to be compared; the ``name`` is that of the method.

    A run that goes on has the ``earlier`` one's id in each tracker that gave it one, and its own first row at
    ``first_step``.
    """

    group: str
    name: str
    tags: list[str]
    config: dict[str, Any]
    output_dir: Path
    earlier: dict[str, str] | None = None
    first_step: int = 1


# Starts one tracker through Accelerate, from a configuration to be stored (or none) and the tracker's own arguments.
Launch = Callable[[dict[str, Any] | None, dict[str, Any]], list[GeneralTracker]]
