"""Series: what the charts of a comparison show, as plain numbers, whoever draws them."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from memsave_recipes.evidence.comparability import competition
from memsave_recipes.evidence.compare import ComparisonRow
from memsave_recipes.evidence.runs import SAMPLES_SEEN, Run
from memsave_recipes.units import GIB

Point = tuple[float, float]
# What fills the memory at its peak, as memory.breakdown in results.json names it with _gib behind.
MEMORY_PARTS = ("parameters", "gradients", "optimizer_state", "activations", "temporaries")
REST = "not_broken_down"


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A way to run a model, in a picture of memory against throughput.

    Args:
        name: in a few words.
        family: what has its color: the kind of plan.
        place: bytes and samples a second, as predicted.
        is_optimal: no other spot is faster in as little memory.
        measured: the same, where it was really run.
    """

    name: str
    family: str
    place: Point
    is_optimal: bool
    measured: Point | None = None


def front_of(spots: Sequence[Spot]) -> list[Point]:
    """The places of the optimal ones, by memory."""
    return sorted(spot.place for spot in spots if spot.is_optimal)


def by_samples_seen(run: Run, key: str) -> list[Point]:
    """A figure of the history, such as ``train/loss``, by the samples that training had seen; not finite where it was.

    An evaluation is logged without them, so they are those of the training row of its step.
    """
    seen = {step: samples for step, samples in run.history.curve(SAMPLES_SEEN).items() if math.isfinite(samples)}
    points = {seen[step]: value for step, value in run.history.curve(key).items() if step in seen}
    return sorted(points.items())


def pareto_fronts(rows: Sequence[ComparisonRow]) -> list[list[Point]]:
    """Memory and throughput of each competition's Pareto-optimal rows, by memory. NOTE [ Pareto ] in ``compare``."""
    fronts = defaultdict(list)
    for row in rows:
        if row.is_pareto_optimal and row.place:
            fronts[competition(row.run)].append(row.place)
    return [sorted(front) for front in fronts.values()]


def memory_parts(row: ComparisonRow) -> dict[str, float]:
    """The bytes of each part of the peak; what the run did not break down is ``REST``."""
    gib = {part: row.run.figure("memory", "breakdown", f"{part}_gib") for part in MEMORY_PARTS}
    parts = {part: value * GIB for part, value in gib.items() if value}
    rest = (row.peak_memory.value or 0) - sum(parts.values())
    is_rounding = parts and rest < 0.005 * sum(parts.values())
    return parts if is_rounding or rest <= 0 else {**parts, REST: rest}
