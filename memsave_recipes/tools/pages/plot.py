"""The figure of a frontier, and what it and ``charts`` share.

matplotlib is optional: other modules import these two when they draw.
"""

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from memsave_recipes.core.errors import packages_of
from memsave_recipes.core.text import GIB, MIB

with packages_of("plots", "charts"):
    from matplotlib import rc_context
    from matplotlib.axes import Axes as Axes  # which charts imports from here
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

if TYPE_CHECKING:
    from memsave_recipes.tools.fit.frontier import FrontierPoint  # which imports torch

Position = tuple[float, float]
"""In a chart: memory or samples seen, and samples/s or a loss."""
NUM_COLORS = 10  # of matplotlib's cycle
LINE_STYLES = ("-", "--", ":", "-.")
WIDE = 8.0  # an axis whose values differ by more than this factor is logarithmic
NAME_WIDTH, NAME_HEIGHT = 0.13, 0.025  # of the name of a point, as shares of the figure
INK = "#000000"


def new_figure(width: float = 11, height: float = 7) -> Figure:
    """Return a figure of so many inches."""
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def to_svg(figure: Figure) -> str:
    """Return the figure as an element of HTML, the same each time; its ink has the color of the text around it."""
    file = io.StringIO()
    with rc_context({"svg.hashsalt": "memsave", "svg.fonttype": "none"}):
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    _, tag, content = file.getvalue().partition("<svg")
    element = re.sub(' xmlns(:xlink)?="[^"]*"', "", content, count=2)  # HTML knows these names
    described = escape("; ".join(map(_described, figure.axes)))
    return f'{tag} role="img" aria-label="{described}"' + element.replace(f": {INK}", ": currentColor")


def _described(axes: Axes) -> str:
    """Return the texts of the chart and the lengths of its bars, for a screen reader."""
    texts = (axes.get_title(), axes.get_ylabel(), axes.get_xlabel())
    bars = [f"{bars.get_label()}: {', '.join(f'{bar.get_width():.3g}' for bar in bars)}" for bars in axes.containers]
    return "; ".join([*filter(None, texts), *bars]).replace(r"\$", "$")


def memory_unit(values: Sequence[float]) -> tuple[str, int]:
    """Return GiB or MiB, and the bytes of that unit."""
    return ("GiB", GIB) if max(values) >= GIB else ("MiB", MIB)


def plain(text: str) -> str:
    """Escape dollars, between which matplotlib would set a formula."""
    return text.replace("$", r"\$")


def draw_front(axes: Axes, front: Sequence[Position], size: int) -> None:
    """Draw a Pareto front as steps: with memory below that of the next point, none is faster than this one."""
    memory, speed = zip(*front, strict=True)
    axes.step([value / size for value in memory], speed, where="post", color="0.6", linestyle="--", zorder=1)


def frontier_figure(families: Mapping[str, Sequence["FrontierPoint"]], title: str, budget_bytes: int) -> Figure:
    """Draw memory against throughput: a color for each kind of plan, optimal points filled and named.

    Args:
        families: the points, by the kind of their plans.
    """
    points = [point for members in families.values() for point in members]
    optimal = [point for point in points if point.is_optimal]
    figure = new_figure()
    axes = figure.subplots()
    unit, size = memory_unit([point.candidate.needed_bytes for point in points])
    draw_front(axes, sorted(map(_predicted, optimal)), size)
    for index, (family, members) in enumerate(families.items()):
        _draw_family(axes, family, members, f"C{index % NUM_COLORS}", size)
    if budget_bytes < max(point.candidate.needed_bytes for point in points):
        axes.axvline(budget_bytes / size, color="C3", linestyle=":", label="the budget")
    axes.set(title=plain(title), xlabel=f"memory needed, {unit}", ylabel="throughput, samples/s")
    scales = ((axes.set_xscale, axes.xaxis), (axes.set_yscale, axes.yaxis))
    for (set_scale, axis), values in zip(scales, zip(*map(_predicted, points), strict=True), strict=True):
        if max(values) > WIDE * min(values):
            set_scale("log")
            _set_log_ticks(axis)
    _name_points(axes, optimal, size)
    axes.legend(fontsize=9, frameon=False)
    return figure


def _set_log_ticks(axis: Axis) -> None:
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


def _predicted(point: "FrontierPoint") -> Position:
    return point.candidate.needed_bytes, point.candidate.samples_per_s


def _name(point: "FrontierPoint") -> str:
    one = point.candidate
    loss = f", {one.loss} loss" if one.loss else ""
    reduction = ", reduced once a step" if one.reduces_once else ""
    return f"{one.layout.micro_batch_size} {one.strategy}{loss}{reduction}"


def _name_points(axes: Axes, points: Sequence["FrontierPoint"], size: int) -> None:
    """Name the points, the fastest first; leave out a name that would overlap another one."""
    named: list[Position] = []
    for point in sorted(points, key=lambda point: -point.candidate.samples_per_s):
        num_bytes, speed = _predicted(point)
        place = num_bytes / size, speed
        across, up = axes.transAxes.inverted().transform(axes.transData.transform(place))
        if all(abs(across - x) > NAME_WIDTH or abs(up - y) > NAME_HEIGHT for x, y in named):
            named.append((across, up))
            axes.annotate(plain(_name(point)), place, xytext=(6, -10), textcoords="offset points", fontsize=8)


def _draw_family(axes: Axes, family: str, points: Sequence["FrontierPoint"], color: str, size: int) -> None:
    """Draw predictions as circles, filled where they are optimal."""
    faces = [color if point.is_optimal else "none" for point in points]
    memory, speeds = zip(*map(_predicted, points), strict=True)
    across = [num_bytes / size for num_bytes in memory]
    axes.scatter(across, speeds, s=36, edgecolors=color, facecolors=faces, label=family, zorder=2)
