"""Charts of compared runs: for each model memory against throughput, the peaks by kind, and the losses.

matplotlib draws them, as PNG and for the HTML page alike. A chart that would be empty is left out.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from memsave_recipes.core.text import GIB, spaced
from memsave_recipes.tools.compare import (
    EVAL_LOSS,
    PEAK,
    SAMPLES_SEEN,
    TRAIN_LOSS,
    ComparisonRow,
    ComparisonTable,
    Run,
    workload_key,
)
from memsave_recipes.tools.pages.plot import (
    LINE_STYLES,
    NUM_COLORS,
    Axes,
    Position,
    draw_front,
    memory_unit,
    new_figure,
    plain,
    to_svg,
)

REST = "not_broken_down"
PART_COLORS = {  # memory.breakdown in results.json has these kinds with the suffix _gib
    "parameters": "#3b64d6",
    "gradients": "#7fa3f0",
    "optimizer_state": "#8e44c9",
    "activations": "#e0892b",
    "temporaries": "#e9c46a",
    REST: "0.65",
}
MIN_BARS = 2  # a lone bar is as thick as one of so many
MAX_ROWS = 8  # runs that are named in their charts; if there are more, numbers stand for the names at their bars
LOG_FROM = 30.0  # a loss that falls by more than this factor is drawn on a logarithmic axis
MAX_LETTERS = 40  # of a name in a chart
CHART_WIDTH, CHART_HEIGHT = 5.5, 4.0  # inches


def write_png(table: ComparisonTable, path: Path) -> None:
    """Write the charts, a row of them for each model."""
    sections = table.sections
    charts = [chart for chart in CHARTS if any(map(chart.has_content, sections))] or CHARTS[:1]
    heights = list(map(_height, sections))
    figure = new_figure(1 + CHART_WIDTH * len(charts), sum(heights))
    all_axes = figure.subplots(len(sections), len(charts), squeeze=False, height_ratios=heights)
    for rows, row_of_axes in zip(sections, all_axes, strict=True):
        for chart, axes in zip(charts, row_of_axes, strict=True):
            if chart.has_content(rows):
                chart.draw(axes, rows)
            else:
                axes.set_axis_off()
    figure.savefig(path, format="png")


def svg_charts(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the charts of a model for a page."""
    charts = []
    for chart in CHARTS:
        if chart.has_content(rows):
            figure = new_figure(CHART_WIDTH, _height(rows))
            chart.draw(figure.subplots(), rows)
            charts.append(to_svg(figure))
    return charts


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
    gib = {kind: row.run.figure("memory", "breakdown", f"{kind}_gib") for kind in PART_COLORS}
    parts = {kind: value * GIB for kind, value in gib.items() if value}
    rest = (row.value(PEAK) or 0) - sum(parts.values())
    is_rounding = parts and rest < 0.005 * sum(parts.values())
    return parts if is_rounding or rest <= 0 else {**parts, REST: rest}


def _draw_scatter(axes: Axes, rows: Sequence[ComparisonRow]) -> None:
    unit, size = _unit(rows)
    for front in pareto_fronts(rows):
        draw_front(axes, front, size)
    peaks = [row.position[0] / size for row in rows if row.position]
    middle = (min(peaks) + max(peaks)) / 2
    for index, row in enumerate(rows):
        if row.position is None:
            continue
        place = row.position[0] / size, row.position[1]
        color = f"C{index % NUM_COLORS}"
        axes.scatter(*place, s=60, edgecolors=color, facecolors=color if row.is_pareto_optimal else "none", zorder=2)
        on_the_left = place[0] > middle
        label = _shortened(row.name) if len(rows) <= MAX_ROWS else f"{index + 1}"
        side = {"xytext": (-6, 5), "ha": "right"} if on_the_left else {"xytext": (6, 5)}
        axes.annotate(label, place, textcoords="offset points", fontsize=9, **side)
    axes.set(title=f"{_shortened(row.model or 'unknown model')}: filled is Pareto-optimal")
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
    beside = max(MIN_BARS - len(rows), 0) / 2
    axes.set_ylim(len(rows) - 0.5 + beside, -0.5 - beside)
    axes.set(title="peak memory by kind", xlabel=f"peak memory, {unit}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, fontsize=8, frameon=False)


def _draw_losses(axes: Axes, rows: Sequence[ComparisonRow], key: str, name: str) -> None:
    finite = []
    for index, (row, label) in enumerate(zip(rows, _numbered_names(rows), strict=True)):
        points = by_samples_seen(row.run, key)
        finite += [loss for _, loss in points if math.isfinite(loss)]
        seen, losses = zip(*points, strict=True) if points else ((), ())
        style = LINE_STYLES[index // NUM_COLORS % len(LINE_STYLES)]
        width = 1.5 + 1.5 * (len(rows) - 1 - index) if len(rows) <= MAX_ROWS else 1.2
        axes.plot(seen, losses, linestyle=style, linewidth=width, label=label)
    if min(finite) > 0 and max(finite) / min(finite) > LOG_FROM:
        axes.set_yscale("log")
    axes.set(title=f"{name}: equal curves lie on one another", xlabel="samples seen", ylabel=name)
    axes.locator_params(axis="x", nbins=5)
    if len(rows) <= MAX_ROWS:
        axes.legend(fontsize=8, frameon=False)


def _has_places(rows: Sequence[ComparisonRow]) -> bool:
    return sum(row.position is not None for row in rows) > 1


def _has_peaks(rows: Sequence[ComparisonRow]) -> bool:
    return any(map(memory_parts, rows))


def _has_curves(rows: Sequence[ComparisonRow], key: str) -> bool:
    curves = [by_samples_seen(row.run, key) for row in rows]
    return any(len(points) > 1 for points in curves) and any(
        math.isfinite(loss) for points in curves for _, loss in points
    )


@dataclass(frozen=True)
class Chart:
    """A chart of the runs of a model, and whether they have any content for it."""

    draw: Callable[[Axes, Sequence[ComparisonRow]], None]
    has_content: Callable[[Sequence[ComparisonRow]], bool]


CHARTS = (
    Chart(_draw_scatter, _has_places),
    Chart(_draw_bars, _has_peaks),
    *(
        Chart(partial(_draw_losses, key=key, name=name), partial(_has_curves, key=key))
        for key, name in ((TRAIN_LOSS, "training loss"), (EVAL_LOSS, "evaluation loss"))
    ),
)


def _height(rows: Sequence[ComparisonRow]) -> float:
    return max(CHART_HEIGHT, 0.22 * len(rows) + 1.5)


def _unit(rows: Sequence[ComparisonRow]) -> tuple[str, int]:
    return memory_unit([row.value(PEAK) or 0 for row in rows])


def _numbered_names(rows: Sequence[ComparisonRow]) -> list[str]:
    return [f"{number}  {_shortened(row.name)}" for number, row in enumerate(rows, start=1)]


def _shortened(text: str) -> str:
    return plain(text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 1]}…")
