"""The plans of a chain as paths of a resource-constrained shortest path problem, and lower bounds on their costs.

An *edge* runs the next blocks under one action. A path of edges over all blocks is a plan. The cost of a path is the
time that it adds, with its noise; its resources are the bytes that it holds.

Notes: ``docs/design/plans.md``.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import NamedTuple, TypeAlias

from memsave_recipes.core.plans.chain import BlockOption, Chain
from memsave_recipes.core.plans.plan import Action

HELD, WITH_STATE = 0, 1
"""Indices of ``Resources``."""

Resources: TypeAlias = tuple[int, int]
"""By rule 1 of NOTE [ resources ], in bytes besides the static ones: ``resources[HELD] <= resources[WITH_STATE]``. A
plain tuple, as the search makes millions of them."""

EMPTY: Resources = (0, 0)
"""The resources before the first block, whose input is the batch and resident."""


class Edge(NamedTuple):
    """The blocks from some position up to ``stop`` under ``action``, which may have a ``ratio``.

    ``resources`` are those before the edge. After it ``HELD`` is ``resources[held_from] + held_bytes``, and
    ``WITH_STATE`` is ``resources[with_state_from] + with_state_bytes``. Its peak is the larger one of ``resources[HELD]
    + peak_over_held_bytes`` and, at another moment, ``resources[WITH_STATE] + peak_over_state_bytes``.
    """

    stop: int
    action: Action
    cost: int  # ticks
    held_from: int
    held_bytes: int
    with_state_from: int
    with_state_bytes: int
    peak_over_held_bytes: int
    peak_over_state_bytes: int
    ratio: float | None = None

    def extend(self, resources: Resources) -> Resources:
        """Return the resources after it."""
        return resources[self.held_from] + self.held_bytes, resources[self.with_state_from] + self.with_state_bytes

    def peak_bytes(self, resources: Resources) -> int:
        """Return the most that is live while it runs."""
        return max(resources[HELD] + self.peak_over_held_bytes, resources[WITH_STATE] + self.peak_over_state_bytes)


Edges: TypeAlias = list[list[Edge]]
"""The edges that leave each block of a chain."""


@lru_cache(maxsize=8)
def edges_of(chain: Chain) -> Edges:
    """List every edge of every plan: O(blocks^2). Their peaks come on top of ``chain.extra_args_bytes``."""
    sizes = _Sizes(chain)
    return [
        [_single_block(sizes, position, option) for option in block.options if not option.action.kind.is_joint]
        + _joint_spans(sizes, position, nested=False)
        + (_joint_spans(sizes, position, nested=True) if chain.nested else [])
        for position, block in enumerate(chain.blocks)
    ]


def edges_without_second_runs(chain: Chain) -> Edges:
    """List the edges of the plans under which no block runs again, which hold no ``chain.extra_args_bytes``."""
    sizes = _Sizes(chain)
    return [
        [
            _single_block(sizes, position, option, extra_args_bytes=block.extra_args_bytes)
            for option in block.options
            if not option.action.kind.runs_twice
        ]
        for position, block in enumerate(chain.blocks)
    ]


def tick_s(chain: Chain) -> float:
    """Return the seconds of a tick, the unit of ``Edge.cost``."""
    return 1e-9 * sum(block.forward_s for block in chain.blocks) or 1e-9


class _Sizes:
    """Sums along a chain: the bytes of each state, and of the gradients that are live in each block's backward."""

    def __init__(self, chain: Chain) -> None:
        self.blocks = chain.blocks
        self.nested_option = cache(chain.nested_option)
        self.span_bytes = chain.span_bytes
        self.tick_s = tick_s(chain)
        self.states = chain.states_bytes
        self.gradients = [0]  # made by the blocks behind each one
        for block in reversed(chain.blocks[1:]):
            self.gradients.append(self.gradients[-1] + chain.new_gradients_bytes(block))
        self.gradients.reverse()

    def ticks(self, seconds: float) -> int:
        """Return seconds in whole ticks."""
        return round(seconds / self.tick_s)


def _single_block(sizes: _Sizes, position: int, option: BlockOption, extra_args_bytes: int = 0) -> Edge:
    """Return the edge of one block under ``option``."""
    block = sizes.blocks[position]
    output, gradient = block.output_bytes, sizes.states[position + 1]
    # With ``passes_input`` the output contains the input's storages, so whoever saves the output holds the input.
    holds_input = option.saves_input or (option.saves_output and block.passes_input)
    held = option.saved_bytes + (output if option.saves_output else 0)
    backward = held + gradient + option.backward_transient_bytes + sizes.gradients[position]
    backward *= block.has_backward
    forward = extra_args_bytes + option.forward_transient_bytes
    return Edge(
        stop=position + 1,
        action=option.action,
        cost=sizes.ticks(option.added_s + option.noise_s),
        held_from=WITH_STATE if holds_input else HELD,
        held_bytes=held,
        with_state_from=WITH_STATE if holds_input or block.passes_input else HELD,
        with_state_bytes=option.saved_bytes + output,
        peak_over_held_bytes=0 if holds_input else backward,
        peak_over_state_bytes=max(forward, backward) if holds_input else forward,
        ratio=option.ratio,
    )


