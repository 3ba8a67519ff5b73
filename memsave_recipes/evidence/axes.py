"""Axes and frames of the page's charts: a range of values as percentages of a plot, and the grid around it.

Lines are an SVG that stretches with the page; dots, bars and every word are HTML at percentages of it, so text keeps
its size on a phone and on a wide screen.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from memsave_recipes.evidence.series import Point
from memsave_recipes.units import GIB, MIB

LEAST_SPAN = 0.3  # of the largest memory or speed that its axis covers
LOG_FROM = 30.0  # a loss that falls by more than this factor is drawn on a logarithmic axis
WIDE = 8.0  # of what differs by more than this factor, equal factors take equal lengths


@dataclass(frozen=True)
class Axis:
    """A range of values as percentages of the plot's side, with the ticks that are written beside it."""

    title: str
    low: float
    high: float
    ticks: tuple[float, ...]
    text: Callable[[float], str]
    is_log: bool = False

    def at(self, value: float) -> float:
        """Where ``value`` is, in per cent."""
        low, high, value = map(math.log, (self.low, self.high, value)) if self.is_log else (self.low, self.high, value)
        return 100 * (value - low) / (high - low)


def figure(title: str, hint: str, content: str, *, is_wide: bool = False) -> str:
    """A card with a title; a wide one has a row of its own."""
    kind = "card wide" if is_wide else "card"
    return f'<figure class="{kind}"><figcaption>{title} <small>{hint}</small></figcaption>{content}</figure>'


def frame(x: Axis, y: Axis, lines: str, dots: str) -> str:
    """A plot with its grid, ticks and titles; ``lines`` is SVG of 100 by 100, ``dots`` HTML."""
    grid = "".join(f'<path class="grid" d="M0 {100 - y.at(tick):.2f}H100"/>' for tick in y.ticks)
    x_ticks = "".join(f'<span style="left:{x.at(tick):.2f}%">{x.text(tick)}</span>' for tick in x.ticks)
    y_ticks = "".join(f'<span style="bottom:{y.at(tick):.2f}%">{y.text(tick)}</span>' for tick in y.ticks)
    return (
        f'<div class="y-title">{y.title}</div><div class="frame"><div class="y-ticks">{y_ticks}</div>'
        f'<div class="plot"><svg viewBox="0 0 100 100" preserveAspectRatio="none">{grid}{lines}</svg>{dots}</div>'
        f'<div class="x-ticks">{x_ticks}</div></div><div class="x-title">{x.title}</div>'
    )


def front_line(front: Sequence[Point], x: Axis, y: Axis) -> str:
    """Steps: up to the memory of the next run, no run is faster than this one."""
    (first_peak, first_speed), *others = front
    steps = "".join(f"H{x.at(peak):.2f}V{100 - y.at(speed):.2f}" for peak, speed in others)
    return f'<path class="front" d="M{x.at(first_peak):.2f} {100 - y.at(first_speed):.2f}{steps}"/>'


def memory_axis(values: Sequence[float]) -> Axis:
    """Of bytes, in GiB or MiB."""
    unit, size = memory_unit(values)
    low, high = _range_of_cost(values)
    ticks = tuple(tick * size for tick in _ticks(low / size, high / size))
    return Axis(f"peak memory, {unit}", low, high, ticks, lambda value: f"{value / size:g}")


def memory_unit(values: Sequence[float]) -> tuple[str, int]:
    """GiB or MiB, and its bytes."""
    return ("GiB", GIB) if max(values) >= GIB else ("MiB", MIB)


def speed_axis(values: Sequence[float]) -> Axis:
    """Of samples a second."""
    return _linear_axis("samples/s", *_range_of_cost(values))


def widened(axis: Axis, values: Sequence[float], unit: float = 1.0) -> Axis:
    """``axis``, logarithmic where ``values`` are far apart; its text is of values in ``unit``."""
    low, high = min(values), max(values)
    if high < WIDE * low:
        return axis
    air = (high / low) ** 0.05
    low, high = low / air, high * air
    powers = range(math.floor(math.log10(low / unit)), math.ceil(math.log10(high / unit)) + 1)
    ticks = [factor * 10.0**power * unit for power in powers for factor in (1, 2, 5)]
    return replace(axis, low=low, high=high, ticks=tuple(tick for tick in ticks if low <= tick <= high), is_log=True)


def samples_axis(values: Sequence[float]) -> Axis:
    """Of samples seen."""
    low, high = min(values), max(values)
    return _linear_axis("samples seen", low, high if low < high else low + max(1.0, abs(low)))


def loss_axis(values: Sequence[float]) -> Axis:
    """Of a loss; logarithmic where it falls far."""
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
    """With some air, and wide enough that a difference of a few per cent looks like one."""
    high = max(values)
    low = min(*values, (1 - LEAST_SPAN) * high)
    air = 0.08 * (high - low) or max(1.0, 0.08 * abs(high))
    return low - air, high + air


def _ticks(low: float, high: float) -> tuple[float, ...]:
    """Some five round numbers between ``low`` and ``high``."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return tuple(round(index * step, 12) for index in range(math.ceil(low / step), math.floor(high / step) + 1))
