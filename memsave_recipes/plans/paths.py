"""The plans of a chain as paths: a *move* runs the next blocks under one action, a path of moves is a plan.

NOTE [ all that the future needs to know ]
1. Whether an edge fits depends on the edges before it through two figures alone, the ``Resources``: ``HELD``, the bytes
   that earlier blocks hold until their backward, and ``WITH_STATE``, the same with all of the *current state* (what
   flows into the next block) counted in. The state may be held already, in whole or in part, and each storage counts
   once.
2. What else lives beside them while the move runs, forward and backward, depends on the move alone. The gradients of
   parameters that live in its backward are those of all later blocks, whatever the plan.
3. Every figure after a move grows with the figures before it. So of two paths to one block, the one that adds no more
   seconds and is no larger in either figure is as good in every continuation: the other can be dropped, and the best
   path is still found.
4. Seconds are counted in whole ticks, a billionth of plain's forward: then sums of the same seconds in another order
   are equal, and ties are seen as ties.

What the rest of a path adds at least: a Lagrangian relaxation of the limit on bytes.

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
from typing import NamedTuple, TypeAlias

from memsave_recipes.plans.chain import BlockOption, Chain
from memsave_recipes.plans.plan import Action

HELD, WITH_STATE = 0, 1

Resources: TypeAlias = tuple[int, int]
"""The two figures of the NOTE, ``load[HELD] <= load[WITH_STATE]``, in bytes beside what is there all the time."""

EMPTY: Resources = (0, 0)
"""Before the first block, whose input is the batch and resident."""


class Edge(NamedTuple):
    """The blocks from some position up to ``stop`` under ``action``. All ``*_bytes`` are to be added to a load.

    In the load behind the move, ``HELD`` is ``held_bytes`` more than ``load[held_from]`` before it, and ``WITH_STATE``
    is ``with_state_bytes`` more than ``load[with_state_from]``. The move needs ``beside_held_bytes`` beside
    ``load[HELD]``, and at another moment ``beside_state_bytes`` beside ``load[WITH_STATE]``.
    """

    stop: int
    action: Action
    added: int  # ticks
    held_from: int
    held_bytes: int
    with_state_from: int
    with_state_bytes: int
    beside_held_bytes: int
    beside_state_bytes: int

    def after(self, resources: Resources) -> Resources:
        """The load behind it."""
        return resources[self.held_from] + self.held_bytes, resources[self.with_state_from] + self.with_state_bytes

    def peak_bytes(self, resources: Resources) -> int:
        """The most that lives while it runs."""
        return max(resources[HELD] + self.beside_held_bytes, resources[WITH_STATE] + self.beside_state_bytes)


Edges: TypeAlias = list[list[Edge]]
"""The moves that begin at each block of a chain."""


def edges_of(chain: Chain) -> Edges:
    """Every move of every plan: O(blocks^2) of them."""
    sizes = _Sizes(chain)
    return [
        [_by_itself(sizes, position, option) for option in block.options] + _recomputations(sizes, position)
        for position, block in enumerate(chain.blocks)
    ]


def tick_s(chain: Chain) -> float:
    """The seconds of a tick, the unit of ``Move.added``."""
    return 1e-9 * sum(block.forward_s for block in chain.blocks) or 1e-9


class _Sizes:
    """Sums along a chain: the bytes of each state, and of the gradients alive in each block's backward."""

    def __init__(self, chain: Chain) -> None:
        self.blocks = chain.blocks
        self.span_bytes = chain.span_bytes
        self.tick_s = tick_s(chain)
        self.states = [0]  # of the input of every block, and of the last output; the batch is resident
        for block in chain.blocks:
            self.states.append(block.output_bytes + (self.states[-1] if block.passes_input else 0))
        self.gradients = [0]  # made by the blocks behind each one
        for block in reversed(chain.blocks[1:]):
            self.gradients.append(self.gradients[-1] + chain.new_gradients_bytes(block))
        self.gradients.reverse()

    def ticks(self, seconds: float) -> int:
        """Seconds in whole ticks."""
        return round(seconds / self.tick_s)


def _by_itself(sizes: _Sizes, position: int, option: BlockOption) -> Edge:
    block = sizes.blocks[position]
    output, gradient = block.output_bytes, sizes.states[position + 1]
    # Holding an output that the input passes into is holding the input.
    holds_input = option.saves_input or (option.saves_output and block.passes_input)
    held = option.saved_bytes + (output if option.saves_output else 0)
    backward = held + gradient + option.backward_transient_bytes + sizes.gradients[position]
    forward = option.forward_transient_bytes
    return Edge(
        stop=position + 1,
        action=option.action,
        added=sizes.ticks(option.added_s),
        held_from=WITH_STATE if holds_input else HELD,
        held_bytes=held,
        with_state_from=WITH_STATE if holds_input or block.passes_input else HELD,
        with_state_bytes=option.saved_bytes + output,
        beside_held_bytes=0 if holds_input else backward,
        beside_state_bytes=max(forward, backward) if holds_input else forward,
    )


