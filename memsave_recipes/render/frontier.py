"""A frontier, memory against throughput: in the terminal, as chart points, and as one HTML file that needs no server.

``plan_page`` shows the candidates of ``memsave plan`` in the same way.
"""

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from rich.table import Table
from rich.text import Text

from memsave_recipes.planner.lengths import Curve, lengths_of
from memsave_recipes.planner.search import Candidate
from memsave_recipes.planner.task import FrontierPoint
from memsave_recipes.render import new_table, show_all
from memsave_recipes.render.charts import (
    NUM_COLORS,
    Axis,
    ChartPoint,
    Position,
    figure,
    frame,
    front_line,
    front_of,
    memory_axis,
    memory_unit,
    of_part,
    parts_legend,
    speed_axis,
    widened,
)
from memsave_recipes.render.choice import (
    CandidateColumn,
    fits_text,
    grouped_parts,
    layout_text,
    overhead_lines,
    plan_columns,
    scale_of,
    used_parts,
)
from memsave_recipes.render.comparison import fill_page
from memsave_recipes.text import format_bytes, format_rate, format_seconds

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
    has_measured = any(point.measured for point in points)
    columns = [
        CandidateColumn("needed", lambda one: format_bytes(one.needed_bytes), "right"),
        *plan_columns([point.candidate for point in points]),
        CandidateColumn("samples/s", lambda one: format_rate(one.samples_per_s), "right"),
    ]
    table = new_table()
    for column in columns:
        table.add_column(column.heading, justify=column.justify, no_wrap=True)
    for heading in ("measured", "needed") if has_measured else ():
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("samples/s, dots beyond the Pareto front", no_wrap=True)
    for point in points:
        one = point.candidate
        cells = [*(column.cell(one) for column in columns), *(_measured_cells(point) if has_measured else [])]
        letters = ("█" if point.is_optimal else "·") * max(1, round(BAR_COLUMNS * one.samples_per_s / fastest))
        table.add_row(*cells, letters, style="" if one.fits else "dim")
    return table


def show_curves(found: Sequence[Curve], remarks: Sequence[str], budget_bytes: int) -> None:
    """Print what a step needs by the length of its rows, strategy by strategy; then the sources of the figures."""
    table = new_table()
    table.add_column("tokens", justify="right", no_wrap=True)
    for curve in found:
        table.add_column(curve.strategy, justify="right", no_wrap=True)
    for length in lengths_of(found):
        of_length = [dict(curve.points).get(length) for curve in found]
        cells = [Text(format_bytes(one.needed_bytes), "" if one.fits else "dim") if one else "" for one in of_length]
        table.add_row(f"{length:,}", *cells)
    longest = [curve.longest(budget_bytes) for curve in found]
    table.add_section()
    table.add_row("about", *("-" if length is None else f"{length:,}" for length in longest))
    ending = f"about: the longest rows that fit in {format_bytes(budget_bytes)}, between two lengths in proportion"
    show_all(table, ending, *remarks)


def _measured_cells(point: FrontierPoint) -> list[str]:
    if point.measured is None or point.measured_samples_per_s is None:
        return ["-", "-"]
    return [format_rate(point.measured_samples_per_s), format_bytes(point.measured.needed_bytes)]


def plan_page(title: str, remarks: Sequence[str], points: Sequence[FrontierPoint], chosen: Candidate, line: str) -> str:
    """Return the page of a choice: its candidates, and the command line that launches the chosen one."""
    title = f"{title}: {layout_text(chosen.layout)}, {chosen.strategy}"
    launch = f'<h3>Launch</h3><div class="card"><pre>{escape(line)}</pre></div><h3>Candidates</h3>'
    lines = [*remarks, *overhead_lines(chosen)]
    content = _content(points, chosen.budget_bytes, chosen)
    return fill_page(
        title, f"budget {format_bytes(chosen.budget_bytes)}", lines, f"<section>{launch}{content}</section>"
    )


def frontier_page(title: str, remarks: Sequence[str], points: Sequence[FrontierPoint], budget_bytes: int) -> str:
    """Return the page of every strategy at every micro-batch size."""
    content = f"<section>{_content(points, budget_bytes)}</section>"
    budget = f"budget {format_bytes(budget_bytes)}"
    return fill_page(f"{title}: memory against throughput", budget, list(remarks), content)


def _content(points: Sequence[FrontierPoint], budget_bytes: int, chosen: Candidate | None = None) -> str:
    scale_bytes = scale_of([point.candidate for point in points])
    has_measured = any(point.measured for point in points)
    headings = [*HEADINGS, *(["measured samples/s"] if has_measured else [])]
    head = "".join(f'<th><button type="button">{escape(heading)}</button></th>' for heading in headings)
    head += '<th class="left"><button type="button">parts</button></th>'
    rows = "".join(
        _row(number, points, scale_bytes, is_chosen=point.candidate is chosen, has_measured=has_measured)
        for number, point in enumerate(points, start=1)
    )
    table = f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    listed = parts_legend(used_parts([point.candidate for point in points])) + table
    chart = f'<div class="charts">{scatter(points, budget_bytes)}</div>'
    return chart + listed if chosen is None else listed + chart


