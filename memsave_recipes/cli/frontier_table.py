"""The points of a frontier as a table in the terminal."""

import shutil
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from memsave_recipes.cli.recipe import Question
from memsave_recipes.planner.frontier import Point
from memsave_recipes.planner.report import format_rate, geometry_text
from memsave_recipes.units import format_bytes

BAR = 30  # characters of the fastest


def show_points(question: Question, points: Sequence[Point], *, all_rows: bool) -> None:
    """Print the Pareto-optimal points, or all of them, by memory; then what the figures rest on."""
    shown = sorted(
        (point for point in points if all_rows or point.is_optimal), key=lambda point: point.candidate.needed_bytes
    )
    console = Console(width=shutil.get_terminal_size(fallback=(120, 24)).columns)
    console.print(_table(shown))
    words = f"all {len(points)} points" if all_rows else f"{len(shown)} Pareto-optimal of {len(points)} points (--all)"
    for line in (words, *question.remarks):
        console.print(line, highlight=False, soft_wrap=True)


def _table(points: Sequence[Point]) -> Table:
    fastest = max(point.candidate.samples_per_s for point in points)
    has_losses = len({point.candidate.loss for point in points}) > 1
    has_measured = any(point.measured for point in points)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("needed", justify="right", no_wrap=True)
    for heading in ("micro x acc.", *(["loss"] if has_losses else []), "plan"):
        table.add_column(heading, no_wrap=True)
    for heading in ("samples/s", *(["measured", "needed"] if has_measured else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("samples/s, dots beyond the Pareto front", no_wrap=True)
    for point in points:
        one = point.candidate
        letter = "█" if point.is_optimal else "·"
        table.add_row(
            format_bytes(one.needed_bytes),
            geometry_text(one.geometry),
            *([one.loss or ""] if has_losses else []),
            one.strategy,
            format_rate(one.samples_per_s),
            *(_measured_cells(point) if has_measured else []),
            letter * max(1, round(BAR * one.samples_per_s / fastest)),
            style="" if one.fits else "dim",
        )
    return table


def _measured_cells(point: Point) -> list[str]:
    if point.measured is None or point.measured_samples_per_s is None:
        return ["-", "-"]
    return [format_rate(point.measured_samples_per_s), format_bytes(point.measured.needed_bytes)]
