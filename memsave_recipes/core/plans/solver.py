"""The plan that adds the least time under a byte budget: an exact shortest path search over the plans of a chain.

The problem. Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019, "Optimal checkpointing for heterogeneous chains"
(https://arxiv.org/abs/1911.13214), choose the blocks to recompute by dynamic programming. Their plans recompute within
recomputations to any depth, and bytes are rounded to slots. Ours are the plans that ``apply_plan`` can apply, and no
bytes are rounded.

The guarantee. Take all plans: every split of the stacks into spans, every action per block that the chain has costs
for. Of those whose simulated peak fits, no plan has less ``added_s + noise_s`` than ``solve``'s. A plan is a path
(NOTE [ resources ]), and ``shortest_path`` proves its path optimal, or bounds the gap.

NOTE [ label setting ]
1. Paths grow block by block as *labels* (cost, resources). A label that another one at its block dominates is dropped.
   That alone is exact but keeps too many labels on long chains. So two more kinds are pruned, without loss: labels
   without a feasible continuation, and labels whose completion bound is no better than the best path found so far.
2. The first pass keeps a few labels per block and finds a good path; later passes keep more. The path is optimal as
   soon as a pass drops (truncates) no label that might still have led to a better one.
3. The problem contains the knapsack problem, so for some chains even the last pass truncates labels. Then ``gap`` is
   the most by which another path may be better.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans.chain import Chain
from memsave_recipes.core.plans.paths import (
    EMPTY,
    HELD,
    WITH_STATE,
    Edge,
    Edges,
    Resources,
    edges_of,
    edges_without_second_runs,
    lower_bounds,
    tick_s,
)
from memsave_recipes.core.plans.plan import Plan, Span
from memsave_recipes.core.plans.simulate import TimelinePoint, simulate
from memsave_recipes.core.text import format_bytes, gib_that_suffice, to_gib

STRATEGY = "budget"
ENOUGH_BYTES = 2**60
"""Free bytes with which every path is feasible."""
MAX_LABELS = (8, 128, 4096)
"""The labels that each pass keeps of a block."""


def solve(chain: Chain, budget_bytes: int) -> Plan:
    """Return the plan with the least added time, noise counted in, whose simulated peak fits ``budget_bytes``.

    Raises:
        InputError: no plan fits; the message names the smallest budget that does and where its peak is.
    """
    return solve_with_gap(chain, budget_bytes)[0]


def solve_with_gap(chain: Chain, budget_bytes: int) -> tuple[Plan, float]:
    """Return ``solve``'s plan, and the seconds by which one that fits might still be faster: 0 if proven optimal."""
    paths = []
    if _floor_bytes(chain) <= budget_bytes:
        found = (shortest_path(edges, budget_bytes - static_bytes) for edges, static_bytes in _searches(chain))
        paths = [path for path in found if path is not None]
    if not paths:
        raise InputError(_too_small(chain, budget_bytes))
    best = min(paths, key=lambda path: path.cost)
    gap = max(best.cost - path.cost + path.gap for path in paths)
    return _plan_of(chain, best.edges), gap * tick_s(chain)


def _searches(chain: Chain) -> Iterator[tuple[Edges, int]]:
    """Yield edges, with the bytes that all their plans hold: first all edges, then those without second runs."""
    yield edges_of(chain), chain.static_bytes + chain.extra_args_bytes
    if chain.extra_args_bytes:
        yield edges_without_second_runs(chain), chain.static_bytes


def smallest_feasible(chain: Chain) -> int:
    """Return the smallest budget, in bytes, for which there is a plan."""
    fewest = [_fewest_bytes(edges) + static for edges, static in _searches(chain)]
    return max(min(fewest), _floor_bytes(chain))


def _fewest_bytes(edges: Edges) -> int:
    """Return the fewest free bytes with a feasible path.

    The most that a path may hold at its start is all free bytes less the fewest that it needs.
    """
    return ENOUGH_BYTES - max(held for held, _ in resource_bounds(edges, ENOUGH_BYTES)[0])


def _floor_bytes(chain: Chain) -> int:
    """Return the bytes of the optimizer's update, whatever the plan."""
    return chain.resident_bytes + chain.all_gradients_bytes + chain.optimizer_bytes


def _plan_of(chain: Chain, path: list[Edge]) -> Plan:
    """Return the plan whose spans are the edges of ``path``."""
    spans: list[Span] = []
    position = index = 0  # in the chain, and among the blocks that plans decide about
    for edge in path:
        if chain.blocks[position].stack is not None:
            stop = index + edge.stop - position
            spans.append(Span(start=index, stop=stop, action=edge.action, ratio=edge.ratio))
            index = stop
        position = edge.stop
    actions = {span.action for span in spans}
    return Plan(
        strategy=STRATEGY,
        blocks=chain.decided_names,
        spans=tuple(spans),
        compiled=chain.compiled,
        micro_batch_size=chain.micro_batch_size if any(action.kind.micro_batches_of for action in actions) else None,
        mlp_tile_tokens=chain.mlp_tile_tokens if any(action.kind.is_tiled for action in actions) else None,
    )