def _joint_spans(sizes: _Sizes, start: int, *, nested: bool) -> list[Edge]:
    """List the spans of 1, 2, ... blocks from ``start`` on that run again together. They hold their input.

    Args:
        nested: whether the second run keeps only the inputs of the blocks, which then recompute one by one.
    """
    edges: list[Edge] = []
    first = sizes.blocks[start]
    stack = None if first.is_frozen else first.stack
    passed = sizes.states[start]  # bytes of the span's input in the state behind it
    rebuilt = EMPTY  # by the second run, besides the span's input
    first_run = second_run = backward = 0  # peaks so far; ``second_run`` without the span's last block
    cost = last_cost = 0  # ``last_cost``: the second forward of that block, which a nested span leaves out
    held = sizes.span_bytes
    for position in range(start, len(sizes.blocks)):
        block = sizes.blocks[position]
        if stack is None or block.stack != stack or block.has_backward != first.has_backward:
            break
        option = sizes.nested_option(position) if nested else block.option(Action.KEEP)
        reached = rebuilt[WITH_STATE]
        behind_input = sizes.states[position] - passed
        first_run = max(first_run, behind_input + sizes.span_bytes + block.until_last_saved_bytes)
        rebuilt = _single_block(sizes, position, option).extend(rebuilt)
        forward_cost = sizes.ticks(block.forward_s + block.forward_noise_s)
        last_run = 0
        if nested:  # the second run does not reach the last block
            held += option.saved_bytes
            cost += last_cost + sizes.ticks(option.added_s + option.noise_s)
            last_cost = forward_cost
        else:
            cost += forward_cost
            last_run = reached + block.until_last_saved_bytes
        passed = passed if block.passes_input else 0
        state = sizes.states[position + 1]
        backward = max(backward, rebuilt[HELD] + state + option.backward_transient_bytes + sizes.gradients[position])
        live = state + block.untracked_bytes + sizes.span_bytes + sizes.gradients[position]  # while it runs again
        has_second_run = not nested or position > start
        again = max(backward, max(second_run, last_run) + live if has_second_run else 0)
        edges.append(
            Edge(
                stop=position + 1,
                action=Action.RECOMPUTE_NESTED if nested else Action.RECOMPUTE,
                cost=cost * first.has_backward,
                held_from=WITH_STATE,
                held_bytes=held,
                with_state_from=WITH_STATE,
                with_state_bytes=held + state - passed,
                peak_over_held_bytes=0,
                peak_over_state_bytes=max(first_run, (held + again) * first.has_backward),
            )
        )
        second_run = max(second_run, reached + option.forward_transient_bytes)
    return edges


MAX_BLOCKS_RELAXED, MAX_CUTS = 3, 12
LARGE_MULTIPLIER = 1e6
"""What the largest multiplier charges for all free bytes, in costs of the longest edge: bytes outweigh time."""

CostToGo: TypeAlias = tuple[float, float]
"""The least costs of the continuations that are charged for ``HELD``, and of those charged for ``WITH_STATE``."""


@dataclass(frozen=True, kw_only=True)
class CompletionBound:
    """A lower bound on the cost of every feasible continuation: NOTE [ completion bounds ].

    From ``position`` on it is the smaller of ``cost_to_go[position][i] + multiplier * resources[i]``, ``i`` being
    ``HELD`` or ``WITH_STATE``. Behind ``block`` nothing is charged: the multiplier is 0 (``multiplier_at``).
    """

    block: int
    multiplier: float  # ticks a byte
    cost_to_go: list[CostToGo]

    def multiplier_at(self, position: int) -> float:
        """Return the charge for a byte held before the block at ``position``."""
        return self.multiplier if position <= self.block else 0.0

    def at_least(self, position: int, resources: Resources) -> float:
        """Return the bound for a path that reached ``position`` with ``resources``."""
        multiplier, (held, with_state) = self.multiplier_at(position), self.cost_to_go[position]
        return min(held + multiplier * resources[HELD], with_state + multiplier * resources[WITH_STATE])


@dataclass(frozen=True, kw_only=True)
class _Relaxation:
    """A bound, and the path that attains it: its cost, and its bytes above the limit at the block."""

    bound: CompletionBound
    cost: int
    excess_bytes: int
    fullest_block: int

    @property
    def value(self) -> float:
        """The value of the dual function."""
        return self.bound.at_least(0, EMPTY)


