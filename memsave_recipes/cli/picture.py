"""Points as a picture of memory against throughput: for the page, and as what ``evidence/plot.py`` draws."""

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from memsave_recipes.evidence.axes import Axis, figure, frame, front_line, memory_axis, memory_unit, speed_axis, widened
from memsave_recipes.evidence.series import Spot, front_of
from memsave_recipes.planner.frontier import Point
from memsave_recipes.planner.report import format_rate
from memsave_recipes.units import format_bytes

NUM_COLORS = 10


def spots_of(points: Sequence[Point]) -> list[Spot]:
    """Each point where it needs so much memory and is so fast."""
    return [_spot(point) for point in points]


def color_of(point: Point, points: Sequence[Point]) -> str:
    """The color of its kind of plan, as a style; ``points`` are all that are in the page."""
    families = list(dict.fromkeys(map(_family, points)))
    return f"--run:var(--run-{families.index(_family(point)) % NUM_COLORS})"


def scatter(points: Sequence[Point], budget_bytes: int) -> str:
    """A chart of the page; the optimal ones have their number in the table, squares were measured."""
    spots = spots_of(points)
    measured = [spot.measured for spot in spots if spot.measured]
    memories, speeds = zip(*(spot.place for spot in spots), *measured, strict=True)
    unit, size = memory_unit(memories)
    x = replace(widened(memory_axis(memories), memories, size), title=f"memory needed, {unit}")
    y = widened(speed_axis(speeds), speeds)
    lines = front_line(front_of(spots), x, y)
    if x.low < budget_bytes < x.high:
        lines += f'<path class="limit" d="M{x.at(budget_bytes):.2f} 0V100"/>'
    dots = "".join(
        _dots(number, spot, color_of(point, points), x, y)
        for number, (spot, point) in enumerate(zip(spots, points, strict=True), start=1)
    )
    hint = "up and left is better; dashes join the Pareto-optimal" + ("; squares are measured" if measured else "")
    return figure("Memory against throughput", hint, _legend(points) + frame(x, y, lines, dots), is_wide=True)


def _spot(point: Point) -> Spot:
    one, speed = point.candidate, point.measured_samples_per_s
    loss = f", {one.loss} loss" if one.loss else ""
    return Spot(
        name=f"{one.geometry.micro_batch_size} {one.strategy}{loss}",
        family=_family(point),
        place=(one.needed_bytes, one.samples_per_s),
        is_optimal=point.is_optimal,
        measured=(point.measured.needed_bytes, speed) if point.measured and speed else None,
    )


def _family(point: Point) -> str:
    """The kind of its plan: ``every`` of ``every:2``."""
    return point.candidate.strategy.partition(":")[0]


def _legend(points: Sequence[Point]) -> str:
    of_family = {_family(point): point for point in points}
    spans = "".join(
        f'<span><b class="badge" style="{color_of(point, points)}">&nbsp;</b>{escape(family)}</span>'
        for family, point in of_family.items()
    )
    return f'<div class="legend">{spans}</div>'


def _dots(number: int, spot: Spot, color: str, x: Axis, y: Axis) -> str:
    def dot(kind: str, place: tuple[float, float], text: str, words: str) -> str:
        style = f"{color};left:{x.at(place[0]):.2f}%;bottom:{y.at(place[1]):.2f}%"
        tip = escape(f"{spot.name}\n{words}{format_bytes(round(place[0]))}, {format_rate(place[1])} samples/s")
        return f'<button class="dot {kind}" data-run="{number}" style="{style}" data-tip="{tip}">{text}</button>'

    kind, text = ("optimal", str(number)) if spot.is_optimal else ("small", "")
    drawn = dot(kind, spot.place, text, "")
    return drawn if spot.measured is None else drawn + dot("measured", spot.measured, "", "measured: ")
