"""Figures of a frontier and of rows against memory, and what these and ``charts`` share.

matplotlib is optional: other modules import these two when they draw.
"""

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
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
    reached = [*map(_predicted, points), *filter(None, map(_measured, points))]
    scales = ((axes.set_xscale, axes.xaxis), (axes.set_yscale, axes.yaxis))
    for (set_scale, axis), values in zip(scales, zip(*reached, strict=True), strict=True):
        if max(values) > WIDE * min(values):
            set_scale("log")
            _set_log_ticks(axis)
    _name_points(axes, optimal, size)
    axes.legend(fontsize=9, frameon=False)
    return figure


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
    figure = new_figure()
    axes = figure.subplots()
    for index, (name, points) in enumerate(curves.items()):
        needed, tokens = [num_bytes / GIB for num_bytes, _ in points], [length for _, length in points]
        style = LINE_STYLES[index // NUM_COLORS % len(LINE_STYLES)]
        axes.plot(needed, tokens, marker="o", markersize=4, linestyle=style, label=plain(name))
    for name, num_bytes in cards.items():
        axes.axvline(num_bytes / GIB, color="0.6", linestyle=":")
        place = (num_bytes / GIB, 0.02)
        axes.annotate(plain(name), place, xycoords=("data", "axes fraction"), rotation=90, ha="right", va="bottom")
    for name, (num_bytes, length) in (marks or {}).items():
        place = (num_bytes / GIB, length)
        axes.scatter(*place, marker="*", s=140, color="0.2", zorder=3)
        axes.annotate(plain(name), place, xytext=(-8, 8), textcoords="offset points", ha="right", fontsize=9)
    axes.set(title=plain(title), xlabel="memory needed, GiB", ylabel="tokens of a row")
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    _set_log_ticks(axes.xaxis)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(fontsize=9, frameon=False)
    figure.savefig(path, format="png")


def _set_log_ticks(axis: Axis) -> None:
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


def _predicted(point: "FrontierPoint") -> Position:
    return point.candidate.needed_bytes, point.candidate.samples_per_s


def _measured(point: "FrontierPoint") -> Position | None:
    speed = point.measured_samples_per_s
    return (point.measured.needed_bytes, speed) if point.measured and speed else None


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
    """Draw predictions as circles, filled where they are optimal, each joined to the cross of its measurement."""
    faces = [color if point.is_optimal else "none" for point in points]
    memory, speeds = zip(*map(_predicted, points), strict=True)
    across = [num_bytes / size for num_bytes in memory]
    axes.scatter(across, speeds, s=36, edgecolors=color, facecolors=faces, label=family, zorder=2)
    for point in points:
        if (measured := _measured(point)) is not None:
            memory, speeds = zip(_predicted(point), measured, strict=True)
            across = [num_bytes / size for num_bytes in memory]
            axes.plot(across, speeds, color=color, linewidth=0.8)
            axes.scatter(across[1], speeds[1], s=40, marker="x", color=color, zorder=3)