def _too_small(chain: Chain, budget_bytes: int) -> str:
    smallest = smallest_feasible(chain)
    peak = simulate(chain, solve(chain, smallest)).peak
    hint = "a smaller model or optimizer" if peak.phase == "optimizer" else "a smaller batch"
    return (
        f"budget_gib {to_gib(budget_bytes):g} is too small for any plan: the smallest that works is "
        f"{gib_that_suffice(smallest)}, needed in {_describe(peak)}; raise it to that, or take {hint}"
    )


def _describe(peak: TimelinePoint) -> str:
    """Say where the peak is and what it consists of: ``the backward of conv1 (itself 2 GiB, ...)``."""
    where = "the optimizer's update" if peak.phase == "optimizer" else f"the {peak.phase} of {peak.block}"
    parts = {
        "itself": peak.own_bytes,
        "parameters, optimizer state and batch": peak.resident_bytes,
        "gradients made before": peak.gradients_bytes,
        "kept by other blocks": peak.held_bytes,
    }
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    return f"{where} ({', '.join(f'{name} {format_bytes(size)}' for name, size in largest_first if size)})"


class ShortestPath(NamedTuple):
    """Its edges, and the ticks by which another feasible path might still be shorter: 0 where it is proven optimal."""

    edges: list[Edge]
    gap: float

    @property
    def cost(self) -> int:
        """The ticks that it adds."""
        return sum(edge.cost for edge in self.edges)


def shortest_path(edges: Edges, free_bytes: int) -> ShortestPath | None:
    """Return the path over all blocks with the least cost; ``None`` where none is feasible.

    Args:
        edges: as ``edges_of`` gives them.
        free_bytes: the limit on the peak of every edge.
    """
    feasible = resource_bounds(edges, free_bytes)
    if not feasible[0]:
        return None
    search = _Search(_feasible_edges(edges, free_bytes, feasible), free_bytes, feasible)
    proven = -math.inf
    for max_labels in MAX_LABELS:
        proven = max(proven, search.run(max_labels))
        if proven >= search.cutoff:
            return ShortestPath(_edges_to(search.best), 0.0)
    return ShortestPath(_edges_to(search.best), search.best[0] - proven)


def resource_bounds(edges: Edges, free_bytes: int) -> list[list[Resources]]:
    """Return for each block the maximal resources with a feasible continuation; an empty list where there is none."""
    bounds: list[list[Resources]] = [[] for _ in edges] + [[(free_bytes, sys.maxsize)]]
    for position in reversed(range(len(edges))):
        found = {_bound_before(edge, bound, free_bytes) for edge in edges[position] for bound in bounds[edge.stop]}
        bounds[position] = [
            bound
            for bound in found
            if bound[HELD] >= 0
            and not any(
                other != bound and other[HELD] >= bound[HELD] and other[WITH_STATE] >= bound[WITH_STATE]
                for other in found
            )
        ]
    return bounds


def _bound_before(edge: Edge, bound: Resources, free_bytes: int) -> Resources:
    """Return the largest resources with which ``edge`` is feasible and that it extends to at most ``bound``."""
    most = [free_bytes - edge.peak_over_held_bytes, free_bytes - edge.peak_over_state_bytes]
    most[edge.held_from] = min(most[edge.held_from], bound[HELD] - edge.held_bytes)
    most[edge.with_state_from] = min(most[edge.with_state_from], bound[WITH_STATE] - edge.with_state_bytes)
    return min(most), most[WITH_STATE]


def _feasible_edges(edges: Edges, free_bytes: int, bounds: list[list[Resources]]) -> Edges:
    """Leave out edges that no feasible path contains, by the least of either resource that can be reached."""
    least: list[Resources | None] = [None] * len(bounds)
    least[0] = EMPTY
    feasible: Edges = [[] for _ in edges]
    for position, leaving in enumerate(edges):
        resources = least[position]
        if resources is None:
            continue
        for edge in leaving:
            extended = edge.extend(resources)
            if edge.peak_bytes(resources) <= free_bytes and _is_within(extended, bounds[edge.stop]):
                feasible[position].append(edge)
                reached = least[edge.stop] or extended
                least[edge.stop] = (min(reached[HELD], extended[HELD]), min(reached[WITH_STATE], extended[WITH_STATE]))
    return feasible


def _is_within(resources: Resources, bounds: list[Resources]) -> bool:
    return any(resources[HELD] <= bound[HELD] and resources[WITH_STATE] <= bound[WITH_STATE] for bound in bounds)


Label: TypeAlias = tuple[float, Resources, Any, Edge | None]
"""``(cost, resources, the label before, the edge from there)``. A plain tuple: there are millions of them."""


