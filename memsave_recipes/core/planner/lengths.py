"""Memory against the length of rows: what a step needs under each strategy, and the longest rows that fit.

The strategies are those whose costs ``memsave plan`` looks at for a budget. The solver's plan uses what memory there
is, so it has no curve.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from memsave_recipes.core.costs.block_costs import Measurement
from memsave_recipes.core.planner.search import Candidate, Choice, SearchSpace
from memsave_recipes.core.plans import BUDGET_WORDS
from memsave_recipes.core.step.batch_layout import BatchLayout

FIRST_LENGTH = 1024
TOKENS_APART = 64


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The candidates of a strategy by the length of their rows, short ones first."""

    strategy: str
    points: tuple[tuple[int, Candidate], ...]

    def longest(self, budget_bytes: int) -> int | None:
        """Return the longest rows that fit in a budget; ``None`` where the first do not.

        Bytes are interpolated between two lengths, to multiples of ``TOKENS_APART``. Where all fit, it is the last one.
        """
        fitting = [(length, one.needed_bytes) for length, one in self.points if one.needed_bytes <= budget_bytes]
        if not fitting:
            return None
        length, needed_bytes = fitting[-1]
        if len(fitting) == len(self.points):
            return length
        beyond, too_many = self.points[len(fitting)][0], self.points[len(fitting)][1].needed_bytes
        more = (beyond - length) * (budget_bytes - needed_bytes) // (too_many - needed_bytes)
        return (length + more) // TOKENS_APART * TOKENS_APART


def under_each(space: SearchSpace, measurement: Measurement, layout: BatchLayout, loss: str | None) -> list[Candidate]:
    """Make the candidate of each strategy, for ``choose_for_target``; only of the one that the flags name."""
    if space.strategy not in BUDGET_WORDS:
        return space.candidates(measurement, layout, loss)
    strategies = dict.fromkeys(("none", "full", *(plan.strategy for plan, _ in measurement.traces)))
    return [one for name in strategies for one in replace(space, strategy=name).candidates(measurement, layout, loss)]


def lengths(most: int) -> Iterator[int]:
    """Yield lengths that double from ``FIRST_LENGTH`` on, and ``most`` as the last one."""
    length = min(FIRST_LENGTH, most)
    while length < most:
        yield length
        length *= 2
    yield most


def curves(choose: Callable[[int], Choice], most: int) -> list[Curve]:
    """Make the curve of every strategy, up to the first length at which nothing fits.

    One that no longer fits has that length as its last point.

    Args:
        choose: the candidates for a length.
        most: the longest rows that make sense.
    """
    found: dict[str, list[tuple[int, Candidate]]] = {}
    for length in lengths(most):
        candidates = choose(length).candidates
        for one in candidates:
            points = found.setdefault(one.strategy, [])
            if not points or points[-1][1].fits:
                points.append((length, one))
        if not any(one.fits for one in candidates):
            break
    return [Curve(strategy=strategy, points=tuple(points)) for strategy, points in found.items()]


def lengths_of(curves: Sequence[Curve]) -> list[int]:
    """Return all lengths of which a curve has a point."""
    return sorted({length for curve in curves for length, _ in curve.points})