def lower_bounds(edges: Edges, free_bytes: int) -> list[CompletionBound]:
    """Return bounds for a few blocks, the best first. The next block is the one where the last bound's path peaks.

    One bound has the multiplier 0. It is the tightest for small resources, as the others reward bytes below the limit.
    """
    unlimited = latest = _relax(edges, free_bytes, 0, 0.0)
    best: dict[int, _Relaxation] = {}
    while latest.fullest_block not in best and len(best) < MAX_BLOCKS_RELAXED:
        block = latest.fullest_block
        latest = best[block] = _maximise_dual(edges, free_bytes, block)
    ranked = sorted([*best.values(), unlimited], key=lambda relaxation: relaxation.value, reverse=True)
    return [relaxation.bound for relaxation in ranked]


def _maximise_dual(edges: Edges, free_bytes: int, block: int) -> _Relaxation:
    """Maximise by rule 2 of NOTE [ completion bounds ]."""
    relax = partial(_relax, edges, free_bytes, block)
    longest = max(abs(edge.cost) for leaving in edges for edge in leaving)
    best = infeasible = relax(0.0)
    feasible = relax(LARGE_MULTIPLIER * max(longest, 1) / max(free_bytes, 1))
    for _ in range(MAX_CUTS):
        if not feasible.excess_bytes <= 0 < infeasible.excess_bytes:
            break
        middle = relax((feasible.cost - infeasible.cost) / (infeasible.excess_bytes - feasible.excess_bytes))
        best = max(best, middle, key=lambda relaxation: relaxation.value)
        if middle.excess_bytes in (infeasible.excess_bytes, feasible.excess_bytes):
            break
        if middle.excess_bytes > 0:
            infeasible = middle
        else:
            feasible = middle
    return best


def _relax(edges: Edges, free_bytes: int, block: int, multiplier: float) -> _Relaxation:
    """Compute the bound with this multiplier at this block, from the last block to the first."""
    cost_to_go: list[CostToGo] = [(0.0, 0.0)] * (len(edges) + 1)
    for position in reversed(range(len(edges))):
        if position <= block:
            cost_to_go[position] = _charged(edges[position], cost_to_go, block, multiplier, free_bytes)
        else:
            least = min([edge.cost + cost_to_go[edge.stop][HELD] for edge in edges[position]], default=math.inf)
            cost_to_go[position] = (least, least)
    return _follow(edges, CompletionBound(block=block, multiplier=multiplier, cost_to_go=cost_to_go), free_bytes)


def _charged(
    leaving: list[Edge], cost_to_go: list[CostToGo], block: int, multiplier: float, free_bytes: int
) -> CostToGo:
    """Return the costs to go of a block up to the charged one, by the edges that leave it."""
    least = [math.inf, math.inf]
    for edge in leaving:
        held, with_state = cost_to_go[edge.stop]
        if edge.stop > block:
            cost = edge.cost + held + multiplier * (_peak_over(edge) - free_bytes)
            least[edge.held_from] = min(least[edge.held_from], cost)
        else:
            held += edge.cost + multiplier * edge.held_bytes
            with_state += edge.cost + multiplier * edge.with_state_bytes
            least[edge.held_from] = min(least[edge.held_from], held)
            least[edge.with_state_from] = min(least[edge.with_state_from], with_state)
    return least[HELD], least[WITH_STATE]


def _peak_over(edge: Edge) -> int:
    """Return a lower bound on the peak of an edge, in bytes above ``resources[held_from]``.

    It is a bound also if that is ``HELD``, as ``HELD`` is never more than ``WITH_STATE``.
    """
    return max(edge.peak_over_held_bytes, edge.peak_over_state_bytes)


def _follow(edges: Edges, bound: CompletionBound, free_bytes: int) -> _Relaxation:
    """Walk the path that attains the bound."""
    position, resources = 0, EMPTY
    cost, excess_bytes, fullest = 0, 0, (-1, 0)
    while position < len(edges):
        costs = [_relaxed_cost(edge, position, resources, bound, free_bytes) for edge in edges[position]]
        edge = edges[position][costs.index(min(costs))]
        if position <= bound.block < edge.stop:
            excess_bytes = resources[edge.held_from] + _peak_over(edge) - free_bytes
        fullest = max(fullest, (edge.peak_bytes(resources), edge.stop - 1))
        cost += edge.cost
        position, resources = edge.stop, edge.extend(resources)
    return _Relaxation(bound=bound, cost=cost, excess_bytes=excess_bytes, fullest_block=fullest[1])


def _relaxed_cost(edge: Edge, position: int, resources: Resources, bound: CompletionBound, free_bytes: int) -> float:
    """Return the cost of the edge and the shortest path behind it, charges included."""
    if position <= bound.block < edge.stop:
        excess_bytes = resources[edge.held_from] + _peak_over(edge) - free_bytes
        return edge.cost + bound.cost_to_go[edge.stop][HELD] + bound.multiplier * excess_bytes
    return edge.cost + bound.at_least(edge.stop, edge.extend(resources))