class _Search:
    """Passes over the blocks in the order of the forward; ``best`` is the label of the best path so far."""

    def __init__(self, edges: Edges, free_bytes: int, resource_bounds: list[list[Resources]]) -> None:
        self.edges, self.free_bytes, self.resource_bounds = edges, free_bytes, resource_bounds
        self.completion_bounds = lower_bounds(edges, free_bytes)
        self.best: Label = (math.inf, EMPTY, None, None)

    @property
    def cutoff(self) -> float:
        """The cost below which a path is better: half a tick less, as ticks are whole and bounds carry rounding."""
        return self.best[0] - 0.5

    def run(self, max_labels: int) -> float:
        """Extend at most ``max_labels`` labels per block; return a lower bound on the cost of the truncated paths."""
        truncated = math.inf
        reached: list[list[Label]] = [[] for _ in self.resource_bounds]
        reached[0].append((0, EMPTY, None, None))
        for position, leaving in enumerate(self.edges):
            bounded = self._prune(position, _nondominated(reached[position]))
            reached[position] = []
            if len(bounded) > max_labels:
                bounded, least_truncated = _truncate(bounded, max_labels)
                truncated = min(truncated, least_truncated)
            labels = [label for _, label in bounded]
            for edge in leaving:
                reached[edge.stop] += self._extend(labels, edge)
        self.best = min([self.best, *reached[-1]], key=itemgetter(0))
        return truncated

    def _prune(self, position: int, labels: list[Label]) -> list[tuple[float, Label]]:
        """Return the feasible labels that may lead to a better path, each with its lower bound."""
        bounded = []
        for label in labels:
            cost, resources, *_ = label
            at_least = cost + max([bound.at_least(position, resources) for bound in self.completion_bounds])
            if at_least < self.cutoff and _is_within(resources, self.resource_bounds[position]):
                bounded.append((at_least, label))
        return bounded

    def _extend(self, labels: list[Label], edge: Edge) -> list[Label]:
        """Return the labels behind ``edge`` where it is feasible and, by the best bound, may lead to a better path."""
        stop, _, cost, held_from, held_bytes, with_state_from, with_state_bytes, _, _, _ = edge
        most_held = self.free_bytes - edge.peak_over_held_bytes
        most_with_state = self.free_bytes - edge.peak_over_state_bytes
        # ``at_least`` behind the edge, written out: this decides about millions of labels.
        bound = self.completion_bounds[0]
        multiplier, (held_to_go, with_state_to_go) = bound.multiplier_at(stop), bound.cost_to_go[stop]
        below_held = self.cutoff - cost - held_to_go - multiplier * held_bytes
        below_with_state = self.cutoff - cost - with_state_to_go - multiplier * with_state_bytes
        return [
            (
                label[0] + cost,
                (label[1][held_from] + held_bytes, label[1][with_state_from] + with_state_bytes),
                label,
                edge,
            )
            for label in labels
            if label[1][HELD] <= most_held
            and label[1][WITH_STATE] <= most_with_state
            and (
                label[0] + multiplier * label[1][held_from] < below_held
                or label[0] + multiplier * label[1][with_state_from] < below_with_state
            )
        ]


def _truncate(bounded: list[tuple[float, Label]], max_labels: int) -> tuple[list[tuple[float, Label]], float]:
    """Keep one label, that of the least bound, per range of held bytes; return the least bound of all others, too.

    There are ``max_labels`` ranges. By bounds alone, labels that hold much would win, and a first pass find bad paths.
    """
    held = [resources[HELD] for _, (_, resources, _, _) in bounded]
    least, most = min(held), max(held)
    ranges: dict[int, tuple[float, Label]] = {}
    truncated = math.inf
    for candidate in sorted(bounded, key=itemgetter(0)):
        at_least, (_, resources, _, _) = candidate
        if ranges.setdefault((resources[HELD] - least) * max_labels // (most - least + 1), candidate) is not candidate:
            truncated = min(truncated, at_least)
    return list(ranges.values()), truncated


def _nondominated(labels: list[Label]) -> list[Label]:
    """Leave out labels that another one dominates in cost and both resources."""
    labels.sort(key=itemgetter(0, 1))
    kept: list[Label] = []
    held: list[int] = []  # of those kept so far, ascending; their ``with_state`` descends
    with_state: list[int] = []
    for label in labels:
        resources = label[1]
        at = bisect_right(held, resources[HELD])
        if at and with_state[at - 1] <= resources[WITH_STATE]:
            continue
        while at < len(held) and with_state[at] >= resources[WITH_STATE]:
            del held[at], with_state[at]
        held.insert(at, resources[HELD])
        with_state.insert(at, resources[WITH_STATE])
        kept.append(label)
    return kept


def _edges_to(label: Label) -> list[Edge]:
    edges: list[Edge] = []
    *_, before, edge = label
    while edge is not None:
        edges.append(edge)
        *_, before, edge = before
    return edges[::-1]
