"""What the rest of a path adds at least: a Lagrangian relaxation of the limit on bytes.

Handler and Zang 1980, "A dual algorithm for the constrained shortest path problem"
(https://doi.org/10.1002/net.3230100403): forget the limit everywhere but at one block, and there, instead of forbidding
it, charge a price for every byte above the limit and pay it for every byte below. A path that fits is charged nothing,
so the cheapest path under the price adds no more than the cheapest one that fits, whatever the block and the price.

As a function of the price each path is a straight line, and the bound is the lowest of them. Its top is found as they
do: where a line that rises (the path is too large) meets one that falls (it fits), look for a path below; if there is
none, that is the top.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from memsave_recipes.plans.moves import EMPTY, HELD, WITH_STATE, Load, Move, Moves

BLOCKS_TRIED, PRICES_TRIED = 3, 12
DEAR = 1e6
"""Where bytes count for more than time: a price for all free bytes, in times of the longest move."""

Rest: TypeAlias = tuple[float, float]
"""Of the continuations that are charged for ``load[HELD]``, and of those for ``load[WITH_STATE]``: the cheapest."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Every continuation from ``position`` adds at least the smaller of ``rest[position][figure] + price * figure``.

    The figures are those of the load there. Behind ``block`` nothing is charged: the price is 0 (``price_at``).
    """

    block: int
    price: float  # ticks a byte
    rest: list[Rest]

    def price_at(self, position: int) -> float:
        """What a byte of the load before the block at ``position`` costs."""
        return self.price if position <= self.block else 0.0

    def rest_at_least(self, position: int, load: Load) -> float:
        """What every continuation adds at least, if it fits."""
        price, (held, with_state) = self.price_at(position), self.rest[position]
        return min(held + price * load[HELD], with_state + price * load[WITH_STATE])


@dataclass(frozen=True, kw_only=True)
class _Relaxed:
    """A bound with the cheapest path under its price: what it adds, and its bytes above the limit at the block."""

    bound: Bound
    added: int
    excess_bytes: int
    fullest_block: int

    @property
    def value(self) -> float:
        return self.bound.rest_at_least(0, EMPTY)


def lower_bounds(moves: Moves, free_bytes: int) -> list[Bound]:
    """The best bounds for a few blocks, best first: each next block is where the path of the last one needs most.

    One without a price is among them. It is the best one for small loads, which the others pay for being small.
    """
    unlimited = latest = _relax(moves, free_bytes, 0, 0.0)
    best: dict[int, _Relaxed] = {}
    while latest.fullest_block not in best and len(best) < BLOCKS_TRIED:
        block = latest.fullest_block
        latest = best[block] = _best_price(moves, free_bytes, block)
    ranked = sorted([*best.values(), unlimited], key=lambda relaxed: relaxed.value, reverse=True)
    return [relaxed.bound for relaxed in ranked]


def _best_price(moves: Moves, free_bytes: int, block: int) -> _Relaxed:
    relax = partial(_relax, moves, free_bytes, block)
    longest = max(abs(move.added) for leaving in moves for move in leaving)
    best = too_large = relax(0.0)
    fits = relax(DEAR * max(longest, 1) / max(free_bytes, 1))
    for _ in range(PRICES_TRIED):
        if not fits.excess_bytes <= 0 < too_large.excess_bytes:
            break
        middle = relax((fits.added - too_large.added) / (too_large.excess_bytes - fits.excess_bytes))
        best = max(best, middle, key=lambda relaxed: relaxed.value)
        if middle.excess_bytes in (too_large.excess_bytes, fits.excess_bytes):
            break
        if middle.excess_bytes > 0:
            too_large = middle
        else:
            fits = middle
    return best


def _relax(moves: Moves, free_bytes: int, block: int, price: float) -> _Relaxed:
    """The bound with this price at this block, from the last block to the first."""
    rest: list[Rest] = [(0.0, 0.0)] * (len(moves) + 1)
    for position in reversed(range(len(moves))):
        if position <= block:
            rest[position] = _charged(moves[position], rest, block, price, free_bytes)
        else:
            cheapest = min([move.added + rest[move.stop][HELD] for move in moves[position]], default=math.inf)
            rest[position] = (cheapest, cheapest)
    return _follow(moves, Bound(block=block, price=price, rest=rest), free_bytes)


def _charged(leaving: list[Move], rest: list[Rest], block: int, price: float, free_bytes: int) -> Rest:
    least = [math.inf, math.inf]
    for move in leaving:
        held, with_state = rest[move.stop]
        if move.stop > block:
            cost = move.added + held + price * (_beside(move) - free_bytes)
            least[move.held_from] = min(least[move.held_from], cost)
        else:
            held += move.added + price * move.held_bytes
            with_state += move.added + price * move.with_state_bytes
            least[move.held_from] = min(least[move.held_from], held)
            least[move.with_state_from] = min(least[move.with_state_from], with_state)
    return least[HELD], least[WITH_STATE]


def _beside(move: Move) -> int:
    """What the move over the block is charged for beside ``load[held_from]``: no more than it needs.

    Where that is ``load[HELD]``, the bytes beside the state are bytes beside the smaller figure all the more.
    """
    return max(move.beside_held_bytes, move.beside_state_bytes)


def _follow(moves: Moves, bound: Bound, free_bytes: int) -> _Relaxed:
    """Walk the path that attains the bound."""
    position, load = 0, EMPTY
    added, excess_bytes, fullest = 0, 0, (-1, 0)
    while position < len(moves):
        costs = [_cost(move, position, load, bound, free_bytes) for move in moves[position]]
        move = moves[position][costs.index(min(costs))]
        if position <= bound.block < move.stop:
            excess_bytes = load[move.held_from] + _beside(move) - free_bytes
        fullest = max(fullest, (move.peak_bytes(load), move.stop - 1))
        added += move.added
        position, load = move.stop, move.after(load)
    return _Relaxed(bound=bound, added=added, excess_bytes=excess_bytes, fullest_block=fullest[1])


def _cost(move: Move, position: int, load: Load, bound: Bound, free_bytes: int) -> float:
    """What the move and the cheapest path behind it add, charges included."""
    if position <= bound.block < move.stop:
        excess_bytes = load[move.held_from] + _beside(move) - free_bytes
        return move.added + bound.rest[move.stop][HELD] + bound.price * excess_bytes
    return move.added + bound.rest_at_least(move.stop, move.after(load))
