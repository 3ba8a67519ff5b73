"""A plan or a frontier as one HTML file, in the style of the page that compares runs; it asks nothing of any server."""

from collections.abc import Sequence
from html import escape

from memsave_recipes.cli.picture import color_of, scatter
from memsave_recipes.cli.recipe import Question
from memsave_recipes.evidence.page import fill_page
from memsave_recipes.planner.frontier import Point
from memsave_recipes.planner.report import (
    PARTS,
    fits_text,
    format_rate,
    format_seconds,
    geometry_text,
    grouped_parts,
    overhead_lines,
    scale_of,
)
from memsave_recipes.planner.search import Candidate
from memsave_recipes.units import format_bytes

HEADINGS = ("plan", "micro-batch x accumulation", "peak", "needed", "step", "samples/s", "fits")


def plan_page(question: Question, points: Sequence[Point], chosen: Candidate, line: str) -> str:
    """The candidates of a choice, with the line that launches the chosen one."""
    title = f"{question.title}: {geometry_text(chosen.geometry)}, {chosen.strategy}"
    launch = f'<h3>Launch</h3><div class="card"><pre>{escape(line)}</pre></div><h3>Candidates</h3>'
    lines = [*question.remarks, *overhead_lines(chosen)]
    return fill_page(
        title, _subtitle(question), lines, f"<section>{launch}{_content(question, points, chosen)}</section>"
    )


def frontier_page(question: Question, points: Sequence[Point]) -> str:
    """Every strategy and micro-batch."""
    title = f"{question.title}: memory against throughput"
    return fill_page(title, _subtitle(question), question.remarks, f"<section>{_content(question, points)}</section>")


def _subtitle(question: Question) -> str:
    return f"budget {format_bytes(question.budget_bytes)}"


def _content(question: Question, points: Sequence[Point], chosen: Candidate | None = None) -> str:
    scale_bytes = scale_of([point.candidate for point in points])
    has_measured = any(point.measured for point in points)
    headings = [*HEADINGS, *(["measured samples/s"] if has_measured else [])]
    head = "".join(f'<th><button type="button">{escape(heading)}</button></th>' for heading in headings)
    head += '<th class="left"><button type="button">what fills it</button></th>'
    rows = "".join(
        _row(number, points, scale_bytes, is_chosen=point.candidate is chosen, has_measured=has_measured)
        for number, point in enumerate(points, start=1)
    )
    table = f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    listed = _parts_legend(points) + table
    chart = f'<div class="charts">{scatter(points, question.budget_bytes)}</div>'
    return chart + listed if chosen is None else listed + chart


def _row(number: int, points: Sequence[Point], scale_bytes: int, *, is_chosen: bool, has_measured: bool) -> str:
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
    return (
        f'<tr data-run="{number}"{"" if one.fits else " class=over"}><th data-value="{number}"><div>{badge}'
        f'<span>{name}</span></div></th><td data-value="{one.geometry.micro_batch_size}">'
        f"{geometry_text(one.geometry)}{_loss(one)}</td>{cells}"
        f"{_measured_cell(point) if has_measured else ''}"
        f'<td data-value="{one.needed_bytes}">{_bar(one, scale_bytes)}</td></tr>'
    )


def _measured_cell(point: Point) -> str:
    if point.measured is None:
        return '<td class="number" data-value=""></td>'
    speed, memory = point.measured_samples_per_s or 0.0, format_bytes(point.measured.needed_bytes)
    return f'<td class="number" data-value="{speed}">{format_rate(speed)}<small>{memory}</small></td>'


def _bar(one: Candidate, scale_bytes: int) -> str:
    """As long as its share of ``scale_bytes``; what needs more fills the track."""
    whole_bytes = max(scale_bytes, one.needed_bytes)
    parts = "".join(
        f'<i class="part" style="background:{_part_color(name)};width:{100 * num_bytes / whole_bytes:.2f}%" '
        f'data-tip="{name}: {format_bytes(num_bytes)}"></i>'
        for name, num_bytes in grouped_parts(one).items()
        if num_bytes > 0
    )
    return f'<span class="track">{parts}</span>'


def _parts_legend(points: Sequence[Point]) -> str:
    used = {name for point in points for name, num_bytes in grouped_parts(point.candidate).items() if num_bytes}
    spans = "".join(
        f'<span><i class="part" style="background:{_part_color(name)}"></i>{name}</span>'
        for name in PARTS
        if name in used
    )
    return f'<div class="legend">{spans}</div>'


def _part_color(name: str) -> str:
    return f"var(--{name.replace(' ', '-')})"


def _loss(one: Candidate) -> str:
    return f"<small>{escape(one.loss)} loss</small>" if one.loss else ""
