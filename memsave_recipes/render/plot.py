"""Plots as PNG: of a comparison, up to three charts for each model, of a frontier, and of rows against memory.

matplotlib is optional and imported in no other module.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from memsave_recipes.compare import ComparisonRow, ComparisonTable
from memsave_recipes.render.charts import (
    MEMORY_PARTS,
    REST,
    WIDE,
    ChartPoint,
    by_samples_seen,
    front_of,
    memory_parts,
    memory_unit,
    pareto_fronts,
)
from memsave_recipes.text import GIB, spaced

NUM_COLORS = 10  # of matplotlib's cycle
LINE_STYLES = ("-", "--", ":", "-.")
NAME_WIDTH, NAME_HEIGHT = 0.13, 0.025  # of the name of a point, as shares of the figure
MAX_ROWS = 8  # runs that are named in their charts; if there are more, numbers stand for the names at their bars
PART_COLORS = dict(
    zip((*MEMORY_PARTS, REST), ("#3b64d6", "#7fa3f0", "#8e44c9", "#e0892b", "#e9c46a", "0.65"), strict=True)
)


def write_png(table: ComparisonTable, path: Path) -> None:
    """Draw memory against throughput, the peaks and the training losses; leave out a chart that would be empty."""
    sections = table.sections
    heights = [max(4.0, 0.22 * len(rows) + 1.5) for rows in sections]
    charts = [(draw, has_content) for draw, has_content in CHARTS if any(map(has_content, sections))]
    figure = Figure(figsize=(1 + 16 * len(charts) / 3, sum(heights)), dpi=120, layout="constrained")
    all_axes = figure.subplots(len(sections), len(charts), squeeze=False, height_ratios=heights)
    for rows, row_of_axes in zip(sections, all_axes, strict=True):
        for (draw, has_content), axes in zip(charts, row_of_axes, strict=True):
            if has_content(rows):
                draw(axes, rows)
            else:
                axes.set_axis_off()
    figure.savefig(path, format="png")


def write_frontier_png(points: Sequence[ChartPoint], path: Path, title: str, budget_bytes: int) -> None:
    """Draw memory against throughput: a color for each kind of plan, optimal points filled and named."""
    figure, axes = _single_plot()
    unit, size = memory_unit([point.predicted[0] for point in points])
    memory, speed = zip(*front_of(points), strict=True)
    axes.step([value / size for value in memory], speed, where="post", color="0.6", linestyle="--", zorder=1)
    for index, family in enumerate(dict.fromkeys(point.family for point in points)):
        _draw_family(axes, [point for point in points if point.family == family], f"C{index % NUM_COLORS}", size)
    if budget_bytes < max(point.predicted[0] for point in points):
        axes.axvline(budget_bytes / size, color="C3", linestyle=":", label="the budget")
    axes.set(title=_plain(title), xlabel=f"memory needed, {unit}", ylabel="throughput, samples/s")
    reached = [point.predicted for point in points] + [point.measured for point in points if point.measured]
    scales = ((axes.set_xscale, axes.xaxis), (axes.set_yscale, axes.yaxis))
    for (set_scale, axis), values in zip(scales, zip(*reached, strict=True), strict=True):
        if max(values) > WIDE * min(values):
            set_scale("log")
            _set_log_ticks(axis)
    _name_points(axes, [point for point in points if point.is_optimal], size)
    axes.legend(fontsize=9)
    figure.savefig(path, format="png")


def write_curves_png(
    curves: Mapping[str, Sequence[tuple[int, int]]],
    path: Path,
    title: str,
    cards: Mapping[str, int],
    marks: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    """Draw the length of rows against memory: a line for each strategy, dotted ones for the memory of cards.

    Args:
        curves: by name, (bytes, tokens).
        cards: by name, usable bytes.
        marks: figures of others by name, (bytes, tokens).
    """
    figure, axes = _single_plot()
    for index, (name, points) in enumerate(curves.items()):
        needed, tokens = [num_bytes / GIB for num_bytes, _ in points], [length for _, length in points]
        style = LINE_STYLES[index // NUM_COLORS % len(LINE_STYLES)]
        axes.plot(needed, tokens, marker="o", markersize=4, linestyle=style, label=_plain(name))
    for name, num_bytes in cards.items():
        axes.axvline(num_bytes / GIB, color="0.6", linestyle=":")
        place = (num_bytes / GIB, 0.02)
        axes.annotate(_plain(name), place, xycoords=("data", "axes fraction"), rotation=90, ha="right", va="bottom")
    for name, (num_bytes, length) in (marks or {}).items():
        place = (num_bytes / GIB, length)
        axes.scatter(*place, marker="*", s=140, color="0.2", zorder=3)
        axes.annotate(_plain(name), place, xytext=(-8, 8), textcoords="offset points", ha="right", fontsize=9)
    axes.set(title=_plain(title), xlabel="memory needed, GiB", ylabel="tokens of a row")
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    _set_log_ticks(axes.xaxis)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(fontsize=9)
    figure.savefig(path, format="png")


def _single_plot() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(11, 7), dpi=120, layout="constrained")
    return figure, figure.subplots()


def _set_log_ticks(axis: Axis) -> None:
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


def _name_points(axes: Axes, points: Sequence[ChartPoint], size: int) -> None:
    """Name the points, the fastest first; leave out a name that would overlap another one."""
    named: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: -point.predicted[1]):
        place = point.predicted[0] / size, point.predicted[1]
        across, up = axes.transAxes.inverted().transform(axes.transData.transform(place))
        if all(abs(across - x) > NAME_WIDTH or abs(up - y) > NAME_HEIGHT for x, y in named):
            named.append((across, up))
            axes.annotate(_plain(point.name), place, xytext=(6, -10), textcoords="offset points", fontsize=8)


def _draw_family(axes: Axes, points: Sequence[ChartPoint], color: str, size: int) -> None:
    """Draw predictions as circles, filled where they are optimal, each joined to the cross of its measurement."""
    places = [(point.predicted[0] / size, point.predicted[1]) for point in points]
    faces = [color if point.is_optimal else "none" for point in points]
    across, up = zip(*places, strict=True)
    axes.scatter(across, up, s=36, edgecolors=color, facecolors=faces, label=points[0].family, zorder=2)
    for point, place in zip(points, places, strict=True):
        if point.measured is not None:
            measured = point.measured[0] / size, point.measured[1]
            axes.plot(*zip(place, measured, strict=True), color=color, linewidth=0.8)
            axes.scatter(*measured, s=40, marker="x", color=color, zorder=3)


def _draw_scatter(axes: Axes, rows: Sequence[ComparisonRow]) -> None:
    unit, size = _unit(rows)
    for front in pareto_fronts(rows):
        memory, speed = zip(*front, strict=True)
        axes.step([value / size for value in memory], speed, where="post", color="0.6", linestyle="--")
    for index, row in enumerate(rows):
        if row.position is None:
            continue
        place = row.position[0] / size, row.position[1]
        color = f"C{index % NUM_COLORS}"
        axes.scatter(*place, s=60, edgecolors=color, facecolors=color if row.is_pareto_optimal else "none", zorder=2)
        label = _plain(row.plan or row.name) if len(rows) <= MAX_ROWS else f"{index + 1}"
        axes.annotate(label, place, xytext=(6, 5), textcoords="offset points", fontsize=9)
    axes.set(title=f"{_plain(row.model or 'unknown model')}: filled is Pareto-optimal")
    axes.set(xlabel=f"peak memory, {unit}", ylabel="throughput, samples/s")
    axes.margins(0.12)


def _draw_bars(axes: Axes, rows: Sequence[ComparisonRow]) -> None:
    unit, size = _unit(rows)
    parts = [memory_parts(row) for row in rows]
    ends = [0.0] * len(rows)
    for part, color in PART_COLORS.items():
        widths = [values.get(part, 0) / size for values in parts]
        if any(widths):
            axes.barh(_numbered_names(rows), widths, left=ends, label=spaced(part), color=color)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(title="peak memory by kind", xlabel=f"peak memory, {unit}")
    if any(ends):
        axes.legend(fontsize=8)


def _draw_losses(axes: Axes, rows: Sequence[ComparisonRow]) -> None:
    for index, (row, name) in enumerate(zip(rows, _numbered_names(rows), strict=True)):
        points = by_samples_seen(row.run, "train/loss")
        style = LINE_STYLES[index // NUM_COLORS % len(LINE_STYLES)]
        width = 1.5 + 1.5 * (len(rows) - 1 - index) if len(rows) <= MAX_ROWS else 1.2
        axes.plot(
            [seen for seen, _ in points], [loss for _, loss in points], linestyle=style, linewidth=width, label=name
        )
    axes.set(title="equal curves lie on one another", xlabel="samples seen", ylabel="training loss")
    axes.locator_params(axis="x", nbins=5)
    if len(rows) <= MAX_ROWS:
        axes.legend(fontsize=8)


def _has_places(rows: Sequence[ComparisonRow]) -> bool:
    return sum(row.position is not None for row in rows) > 1


def _has_curves(rows: Sequence[ComparisonRow]) -> bool:
    return any(len(by_samples_seen(row.run, "train/loss")) > 1 for row in rows)


CHARTS = ((_draw_scatter, _has_places), (_draw_bars, bool), (_draw_losses, _has_curves))
"""The functions that draw the runs of a model, and those that tell whether they have the content for it."""


def _unit(rows: Sequence[ComparisonRow]) -> tuple[str, int]:
    return memory_unit([row.peak_memory.value or 0 for row in rows])


def _numbered_names(rows: Sequence[ComparisonRow]) -> list[str]:
    return [f"{number}  {_plain(row.name)}" for number, row in enumerate(rows, start=1)]


def _plain(text: str) -> str:
    """Escape dollars, between which matplotlib would set a formula."""
    return text.replace("$", r"\$")
