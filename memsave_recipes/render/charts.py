"""Charts of the HTML pages, and the series that they and ``render/plot.py`` draw.

Lines are an SVG that stretches with the page. Dots, bars and texts are HTML at percentages of it, so that text keeps
its size on any screen. An element with ``data-run`` belongs to the run of that number.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby

from memsave_recipes.compare import SAMPLES_SEEN, ComparisonRow, Run, workload_key
from memsave_recipes.text import GIB, MIB, format_bytes, format_rate, spaced

Position = tuple[float, float]
"""In a chart: memory or samples seen, and samples/s or a loss."""
Entry = tuple[int, ComparisonRow]
"""A run with its number on the page."""

# The kinds of memory at the peak: memory.breakdown in results.json has them with the suffix _gib.
MEMORY_PARTS = ("parameters", "gradients", "optimizer_state", "activations", "temporaries")
REST = "not_broken_down"


@dataclass(frozen=True, kw_only=True)
class ChartPoint:
    """A candidate in a chart of memory against throughput.

    Args:
        family: the kind of plan, which has a color.
        predicted: bytes and samples a second.
        is_optimal: whether no other point is faster in as little memory.
        measured: bytes and samples a second, if it was run.
    """

    name: str
    family: str
    predicted: Position
    is_optimal: bool
    measured: Position | None = None


def front_of(points: Sequence[ChartPoint]) -> list[Position]:
    """Return the predicted positions of the optimal points, by memory."""
    return sorted(point.predicted for point in points if point.is_optimal)


def by_samples_seen(run: Run, key: str) -> list[Position]:
    """Return a figure of the history by samples seen, those of the training row of its step; not only finite ones."""
    seen = {step: samples for step, samples in run.history.curve(SAMPLES_SEEN).items() if math.isfinite(samples)}
    points = {seen[step]: value for step, value in run.history.curve(key).items() if step in seen}
    return sorted(points.items())


def pareto_fronts(rows: Sequence[ComparisonRow]) -> list[list[Position]]:
    """Return memory and throughput of each workload's Pareto-optimal rows, by memory."""
    fronts = defaultdict(list)
    for row in rows:
        if row.is_pareto_optimal and row.position:
            fronts[workload_key(row.run)].append(row.position)
    return [sorted(front) for front in fronts.values()]


def memory_parts(row: ComparisonRow) -> dict[str, float]:
    """Return the bytes of each kind at the peak; ``REST`` for those that the run did not break down."""
    gib = {kind: row.run.figure("memory", "breakdown", f"{kind}_gib") for kind in MEMORY_PARTS}
    parts = {kind: value * GIB for kind, value in gib.items() if value}
    rest = (row.peak_memory.value or 0) - sum(parts.values())
    is_rounding = parts and rest < 0.005 * sum(parts.values())
    return parts if is_rounding or rest <= 0 else {**parts, REST: rest}


MIN_SPAN = 0.3  # of the largest memory or speed that its axis covers
LOG_FROM = 30.0  # a loss that falls by more than this factor is drawn on a logarithmic axis
WIDE = 8.0  # an axis whose values differ by more than this factor is logarithmic


