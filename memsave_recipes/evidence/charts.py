"""Charts of the page: HTML with small SVGs inside, drawn here so that the page needs no script to show them.

Whatever carries ``data-run`` belongs to the run of that number.
"""

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby

from memsave_recipes.evidence.axes import (
    Axis,
    figure,
    frame,
    front_line,
    loss_axis,
    memory_axis,
    samples_axis,
    speed_axis,
)
from memsave_recipes.evidence.columns import memory, rate
from memsave_recipes.evidence.compare import ComparisonRow
from memsave_recipes.evidence.series import MEMORY_PARTS, REST, Point, by_samples_seen, memory_parts, pareto_fronts

Entry = tuple[int, ComparisonRow]  # with the run's number on the page
NUM_COLORS = 10
DASHES = ("none", "7 3", "2 3", "9 3 2 3")  # tell runs of one color apart
MAX_POINTS = 600
FEW = 8  # so many runs are named in a chart; more are numbers, with their names in the table and the tooltips


def badge(number: int) -> str:
    """The number of a run in its color."""
    return f'<b class="badge" {_of_run(number)}>{number}</b>'


def scatter(entries: Sequence[Entry]) -> str:
    """Peak memory against throughput, with a line through the Pareto-optimal runs; empty if no run has both."""
    places = {number: row.place for number, row in entries if row.place}
    if not places:
        return ""
    x = memory_axis([peak for peak, _ in places.values()])
    y = speed_axis([speed for _, speed in places.values()])
    lines = "".join(front_line(front, x, y) for front in pareto_fronts([row for _, row in entries]))
    is_few = len(places) <= FEW
    dots = "".join(_dot(n, row, x.at(row.place[0]), y.at(row.place[1]), is_few) for n, row in entries if row.place)
    hint = "up and left is better; dashes join the Pareto-optimal"
    return figure("Memory against throughput", hint, frame(x, y, lines, dots), is_wide=not is_few)


def loss_curves(entries: Sequence[Entry], key: str, title: str) -> str:
    """A loss by samples seen, one line a run; empty if no run has two finite points of it.

    Equal curves lie on one another, so of a few runs the first lines are wider and stay visible below the others.
    """
    curves = {n: by_samples_seen(row.run, key) for n, row in entries}
    finite = [point for points in curves.values() for point in points if math.isfinite(point[1])]
    if all(len(points) < 2 for points in curves.values()) or not finite:
        return ""
    x = samples_axis([seen for seen, _ in finite])
    y = loss_axis([loss for _, loss in finite])
    lines = "".join(
        _polyline(number, part, x, y, width=_line_width(index, len(curves)))
        for index, (number, points) in enumerate(curves.items())
        for part in _finite_parts(points)
    )
    others = [row.loss_difference for _, row in entries if not row.is_baseline]
    is_same = key == "train/loss" and others and all(difference == 0 for difference in others)
    hint = "the same at every logged step" if is_same else "equal curves lie on one another"
    return figure(title, hint, _legend(entries) + frame(x, y, lines, ""))


def memory_bars(entries: Sequence[Entry]) -> str:
    """The peak of each run, broken down into what fills it where the run recorded that."""
    parts = {n: memory_parts(row) for n, row in entries}
    largest = max((sum(values.values()) for values in parts.values()), default=0)
    if not largest:
        return ""
    named = {name for values in parts.values() for name in values}
    is_broken_down = named != {REST}
    bars = "".join(_bar(n, row, parts[n], largest, is_broken_down) for n, row in entries if parts[n])
    legend = _parts_legend(named) if is_broken_down else ""
    return figure("Peak memory", "what filled it" if is_broken_down else "", f'{legend}<div class="bars">{bars}</div>')


def summary(row: ComparisonRow) -> str:
    """A run in a few lines, for the tooltip."""
    speed = row.samples_per_s.value
    lines = [
        row.name,
        " · ".join(filter(None, (row.plan, row.geometry))),
        f"{memory(row.peak_memory.value)} at the peak" if row.peak_memory.value is not None else "",
        f"{rate(speed)} samples/s" if speed is not None else "",
        "Pareto-optimal" if row.is_pareto_optimal else "",
    ]
    return "\n".join(filter(None, lines))


def _dot(number: int, row: ComparisonRow, across: float, up: float, is_named: bool) -> str:
    kind = "dot optimal" if row.is_pareto_optimal else "dot"
    side = "before" if across > 60 else "after"
    name = f'<span class="{side}">{escape(row.plan or row.name)}</span>' if is_named else ""
    place = _of_run(number, f"left:{across:.2f}%;bottom:{up:.2f}%")
    return f'<button class="{kind}" {place} data-tip="{escape(summary(row))}">{number}{name}</button>'


def _legend(entries: Sequence[Entry]) -> str:
    names = [f"<span>{badge(n)}{escape(row.name) if len(entries) <= FEW else ''}</span>" for n, row in entries]
    return f'<div class="legend">{"".join(names)}</div>'


def _polyline(number: int, points: Sequence[Point], x: Axis, y: Axis, *, width: float) -> str:
    thinned = _thinned(points) if len(points) > 1 else [*points, *points]  # round line ends show a lone point
    path = " ".join(f"{x.at(across):.2f},{100 - y.at(up):.2f}" for across, up in thinned)
    dash = DASHES[(number - 1) // NUM_COLORS % len(DASHES)]
    style = f"stroke-width:{width:g};stroke-dasharray:{dash}"
    return f'<polyline class="curve" {_of_run(number, style)} points="{path}"/>'


def _parts_legend(named: set[str]) -> str:
    shown = [part for part in (*MEMORY_PARTS, REST) if part in named]
    spans = (f'<span><i class="part" {_of_part(part)}></i>{_words(part)}</span>' for part in shown)
    return f'<div class="legend">{"".join(spans)}</div>'


def _bar(number: int, row: ComparisonRow, parts: dict[str, float], largest: float, is_broken_down: bool) -> str:
    segments = "".join(
        f'<i class="part" {_of_part(name if is_broken_down else "run", 100 * value / largest)} '
        f'data-tip="{escape(row.name)}\n{_words(name) if is_broken_down else "peak"}: {memory(value)}"></i>'
        for name, value in parts.items()
    )
    return (
        f'<div {_of_run(number)}>{badge(number)}<span class="name">{escape(row.name)}</span>'
        f'<span class="track">{segments}</span><span class="total">{memory(sum(parts.values()))}</span></div>'
    )


def _of_run(number: int, style: str = "") -> str:
    color = f"--run:var(--run-{(number - 1) % NUM_COLORS})"
    return f'data-run="{number}" style="{";".join(filter(None, (color, style)))}"'


def _of_part(name: str, width: float | None = None) -> str:
    size = "" if width is None else f";width:{width:.3f}%"
    return f'style="background:var(--{name.replace("_", "-")}){size}"'


def _words(part: str) -> str:
    return part.replace("_", " ")


def _line_width(index: int, num_lines: int) -> float:
    return 2.0 + 2.0 * (num_lines - 1 - index) if num_lines <= 5 else 1.6


def _finite_parts(points: Sequence[Point]) -> list[list[Point]]:
    """The stretches of a curve between the points that are not finite."""
    return [list(part) for is_finite, part in groupby(points, lambda point: math.isfinite(point[1])) if is_finite]


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """About ``MAX_POINTS`` of them: the lowest and the highest of every stretch, so that no spike is lost."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / MAX_POINTS)
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    kept = [{pick(stretch, key=lambda point: point[1]) for pick in (min, max)} for stretch in stretches]
    return [points[0], *(point for few in kept for point in sorted(few)), points[-1]]