def _row(number: int, points: Sequence[FrontierPoint], scale_bytes: int, *, is_chosen: bool, has_measured: bool) -> str:
    point = points[number - 1]
    one = point.candidate
    marks = (["chosen"] if is_chosen else []) + (["Pareto-optimal"] if point.is_optimal else [])
    name = escape(one.strategy) + "".join(f"<em>{mark}</em>" for mark in marks)
    badge = f'<b class="badge" style="{color_of(point, points)}">{number}</b>'
    figures = (
        (one.peak_bytes, format_bytes(one.peak_bytes)),
        (one.needed_bytes, format_bytes(one.needed_bytes)),
        (one.step_s, format_seconds(one.step_s)),
        (one.samples_per_s, format_rate(one.samples_per_s)),
        (one.needed_bytes - one.budget_bytes, fits_text(one)),
    )
    cells = "".join(f'<td class="number" data-value="{value}">{escape(text)}</td>' for value, text in figures)
    loss = f"<small>{escape(one.loss)} loss</small>" if one.loss else ""
    reduction = "<small>reduced once a step</small>" if one.reduces_once else ""
    return (
        f'<tr data-run="{number}"{"" if one.fits else " class=over"}><th data-value="{number}"><div>{badge}'
        f'<span>{name}</span></div></th><td data-value="{one.layout.micro_batch_size}">'
        f"{layout_text(one.layout)}{loss}{reduction}</td>{cells}"
        f"{_measured_cell(point) if has_measured else ''}"
        f'<td data-value="{one.needed_bytes}">{_bar(one, scale_bytes)}</td></tr>'
    )


def _measured_cell(point: FrontierPoint) -> str:
    if point.measured is None:
        return '<td class="number" data-value=""></td>'
    speed, memory = point.measured_samples_per_s or 0.0, format_bytes(point.measured.needed_bytes)
    return f'<td class="number" data-value="{speed}">{format_rate(speed)}<small>{memory}</small></td>'


def _bar(one: Candidate, scale_bytes: int) -> str:
    """Draw a bar as long as its share of ``scale_bytes``, at most the whole track."""
    whole_bytes = max(scale_bytes, one.needed_bytes)
    parts = "".join(
        f'<i class="part" {of_part(name, 100 * num_bytes / whole_bytes)} '
        f'data-tip="{name}: {format_bytes(num_bytes)}"></i>'
        for name, num_bytes in grouped_parts(one).items()
        if num_bytes > 0
    )
    return f'<span class="track">{parts}</span>'


def chart_points_of(points: Sequence[FrontierPoint]) -> list[ChartPoint]:
    """Return the points as ``render/plot.py`` draws them."""
    return list(map(_chart_point, points))


def color_of(point: FrontierPoint, points: Sequence[FrontierPoint]) -> str:
    """Return the color of its kind of plan, as a CSS style; ``points`` are all points of the page."""
    families = list(dict.fromkeys(map(_family, points)))
    return f"--run:var(--run-{families.index(_family(point)) % NUM_COLORS})"


def scatter(points: Sequence[FrontierPoint], budget_bytes: int) -> str:
    """Draw the chart of the page; optimal points have their number of the table, squares are measured."""
    chart_points = chart_points_of(points)
    measured = [chart_point.measured for chart_point in chart_points if chart_point.measured]
    memories, speeds = zip(*(chart_point.predicted for chart_point in chart_points), *measured, strict=True)
    unit, size = memory_unit(memories)
    x = replace(widened(memory_axis(memories), memories, size), title=f"memory needed, {unit}")
    y = widened(speed_axis(speeds), speeds)
    lines = front_line(front_of(chart_points), x, y)
    if x.low < budget_bytes < x.high:
        lines += f'<path class="limit" d="M{x.at(budget_bytes):.2f} 0V100"/>'
    dots = "".join(
        _dots(number, chart_point, color_of(point, points), x, y)
        for number, (chart_point, point) in enumerate(zip(chart_points, points, strict=True), start=1)
    )
    hint = "up and left is better; dashes join the Pareto-optimal" + ("; squares are measured" if measured else "")
    return figure("Memory against throughput", hint, _legend(points) + frame(x, y, lines, dots), is_wide=True)


def _chart_point(point: FrontierPoint) -> ChartPoint:
    one, speed = point.candidate, point.measured_samples_per_s
    loss = f", {one.loss} loss" if one.loss else ""
    reduction = ", reduced once a step" if one.reduces_once else ""
    return ChartPoint(
        name=f"{one.layout.micro_batch_size} {one.strategy}{loss}{reduction}",
        family=_family(point),
        predicted=(one.needed_bytes, one.samples_per_s),
        is_optimal=point.is_optimal,
        measured=(point.measured.needed_bytes, speed) if point.measured and speed else None,
    )


def _family(point: FrontierPoint) -> str:
    """Return the kind of its plan: ``every`` of ``every:2``."""
    return point.candidate.strategy.partition(":")[0]


def _legend(points: Sequence[FrontierPoint]) -> str:
    of_family = {_family(point): point for point in points}
    spans = "".join(
        f'<span><b class="badge" style="{color_of(point, points)}">&nbsp;</b>{escape(family)}</span>'
        for family, point in of_family.items()
    )
    return f'<div class="legend">{spans}</div>'


def _dots(number: int, chart_point: ChartPoint, color: str, x: Axis, y: Axis) -> str:
    def dot(kind: str, position: Position, text: str, prefix: str) -> str:
        num_bytes, speed = position
        style = f"{color};left:{x.at(num_bytes):.2f}%;bottom:{y.at(speed):.2f}%"
        tip = escape(f"{chart_point.name}\n{prefix}{format_bytes(num_bytes)}, {format_rate(speed)} samples/s")
        return f'<button class="dot {kind}" data-run="{number}" style="{style}" data-tip="{tip}">{text}</button>'

    kind, text = ("optimal", str(number)) if chart_point.is_optimal else ("small", "")
    drawn = dot(kind, chart_point.predicted, text, "")
    return drawn if chart_point.measured is None else drawn + dot("measured", chart_point.measured, "", "measured: ")