@dataclass(frozen=True)
class Axis:
    """A range of values as percentages of the plot's side, with its ticks."""

    title: str
    low: float
    high: float
    ticks: tuple[float, ...]
    text: Callable[[float], str]
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the position of ``value``, in per cent."""
        low, high, value = map(math.log, (self.low, self.high, value)) if self.is_log else (self.low, self.high, value)
        return 100 * (value - low) / (high - low)


def figure(title: str, hint: str, content: str, *, is_wide: bool = False) -> str:
    """Return a card with a title; a wide card has a row to itself."""
    kind = "card wide" if is_wide else "card"
    return f'<figure class="{kind}"><figcaption>{title} <small>{hint}</small></figcaption>{content}</figure>'


def frame(x: Axis, y: Axis, lines: str, dots: str) -> str:
    """Return a plot with its grid, ticks and titles; ``lines`` is SVG of 100 by 100, ``dots`` HTML."""
    grid = "".join(f'<path class="grid" d="M0 {100 - y.at(tick):.2f}H100"/>' for tick in y.ticks)
    x_ticks = "".join(f'<span style="left:{x.at(tick):.2f}%">{x.text(tick)}</span>' for tick in x.ticks)
    y_ticks = "".join(f'<span style="bottom:{y.at(tick):.2f}%">{y.text(tick)}</span>' for tick in y.ticks)
    return (
        f'<div class="y-title">{y.title}</div><div class="frame"><div class="y-ticks">{y_ticks}</div>'
        f'<div class="plot"><svg viewBox="0 0 100 100" preserveAspectRatio="none">{grid}{lines}</svg>{dots}</div>'
        f'<div class="x-ticks">{x_ticks}</div></div><div class="x-title">{x.title}</div>'
    )


def front_line(front: Sequence[Position], x: Axis, y: Axis) -> str:
    """Draw the Pareto front as steps: with memory below that of the next run, no run is faster than this one."""
    (first_peak, first_speed), *others = front
    steps = "".join(f"H{x.at(peak):.2f}V{100 - y.at(speed):.2f}" for peak, speed in others)
    return f'<path class="front" d="M{x.at(first_peak):.2f} {100 - y.at(first_speed):.2f}{steps}"/>'


def memory_axis(values: Sequence[float]) -> Axis:
    """Return an axis of bytes, in GiB or MiB."""
    unit, size = memory_unit(values)
    low, high = _range_of_cost(values)
    ticks = tuple(tick * size for tick in _ticks(low / size, high / size))
    return Axis(f"peak memory, {unit}", low, high, ticks, lambda value: f"{value / size:g}")


def memory_unit(values: Sequence[float]) -> tuple[str, int]:
    """Return GiB or MiB, and the bytes of that unit."""
    return ("GiB", GIB) if max(values) >= GIB else ("MiB", MIB)


def speed_axis(values: Sequence[float]) -> Axis:
    """Return an axis of samples a second."""
    return _linear_axis("samples/s", *_range_of_cost(values))


def widened(axis: Axis, values: Sequence[float], unit: float = 1.0) -> Axis:
    """Return ``axis``, logarithmic where ``values`` are far apart, with ticks in ``unit``."""
    low, high = min(values), max(values)
    if high < WIDE * low:
        return axis
    air = (high / low) ** 0.05
    low, high = low / air, high * air
    powers = range(math.floor(math.log10(low / unit)), math.ceil(math.log10(high / unit)) + 1)
    ticks = [factor * 10.0**power * unit for power in powers for factor in (1, 2, 5)]
    return replace(axis, low=low, high=high, ticks=tuple(tick for tick in ticks if low <= tick <= high), is_log=True)


def samples_axis(values: Sequence[float]) -> Axis:
    """Return an axis of samples seen."""
    low, high = min(values), max(values)
    return _linear_axis("samples seen", low, high if low < high else low + max(1.0, abs(low)))


def loss_axis(values: Sequence[float]) -> Axis:
    """Return an axis of a loss; logarithmic where it falls far."""
    low, high = min(values), max(values)
    if low <= 0 or high / low < LOG_FROM:
        margin = 0.04 * (high - low) or max(0.5, 0.04 * abs(high))
        return _linear_axis("loss", low - margin, high + margin)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = tuple(10.0**power for power in powers if low <= 10.0**power <= high)
    return Axis("loss, logarithmic", low, high, ticks, lambda value: f"{value:g}", is_log=True)


def _linear_axis(title: str, low: float, high: float) -> Axis:
    return Axis(title, low, high, _ticks(low, high), lambda value: f"{value:,.10g}")


def _range_of_cost(values: Sequence[float]) -> tuple[float, float]:
    """Return a range with margins, wide enough that a difference of a few per cent looks small."""
    high = max(values)
    low = min(*values, (1 - MIN_SPAN) * high)
    air = 0.08 * (high - low) or max(1.0, 0.08 * abs(high))
    return low - air, high + air


def _ticks(low: float, high: float) -> tuple[float, ...]:
    """Return some five round numbers between ``low`` and ``high``."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return tuple(round(index * step, 12) for index in range(math.ceil(low / step), math.floor(high / step) + 1))


NUM_COLORS = 10
DASHES = ("none", "7 3", "2 3", "9 3 2 3")  # tell runs of one color apart
MAX_POINTS = 600
MAX_ROWS = 8  # runs that are named in a chart; if there are more, numbers stand for the names in table and tooltips


def badge(number: int) -> str:
    """Return the number of a run in its color."""
    return f'<b class="badge" {_of_run(number)}>{number}</b>'


def scatter(entries: Sequence[Entry]) -> str:
    """Draw memory against throughput, with a line through the Pareto-optimal runs; empty unless two runs have both."""
    positions = {number: row.position for number, row in entries if row.position}
    if len(positions) < 2:
        return ""
    x = memory_axis([peak for peak, _ in positions.values()])
    y = speed_axis([speed for _, speed in positions.values()])
    lines = "".join(front_line(front, x, y) for front in pareto_fronts([row for _, row in entries]))
    is_few, rows = len(positions) <= MAX_ROWS, dict(entries)
    dots = "".join(_dot(n, rows[n], x.at(peak), y.at(speed), is_few) for n, (peak, speed) in positions.items())
    hint = "up and left is better; dashes join the Pareto-optimal"
    return figure("Memory against throughput", hint, frame(x, y, lines, dots), is_wide=not is_few)


