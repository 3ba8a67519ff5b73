"""The path of moves that adds the least time and never needs too much: exact, and fast thanks to lower bounds.

This is the constrained shortest path problem. Paths grow block by block as *labels* (ticks added, load), and a label
that another one at its block beats in all figures is dropped (NOTE [ all that the future needs to know ], rule 3). That
alone is exact but keeps too many labels on long chains, so two more kinds are left out, without loss:

* labels that no continuation fits any more;
* labels that cannot beat the best path found so far, by the bounds of ``lower_bounds``.

The first pass keeps a few labels a block and finds a good path; later passes keep more. The path is optimal as soon as
a pass drops no label for lack of room that might still have won. The problem contains the knapsack problem, so chains
can be made up for which the last pass still drops some: then ``gap`` says what that can cost at most.

The plan that adds the least time under a byte budget: which blocks to keep, which to recompute together.

The method. Recomputing runs of blocks from what enters them is Chen et al. 2016, "Training Deep Nets with Sublinear
Memory Cost" (https://arxiv.org/abs/1604.06174); choosing the runs for blocks of unequal time and size by dynamic
programming is Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019, "Optimal checkpointing for heterogeneous
chains" (https://arxiv.org/abs/1911.13214). Theirs recomputes within recomputations and rounds bytes to slots. Ours
stays with the plans that ``apply_plan`` can obey, and rounds no bytes.

The guarantee. Of all plans (every split of the stacks into spans, every action per block that the chain has costs for)
none whose simulated peak fits adds less time than ``solve``'s: plans are paths by NOTE [ all that the future needs to
know ], and ``cheapest_path`` proves its path the cheapest, or says how far from it. Peaks are those of ``simulate``,
so the plan is as good as the costs are.

One level. A recomputation keeps all that it rebuilds until its backward is through. Recomputing again inside of it goes
lower: measured, the nested optimum is the same as this one down to 35 % of plain's activations on ResNet-50 and 20 % on
DenseNet-121; below that it alone goes on, to 29 % at x1.36 of plain's time and to 12 % at x1.57. A smaller micro-batch
goes further and costs less, so nested plans are left out.
"""

import math
import sys
from bisect import bisect_right
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from memsave_recipes.errors import InputError
from memsave_recipes.plans.chain import Chain
from memsave_recipes.plans.paths import EMPTY, HELD, WITH_STATE, Edge, Edges, Resources, edges_of, lower_bounds, tick_s
from memsave_recipes.plans.plan import Action, Plan, Span
from memsave_recipes.plans.simulate import TimelinePoint, simulate
from memsave_recipes.text import format_bytes, gib_that_suffice, to_gib

WIDTHS = (8, 128, 4096)
"""Labels that a block may have in each pass."""

Label: TypeAlias = tuple[float, Resources, Any, Edge | None]
"""``(added, load, the label before, the move from there)``. A plain tuple: there are millions of them."""


class CheapestPath(NamedTuple):
    """The moves, and by how many ticks another path that fits might still be cheaper: 0 where proven."""

    edges: list[Edge]
    gap: float


def cheapest_path(edges: Edges, free_bytes: int) -> CheapestPath | None:
    """The path over all blocks that adds the fewest ticks; ``None`` where none fits.

    Args:
        moves: as ``edges_of`` gives them.
        free_bytes: no move may need more together with its load.
    """
    rooms = resource_bounds(edges, free_bytes)
    if not rooms[0]:
        return None
    search = _Search(_that_fit(edges, free_bytes, rooms), free_bytes, rooms)
    proven = -math.inf
    for width in WIDTHS:
        proven = max(proven, search.run(width))
        if proven >= search.to_beat:
            return CheapestPath(_moves_to(search.best), 0.0)
    return CheapestPath(_moves_to(search.best), search.best[0] - proven)


def resource_bounds(edges: Edges, free_bytes: int) -> list[list[Resources]]:
    """For each block the largest loads with which some continuation fits; none where nothing does, however empty."""
    rooms: list[list[Resources]] = [[] for _ in edges] + [[(free_bytes, sys.maxsize)]]
    for position in reversed(range(len(edges))):
        found = {_bound_before(edge, room, free_bytes) for edge in edges[position] for room in rooms[edge.stop]}
        rooms[position] = [
            room
            for room in found
            if room[HELD] >= 0
            and not any(
                other != room and other[HELD] >= room[HELD] and other[WITH_STATE] >= room[WITH_STATE] for other in found
            )
        ]
    return rooms


