"""The plots: memory against time, ours as a line, the others as marks; a mark is filled where nothing beats it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from models import TITLES

from memory_time.methods import (
    BITWISE,
    BUDGET,
    CKPTPLAN,
    EVERY_BLOCK,
    EVERY_NTH,
    PLAIN,
    PLAIN_CHUNKED,
    SEGMENTS,
    SELECTIVE,
    SEQUENTIAL,
    WHOLE,
)

LOOKS = {  # marker, color, size
    SEQUENTIAL: ("s", "#c0392b", 30),
    SEGMENTS: ("s", "#e0892b", 30),
    EVERY_BLOCK: ("X", "#222222", 55),
    EVERY_NTH: ("^", "#7f8c8d", 38),
    SELECTIVE: ("D", "#8e44c9", 32),
    WHOLE: ("v", "#2e9e5b", 42),
    CKPTPLAN: ("P", "#b8860b", 45),
    PLAIN: ("*", "#222222", 130),
    PLAIN_CHUNKED: ("*", "#888888", 90),
}
LINES = {BITWISE: ("#7fa3f0", "--", 4), BUDGET: ("#1f4fd1", "-", 5)}  # color, style, size of the marks
NAMES = {BUDGET: "ours: budget", BITWISE: "ours: budget:bitwise", SEGMENTS: "segments:K (ours)"}
NUM_COLUMNS = 3


def write_model(model: dict[str, Any], path: Path) -> None:
    """The plot of one model."""
    figure = Figure(figsize=(8, 5.5), dpi=120, layout="constrained", facecolor="white")
    axes = figure.subplots()
    _draw(axes, model)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, format="png")


def write_all(models: Sequence[dict[str, Any]], path: Path) -> None:
    """Small plots of all models with one legend below."""
    columns = min(NUM_COLUMNS, len(models))
    num_rows = -(-len(models) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.4 * num_rows + 0.7), dpi=120, layout="constrained", facecolor="white")
    every = figure.subplots(num_rows, columns, squeeze=False).flat
    legend: dict[str, Any] = {}
    for axes, model in zip(every, models, strict=False):
        _draw(axes, model)
        handles, labels = axes.get_legend_handles_labels()
        legend |= {label: handle for label, handle in zip(labels, handles, strict=True) if label not in legend}
    for axes in list(every)[len(models) :]:
        axes.axis("off")
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.savefig(path, format="png")


def _draw(axes: Axes, model: dict[str, Any]) -> None:
    rows = [row for row in model["rows"] if "share" in row]
    axes.set_facecolor("white")
    axes.axhline(1, color="0.85", linewidth=1, zorder=0)
    for series, (marker, color, size) in LOOKS.items():
        points = [row for row in rows if row["series"] == series]
        if points:
            faces = [color if _is_best(row, rows) else "white" for row in points]
            axes.scatter(*_places(points), s=size, marker=marker, c=faces, edgecolors=color, zorder=3)
            axes.scatter([], [], s=size, marker=marker, c=color, label=NAMES.get(series, series))
    for series, (color, style, size) in LINES.items():
        points = sorted((row for row in rows if row["series"] == series), key=lambda row: row["share"])
        if points:
            front = [row for row in points if _is_best(row, points)]
            axes.step(*_places(front), where="post", color=color, linestyle=style, linewidth=1.6, zorder=4)
            axes.plot([], [], color=color, linestyle=style, marker="o", markersize=size, label=NAMES[series])
            faces = [color if _is_best(row, rows) else "white" for row in points]
            axes.scatter(*_places(points), s=size**2, c=faces, edgecolors=color, zorder=5)
    axes.set_title(TITLES[model["model"]], fontsize=11)
    axes.set_xlabel("activation peak, % of plain's", fontsize=9)
    axes.set_ylabel("time, plain = 1", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _places(rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return [100 * row["share"] for row in rows], [row["time_ratio"] for row in rows]


def _is_best(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Whether no other row is as small and faster, or as fast and smaller."""
    mine = (row["share"], row["time_ratio"])
    places = ((other["share"], other["time_ratio"]) for other in rows)
    return not any(place != mine and place[0] <= mine[0] and place[1] <= mine[1] for place in places)
