"""The rungs of ``memsave fit`` as lines, each printed as soon as it is known."""

from collections.abc import Iterator, Sequence

from memsave_recipes.planner.ladder import Rung
from memsave_recipes.render.choice import fits_text, layout_text
from memsave_recipes.text import format_bytes, format_seconds

HEADINGS = ("", "micro x acc.", "loss", "plan", "needed", "step", "time", "fits", "changes")
WIDTHS = (25, 12, 8, 10, 9, 9, 6, 15, 0)
RIGHT = {"needed", "step", "time"}


def heading() -> str:
    """The names of the columns, above a line."""
    names = _line(HEADINGS)
    return f"{names}\n {'─' * (sum(WIDTHS) + 2 * len(WIDTHS))}"


def row(rung: Rung, first: Rung) -> str:
    """A rung; its time as a multiple of the first one's."""
    candidate = rung.candidate
    cells = (
        rung.name,
        layout_text(candidate.layout),
        candidate.loss or "",
        candidate.strategy,
        format_bytes(candidate.needed_bytes),
        format_seconds(candidate.step_s),
        f"x{candidate.step_s / first.candidate.step_s:.2f}",
        fits_text(candidate),
        rung.changes or (f"{format_bytes(candidate.host_bytes)} on the host" if candidate.host_bytes else ""),
    )
    return _line(cells)


def _line(cells: Sequence[str]) -> str:
    return " " + "  ".join(_aligned(cells)).rstrip()


def _aligned(cells: Sequence[str]) -> Iterator[str]:
    for name, width, cell in zip(HEADINGS, WIDTHS, cells, strict=True):
        yield cell.rjust(width) if name in RIGHT else cell.ljust(width)