def _bound_before(edge: Edge, room: Resources, free_bytes: int) -> Resources:
    """The largest load with which ``edge`` fits and leaves no more than ``room``."""
    most = [free_bytes - edge.beside_held_bytes, free_bytes - edge.beside_state_bytes]
    most[edge.held_from] = min(most[edge.held_from], room[HELD] - edge.held_bytes)
    most[edge.with_state_from] = min(most[edge.with_state_from], room[WITH_STATE] - edge.with_state_bytes)
    return min(most), most[WITH_STATE]


def _that_fit(edges: Edges, free_bytes: int, rooms: list[list[Resources]]) -> Edges:
    """Without moves that no path with room contains, judged by the least of either figure that can be reached."""
    least: list[Resources | None] = [None] * len(rooms)
    least[0] = EMPTY
    fitting: Edges = [[] for _ in edges]
    for position, leaving in enumerate(edges):
        resources = least[position]
        if resources is None:
            continue
        for edge in leaving:
            after = edge.after(resources)
            if edge.peak_bytes(resources) <= free_bytes and _has_room(after, rooms[edge.stop]):
                fitting[position].append(edge)
                reached = least[edge.stop] or after
                least[edge.stop] = (min(reached[HELD], after[HELD]), min(reached[WITH_STATE], after[WITH_STATE]))
    return fitting


def _has_room(resources: Resources, rooms: list[Resources]) -> bool:
    return any(resources[HELD] <= room[HELD] and resources[WITH_STATE] <= room[WITH_STATE] for room in rooms)


class _Search:
    """Passes over the blocks in the order of the forward; ``best`` is the best path of all passes so far."""

    def __init__(self, edges: Edges, free_bytes: int, rooms: list[list[Resources]]) -> None:
        self.edges, self.free_bytes, self.rooms = edges, free_bytes, rooms
        self.bounds = lower_bounds(edges, free_bytes)
        self.best: Label = (math.inf, EMPTY, None, None)

    @property
    def to_beat(self) -> float:
        """What a path has to stay under to be better than the best: ticks are whole, bounds carry rounding."""
        return self.best[0] - 0.5

    def run(self, width: int) -> float:
        """Grow at most ``width`` labels a block; what no path that was dropped for lack of room can fall below."""
        dropped = math.inf
        candidates: list[list[Label]] = [[] for _ in self.rooms]
        candidates[0].append((0, EMPTY, None, None))
        for position, leaving in enumerate(self.edges):
            promising = self._promising(position, _undominated(candidates[position]))
            candidates[position] = []
            if len(promising) > width:
                promising, best_left_out = _spread(promising, width)
                dropped = min(dropped, best_left_out)
            labels = [label for _, label in promising]
            for edge in leaving:
                candidates[edge.stop] += self._extend(labels, edge)
        self.best = min([self.best, *candidates[-1]], key=itemgetter(0))
        return dropped

    def _promising(self, position: int, labels: list[Label]) -> list[tuple[float, Label]]:
        """The labels that fit and may beat the best path, each with the least that it can end at."""
        promising = []
        for label in labels:
            added, resources, *_ = label
            at_least = added + max([bound.rest_at_least(position, resources) for bound in self.bounds])
            if at_least < self.to_beat and _has_room(resources, self.rooms[position]):
                promising.append((at_least, label))
        return promising

    def _extend(self, labels: list[Label], edge: Edge) -> list[Label]:
        """The labels behind ``edge`` where it fits and, by the best bound, may beat the best path."""
        stop, _, added, held_from, held_bytes, with_state_from, with_state_bytes, _, _ = edge
        most_held = self.free_bytes - edge.beside_held_bytes
        most_with_state = self.free_bytes - edge.beside_state_bytes
        # ``rest_at_least`` behind the move, written out: this decides about millions of labels.
        price, (rest_held, rest_with_state) = self.bounds[0].price_at(stop), self.bounds[0].rest[stop]
        below_held = self.to_beat - added - rest_held - price * held_bytes
        below_with_state = self.to_beat - added - rest_with_state - price * with_state_bytes
        return [
            (
                label[0] + added,
                (label[1][held_from] + held_bytes, label[1][with_state_from] + with_state_bytes),
                label,
                edge,
            )
            for label in labels
            if label[1][HELD] <= most_held
            and label[1][WITH_STATE] <= most_with_state
            and (
                label[0] + price * label[1][held_from] < below_held
                or label[0] + price * label[1][with_state_from] < below_with_state
            )
        ]