def _recomputations(sizes: _Sizes, start: int) -> list[Edge]:
    """The spans that recompute from ``start`` on: 1, 2, ... blocks of its stack. They hold all of their input."""
    edges: list[Edge] = []
    stack = sizes.blocks[start].stack
    passed = sizes.states[start]  # bytes of the span's input in the state behind it
    rebuilt = EMPTY  # by the recomputation, beside the span's input
    recompute = backward = 0
    added = 0
    for position in range(start, len(sizes.blocks)):
        block = sizes.blocks[position]
        if stack is None or block.stack != stack:
            break
        keep = _by_itself(sizes, position, block.option(Action.KEEP))
        recompute = max(recompute, rebuilt[WITH_STATE] + block.option(Action.KEEP).forward_transient_bytes)
        backward = max(backward, keep.peak_bytes(rebuilt))
        rebuilt = keep.after(rebuilt)
        added += sizes.ticks(block.forward_s)
        passed = passed if block.passes_input else 0
        state = sizes.states[position + 1]
        edges.append(
            Edge(
                stop=position + 1,
                action=Action.RECOMPUTE,
                added=added,
                held_from=WITH_STATE,
                held_bytes=sizes.span_bytes,
                with_state_from=WITH_STATE,
                with_state_bytes=sizes.span_bytes + state - passed,
                beside_held_bytes=0,
                beside_state_bytes=sizes.span_bytes + max(backward, recompute + state + sizes.gradients[position]),
            )
        )
    return edges


BLOCKS_TRIED, PRICES_TRIED = 3, 12
HIGH_PRICE = 1e6
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

    def rest_at_least(self, position: int, resources: Resources) -> float:
        """What every continuation adds at least, if it fits."""
        price, (held, with_state) = self.price_at(position), self.rest[position]
        return min(held + price * resources[HELD], with_state + price * resources[WITH_STATE])


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


def lower_bounds(edges: Edges, free_bytes: int) -> list[Bound]:
    """The best bounds for a few blocks, best first: each next block is where the path of the last one needs most.

    One without a price is among them. It is the best one for small loads, which the others pay for being small.
    """
    unlimited = latest = _relax(edges, free_bytes, 0, 0.0)
    best: dict[int, _Relaxed] = {}
    while latest.fullest_block not in best and len(best) < BLOCKS_TRIED:
        block = latest.fullest_block
        latest = best[block] = _best_price(edges, free_bytes, block)
    ranked = sorted([*best.values(), unlimited], key=lambda relaxed: relaxed.value, reverse=True)
    return [relaxed.bound for relaxed in ranked]


def _best_price(edges: Edges, free_bytes: int, block: int) -> _Relaxed:
    relax = partial(_relax, edges, free_bytes, block)
    longest = max(abs(edge.added) for leaving in edges for edge in leaving)
    best = too_large = relax(0.0)
    fits = relax(HIGH_PRICE * max(longest, 1) / max(free_bytes, 1))
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


def _relax(edges: Edges, free_bytes: int, block: int, price: float) -> _Relaxed:
    """The bound with this price at this block, from the last block to the first."""
    rest: list[Rest] = [(0.0, 0.0)] * (len(edges) + 1)
    for position in reversed(range(len(edges))):
        if position <= block:
            rest[position] = _charged(edges[position], rest, block, price, free_bytes)
        else:
            cheapest = min([edge.added + rest[edge.stop][HELD] for edge in edges[position]], default=math.inf)
            rest[position] = (cheapest, cheapest)
    return _follow(edges, Bound(block=block, price=price, rest=rest), free_bytes)


def _charged(leaving: list[Edge], rest: list[Rest], block: int, price: float, free_bytes: int) -> Rest:
    least = [math.inf, math.inf]
    for edge in leaving:
        held, with_state = rest[edge.stop]
        if edge.stop > block:
            cost = edge.added + held + price * (_beside(edge) - free_bytes)
            least[edge.held_from] = min(least[edge.held_from], cost)
        else:
            held += edge.added + price * edge.held_bytes
            with_state += edge.added + price * edge.with_state_bytes
            least[edge.held_from] = min(least[edge.held_from], held)
            least[edge.with_state_from] = min(least[edge.with_state_from], with_state)
    return least[HELD], least[WITH_STATE]


def _beside(edge: Edge) -> int:
    """What the move over the block is charged for beside ``load[held_from]``: no more than it needs.

    Where that is ``load[HELD]``, the bytes beside the state are bytes beside the smaller figure all the more.
    """
    return max(edge.beside_held_bytes, edge.beside_state_bytes)


def _follow(edges: Edges, bound: Bound, free_bytes: int) -> _Relaxed:
    """Walk the path that attains the bound."""
    position, resources = 0, EMPTY
    added, excess_bytes, fullest = 0, 0, (-1, 0)
    while position < len(edges):
        costs = [_cost(edge, position, resources, bound, free_bytes) for edge in edges[position]]
        edge = edges[position][costs.index(min(costs))]
        if position <= bound.block < edge.stop:
            excess_bytes = resources[edge.held_from] + _beside(edge) - free_bytes
        fullest = max(fullest, (edge.peak_bytes(resources), edge.stop - 1))
        added += edge.added
        position, resources = edge.stop, edge.after(resources)
    return _Relaxed(bound=bound, added=added, excess_bytes=excess_bytes, fullest_block=fullest[1])


def _cost(edge: Edge, position: int, resources: Resources, bound: Bound, free_bytes: int) -> float:
    """What the move and the cheapest path behind it add, charges included."""
    if position <= bound.block < edge.stop:
        excess_bytes = resources[edge.held_from] + _beside(edge) - free_bytes
        return edge.added + bound.rest[edge.stop][HELD] + bound.price * excess_bytes
    return edge.added + bound.rest_at_least(edge.stop, edge.after(resources))