def loss_curves(entries: Sequence[Entry], key: str, title: str) -> str:
    """Draw a loss by samples seen, one line a run; empty if no run has two finite points of it.

    Equal curves lie on one another, so of a few runs the first lines are wider.
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
    """Draw the peak of each run, by kind of memory where the run recorded that."""
    parts = {n: memory_parts(row) for n, row in entries}
    largest = max((sum(values.values()) for values in parts.values()), default=0)
    if not largest:
        return ""
    named = {name for values in parts.values() for name in values}
    is_broken_down = named != {REST}
    bars = "".join(_bar(n, row, parts[n], largest, is_broken_down) for n, row in entries if parts[n])
    legend = parts_legend([part for part in (*MEMORY_PARTS, REST) if part in named]) if is_broken_down else ""
    return figure("Peak memory", "by kind" if is_broken_down else "", f'{legend}<div class="bars">{bars}</div>')


def parts_legend(names: Sequence[str]) -> str:
    """Explain the color of each kind of memory."""
    spans = (f'<span><i class="part" {of_part(name)}></i>{spaced(name)}</span>' for name in names)
    return f'<div class="legend">{"".join(spans)}</div>'


def of_part(name: str, width: float | None = None) -> str:
    """Return the color of a kind of memory, and its width in per cent, as an attribute of HTML."""
    size = "" if width is None else f";width:{width:.3f}%"
    return f'style="background:var(--{spaced(name).replace(" ", "-")}){size}"'


def summary(row: ComparisonRow) -> str:
    """Return the tooltip of a run."""
    speed = row.samples_per_s.value
    lines = [
        row.name,
        " · ".join(filter(None, (row.plan, row.layout))),
        f"{format_bytes(row.peak_memory.value)} at the peak" if row.peak_memory.value is not None else "",
        f"{format_rate(speed)} samples/s" if speed is not None else "",
        "Pareto-optimal" if row.is_pareto_optimal else "",
    ]
    return "\n".join(filter(None, lines))


def _dot(number: int, row: ComparisonRow, across: float, up: float, is_named: bool) -> str:
    kind = "dot optimal" if row.is_pareto_optimal else "dot"
    side = "before" if across > 60 else "after"
    name = f'<span class="{side}">{escape(row.plan or row.name)}</span>' if is_named else ""
    attributes = _of_run(number, f"left:{across:.2f}%;bottom:{up:.2f}%")
    return f'<button class="{kind}" {attributes} data-tip="{escape(summary(row))}">{number}{name}</button>'


def _legend(entries: Sequence[Entry]) -> str:
    names = [f"<span>{badge(n)}{escape(row.name) if len(entries) <= MAX_ROWS else ''}</span>" for n, row in entries]
    return f'<div class="legend">{"".join(names)}</div>'


def _polyline(number: int, points: Sequence[Position], x: Axis, y: Axis, *, width: float) -> str:
    thinned = _thinned(points) if len(points) > 1 else [*points, *points]  # round line ends show a lone point
    path = " ".join(f"{x.at(across):.2f},{100 - y.at(up):.2f}" for across, up in thinned)
    dash = DASHES[(number - 1) // NUM_COLORS % len(DASHES)]
    style = f"stroke-width:{width:g};stroke-dasharray:{dash}"
    return f'<polyline class="curve" {_of_run(number, style)} points="{path}"/>'


def _bar(number: int, row: ComparisonRow, parts: dict[str, float], largest: float, is_broken_down: bool) -> str:
    segments = "".join(
        f'<i class="part" {of_part(name if is_broken_down else "run", 100 * value / largest)} '
        f'data-tip="{escape(row.name)}\n{spaced(name) if is_broken_down else "peak"}: {format_bytes(value)}"></i>'
        for name, value in parts.items()
    )
    return (
        f'<div {_of_run(number)}>{badge(number)}<span class="name">{escape(row.name)}</span>'
        f'<span class="track">{segments}</span><span class="total">{format_bytes(sum(parts.values()))}</span></div>'
    )


def _of_run(number: int, style: str = "") -> str:
    color = f"--run:var(--run-{(number - 1) % NUM_COLORS})"
    return f'data-run="{number}" style="{";".join(filter(None, (color, style)))}"'


def _line_width(index: int, num_lines: int) -> float:
    return 2.0 + 2.0 * (num_lines - 1 - index) if num_lines <= 5 else 1.6


def _finite_parts(points: Sequence[Position]) -> list[list[Position]]:
    """Cut a curve at the points that are not finite."""
    return [list(part) for is_finite, part in groupby(points, lambda point: math.isfinite(point[1])) if is_finite]


def _thinned(points: Sequence[Position]) -> Sequence[Position]:
    """Keep about ``MAX_POINTS``: the lowest and the highest of every stretch, so that no spike is lost."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / MAX_POINTS)
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    kept = [{pick(stretch, key=lambda point: point[1]) for pick in (min, max)} for stretch in stretches]
    return [points[0], *(point for few in kept for point in sorted(few)), points[-1]]