def _spread(promising: list[tuple[float, Label]], width: int) -> tuple[list[tuple[float, Label]], float]:
    """The most promising label of each of ``width`` equal ranges of held bytes, and the bound of the best one left out.

    The bounds alone would prefer labels that hold much, and so leave a first pass with bad paths.
    """
    held = [resources[HELD] for _, (_, resources, _, _) in promising]
    least, most = min(held), max(held)
    ranges: dict[int, tuple[float, Label]] = {}
    dropped = math.inf
    for bounded in sorted(promising, key=itemgetter(0)):
        at_least, (_, resources, _, _) = bounded
        if ranges.setdefault((resources[HELD] - least) * width // (most - least + 1), bounded) is not bounded:
            dropped = min(dropped, at_least)
    return list(ranges.values()), dropped


def _undominated(labels: list[Label]) -> list[Label]:
    """Without those that another one beats in ticks and in both figures of the load."""
    labels.sort(key=itemgetter(0, 1))
    kept: list[Label] = []
    held: list[int] = []  # of those kept so far, rising; ``with_state`` beside it falls
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


def _moves_to(label: Label) -> list[Edge]:
    edges: list[Edge] = []
    *_, before, edge = label
    while edge is not None:
        edges.append(edge)
        *_, before, edge = before
    return edges[::-1]


STRATEGY = "budget"


def solve(chain: Chain, budget_bytes: int) -> Plan:
    """The plan with the least added time whose simulated peak is at most ``budget_bytes``.

    Raises:
        InputError: no plan fits; the message names the smallest budget that does and what needs it.
    """
    return solve_with_gap(chain, budget_bytes)[0]


def solve_with_gap(chain: Chain, budget_bytes: int) -> tuple[Plan, float]:
    """``solve``'s plan, and the seconds by which one that fits might still be faster: 0.0 where it is proven the best.

    Raises:
        InputError: as ``solve``.
    """
    path = None
    if _floor_bytes(chain) <= budget_bytes:
        path = cheapest_path(edges_of(chain), budget_bytes - chain.static_bytes)
    if path is None:
        raise InputError(_too_small(chain, budget_bytes))
    return _plan_of(chain, path.edges), path.gap * tick_s(chain)


def smallest_feasible(chain: Chain) -> int:
    """The fewest bytes that a plan can be found for."""
    edges = edges_of(chain)
    too_few, enough = -1, simulate(chain, _keep_all(chain)).peak_bytes - chain.static_bytes
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if resource_bounds(edges, middle)[0]:
            enough = middle
        else:
            too_few = middle
    return max(chain.static_bytes + enough, _floor_bytes(chain))


def _floor_bytes(chain: Chain) -> int:
    """What the optimizer's update needs, whatever the plan."""
    return chain.resident_bytes + chain.all_gradients_bytes + chain.optimizer_bytes


def _keep_all(chain: Chain) -> Plan:
    spans = tuple(Span(start=i, stop=i + 1, action=Action.KEEP) for i in range(len(chain.decided)))
    return Plan(strategy=STRATEGY, blocks=chain.decided_names, spans=spans)


def _plan_of(chain: Chain, path: list[Edge]) -> Plan:
    spans: list[Span] = []
    position = index = 0  # in the chain, and among the blocks that plans decide about
    for edge in path:
        if chain.blocks[position].stack is not None:
            spans.append(Span(start=index, stop=index + edge.stop - position, action=edge.action))
            index += edge.stop - position
        position = edge.stop
    compiles = any(span.action is Action.COMPILE for span in spans)
    return Plan(
        strategy=STRATEGY,
        blocks=chain.decided_names,
        spans=tuple(spans),
        compiled_memory_ratio=chain.compiled_memory_ratio if compiles else None,
    )


def _too_small(chain: Chain, budget_bytes: int) -> str:
    smallest = smallest_feasible(chain)
    peak = simulate(chain, solve(chain, smallest)).peak
    way_out = "a smaller model or optimizer" if peak.phase == "optimizer" else "a smaller --micro_batch_size"
    return (
        f"--memory_budget_gib {to_gib(budget_bytes):g} is too small for any plan: the smallest that works is "
        f"{gib_that_suffice(smallest)}, needed in {_describe(peak)}; raise it to that, or take {way_out}"
    )


def _describe(peak: TimelinePoint) -> str:
    """Where the peak is and what it is made of: ``the backward of conv1 (2 GiB for conv1 itself, ...)``."""
    where = "the optimizer's update" if peak.phase == "optimizer" else f"the {peak.phase} of {peak.block}"
    parts = {
        "itself": peak.own_bytes,
        "parameters, optimizer state and batch": peak.resident_bytes,
        "gradients made before": peak.gradients_bytes,
        "kept by other blocks": peak.held_bytes,
    }
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    return f"{where} ({', '.join(f'{name} {format_bytes(size)}' for name, size in largest_first if size)})"
