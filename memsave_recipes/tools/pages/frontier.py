"""A frontier, memory against throughput: in the terminal, and as one HTML file that needs no server.

``plan_page`` shows the candidates of ``memsave plan`` in the same way.
"""

from collections.abc import Sequence

from rich.table import Table

from memsave_recipes.core.planner.search import Candidate
from memsave_recipes.core.text import format_bytes, format_rate, format_seconds
from memsave_recipes.tools.fit.frontier import FrontierPoint
from memsave_recipes.tools.pages import new_table, show_all
from memsave_recipes.tools.pages.choice import (
    CandidateColumn,
    fits_text,
    grouped_parts,
    layout_text,
    overhead_lines,
    plan_columns,
    scale_of,
    used_parts,
)
from memsave_recipes.tools.pages.page import Cell, Row, Section, render_page

BAR_COLUMNS = 30  # of the fastest
HEADINGS = ("plan", "micro-batch x accumulation", "peak", "needed", "step", "samples/s", "fits")


def show_points(points: Sequence[FrontierPoint], remarks: Sequence[str], *, all_rows: bool) -> None:
    """Print the Pareto-optimal points, or all of them, by memory; then the sources of the figures."""
    shown = sorted(
        (point for point in points if all_rows or point.is_optimal), key=lambda point: point.candidate.needed_bytes
    )
    count = f"all {len(points)}" if all_rows else f"{len(shown)} Pareto-optimal of {len(points)}"
    show_all(_table(shown), f"{count} points{'' if all_rows else ' (--all)'}", *remarks)


def _table(points: Sequence[FrontierPoint]) -> Table:
    fastest = max(point.candidate.samples_per_s for point in points)
    columns = [
        CandidateColumn("needed", lambda one: format_bytes(one.needed_bytes), "right"),
        *plan_columns([point.candidate for point in points]),
        CandidateColumn("samples/s", lambda one: format_rate(one.samples_per_s), "right"),
    ]
    table = new_table()
    for column in columns:
        table.add_column(column.heading, justify=column.justify, no_wrap=True)
    table.add_column("samples/s, dots beyond the Pareto front", no_wrap=True)
    for point in points:
        one = point.candidate
        letters = ("█" if point.is_optimal else "·") * max(1, round(BAR_COLUMNS * one.samples_per_s / fastest))
        table.add_row(*(column.cell(one) for column in columns), letters, style="" if one.fits else "dim")
    return table


def plan_page(title: str, remarks: Sequence[str], points: Sequence[FrontierPoint], chosen: Candidate, line: str) -> str:
    """Return the page of a choice: its candidates, and the command line that launches the chosen one."""
    title = f"{title}: {layout_text(chosen.layout)}, {chosen.strategy}"
    lines = [*remarks, *overhead_lines(chosen)]
    return _page(title, lines, points, chosen.budget_bytes, chosen=chosen, command=line)


def frontier_page(title: str, remarks: Sequence[str], points: Sequence[FrontierPoint], budget_bytes: int) -> str:
    """Return the page of every strategy at every micro-batch size."""
    return _page(f"{title}: memory against throughput", remarks, points, budget_bytes)


def by_family(points: Sequence[FrontierPoint]) -> dict[str, list[FrontierPoint]]:
    """Return the points by the kind of their plans, ``every`` of ``every:2``; each kind has a color."""
    families: dict[str, list[FrontierPoint]] = {}
    for point in points:
        families.setdefault(_family(point), []).append(point)
    return families


def _family(point: FrontierPoint) -> str:
    return point.candidate.strategy.partition(":")[0]


def _page(
    title: str,
    lines: Sequence[str],
    points: Sequence[FrontierPoint],
    budget_bytes: int,
    *,
    chosen: Candidate | None = None,
    command: str = "",
) -> str:
    from memsave_recipes.tools.pages.plot import frontier_figure, to_svg

    families, candidates = by_family(points), [point.candidate for point in points]
    scale_bytes = scale_of(candidates)
    rows = [
        Row(
            number=number,
            color=list(families).index(_family(point)),
            name=point.candidate.strategy,
            marks=[
                *(["chosen"] if point.candidate is chosen else []),
                *(["Pareto-optimal"] if point.is_optimal else []),
            ],
            is_chosen=point.candidate is chosen,
            is_over=not point.candidate.fits,
            cells=[*_cells(point.candidate), _bar(point.candidate, scale_bytes)],
        )
        for number, point in enumerate(points, start=1)
    ]
    section = Section(
        headings=(*HEADINGS, "parts"),
        rows=sorted(rows, key=lambda row: not row.is_chosen),  # it is seen at once
        command=command,
        parts=used_parts(candidates),
        charts=[to_svg(frontier_figure(families, "", budget_bytes))],
    )
    return render_page(title, f"budget {format_bytes(budget_bytes)}", lines, [section])


def _cells(one: Candidate) -> list[Cell]:
    details = [f"{one.loss} loss"] if one.loss else []
    details += ["reduced once a step"] if one.reduces_once else []
    size = one.layout.micro_batch_size
    return [
        Cell(text=layout_text(one.layout), detail=", ".join(details), sort_by=size, kind=""),
        Cell(text=format_bytes(one.peak_bytes), sort_by=one.peak_bytes),
        Cell(text=format_bytes(one.needed_bytes), sort_by=one.needed_bytes),
        Cell(text=format_seconds(one.step_s), sort_by=one.step_s),
        Cell(text=format_rate(one.samples_per_s), sort_by=one.samples_per_s),
        Cell(text=fits_text(one), sort_by=one.needed_bytes - one.budget_bytes),
    ]


def _bar(one: Candidate, scale_bytes: int) -> Cell:
    """Draw a bar as long as its share of ``scale_bytes``, at most the whole track."""
    whole_bytes = max(scale_bytes, one.needed_bytes)
    parts = {name: 100 * size / whole_bytes for name, size in grouped_parts(one).items() if size > 0}
    return Cell(parts=parts, sort_by=one.needed_bytes, kind="")
