"""The memory and the traffic of a rank that holds weights in shards: ``simulate`` for FSDP2 (ZeRO's third stage).

A *unit* is weights that are gathered together (``core/sharding/units.py``). Each of W ranks has ``ceil(rows / W)`` rows
of every weight, the last ranks fewer; ranks exchange W times as many, with padding. Bytes are those of the first rank,
which has the most.

Notes: ``docs/design/plans.md``.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from memsave_recipes.core.plans.chain import Chain
from memsave_recipes.core.plans.plan import Action, Plan
from memsave_recipes.core.plans.simulate import TimelinePoint, timeline

ROOT = "the root"


@dataclass(frozen=True, kw_only=True)
class ShardedUnit:
    """Weights that are gathered together. Bytes are those of all ranks, with padding, if not said otherwise.

    Args:
        parts: the names of the blocks of the chain that hold the weights, with or without a stack; the root has none.
        gathered_bytes: the weights.
        rounding_bytes: what a device's allocator adds to the weights, each of which has memory of its own.
        reduced_bytes: the gradients of weights that train.
        cast_bytes: one rank's shards in the dtype of the gathered weights, if shards have another dtype.
        copied_bytes: padded copies of gradients while they are reduced.
        frees_last: whether the buffer of the unit before is freed as soon as this unit's buffer is filled (torch 2.15);
            if not, once this unit's buffer has been copied into its weights.
        stays: whether the weights stay between their forward and their backward.
        takes_gradient: whether its input may need a gradient; that of an embedding never does.
    """

    parts: frozenset[str]
    gathered_bytes: int
    reduced_bytes: int
    rounding_bytes: int = 0
    cast_bytes: int = 0
    copied_bytes: int = 0
    frees_last: bool = False
    stays: bool = False
    takes_gradient: bool = True

    @property
    def is_root(self) -> bool:
        """Whether this is FSDP's root: the weights outside of all other units."""
        return not self.parts


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The units of a model, in the order in which it registers them, the root first.

    Args:
        num_ranks: the ranks of a group, which hold the weights together.
        num_replicas: the number of such groups, which replicate one another.
        accumulates: whether there are gradients of earlier micro-batches; they are in the chain's ``resident_bytes``.
        leaving_bytes: for gradients that leave for the host, the most that is there at a time, besides those of the
            last two units; ``None`` if they stay.
        num_unreduced: the micro-batches of a step before the last one, if only the last one reduces gradients; else 0.
    """

    units: tuple[ShardedUnit, ...]
    num_ranks: int
    num_replicas: int = 1
    accumulates: bool = False
    leaving_bytes: int | None = None
    num_unreduced: int = 0


def timeline_in_shards(chain: Chain, plan: Plan, shards: Shards) -> Iterator[TimelinePoint]:
    """Yield the live bytes of a rank in a step under ``plan``, in order: NOTE [ a step in shards ].

    Args:
        chain: ``resident_bytes`` are those of the rank, with shards in place of weights and state; the
            ``gradient_bytes`` of its blocks are those of whole weights, and none are resident.
        shards: with the units of ``plan``.

    Raises:
        ValueError: as ``simulate`` does, or gradients are resident.
    """
    if chain.gradients_resident:
        raise ValueError("whole gradients are never resident where weights are in shards")
    # Before the micro-batch that reduces: the first one makes whole gradients, and all others add to them alike.
    kinds = [{"adds": adds, "reduces": False} for adds in (False, True)][: shards.num_unreduced]
    kinds.append({"adds": shards.num_unreduced > 0, "reduces": True})
    return (point for kind in kinds for point in _MicroBatch(chain, plan, shards, **kind).points())


def peak_in_shards(chain: Chain, plan: Plan, shards: Shards) -> TimelinePoint:
    """Return the point of ``timeline_in_shards`` at which most is live."""
    return max(timeline_in_shards(chain, plan, shards), key=lambda point: point.total_bytes)


class _MicroBatch:
    """A forward and backward of ``chain``, with what torch keeps besides shards.

    Args:
        adds: whether there are whole gradients, to which it adds its own: rule 6.
        reduces: whether it reduces gradients; then the optimizer's update may follow.
    """

    def __init__(self, chain: Chain, plan: Plan, shards: Shards, *, adds: bool, reduces: bool) -> None:
        self.chain = replace(chain, blocks=tuple(block.accumulating for block in chain.blocks)) if adds else chain
        self.plan = plan
        self.shards = shards
        self.adds = adds
        self.reduces = reduces
        positions = {
            unit: [at for at, block in enumerate(chain.blocks) if block.name in unit.parts] for unit in shards.units
        }
        self.first = {unit: found[0] for unit, found in positions.items() if found}
        self.last = {unit: found[-1] for unit, found in positions.items() if found}
        self.unit_at = {at: unit for unit, found in positions.items() for at in found}
        self.root = next((unit for unit in shards.units if unit.is_root), None)
        units = [self.unit_at.get(at) for at in range(len(chain.blocks))]
        of_units = [unit.reduced_bytes if unit else 0 for unit in units]
        self.trains = [block.gradient_bytes + more > 0 for block, more in zip(chain.blocks, of_units, strict=True)]
        self.states = chain.states_bytes
        self.whole: set[ShardedUnit] = set()  # gathered
        self.incoming: set[ShardedUnit] = set()  # in their buffers
        self.behind: ShardedUnit | None = None  # gathered last; its buffer is not free yet
        self.leaving: ShardedUnit | None = None  # the last one that was reduced, in its buffer
        self.order: list[ShardedUnit] = []  # of their forwards
        self.gradients: Counter[ShardedUnit | None] = Counter()  # whole, of those that are not reduced yet
        self.reduced: list[ShardedUnit] = []
        self.waiting_bytes = 0  # gradients of weights with another use
        for at, block in enumerate(chain.blocks):
            self.gradients[self.unit_at.get(at, self.root)] += block.gradient_bytes if adds else 0

    def points(self) -> Iterator[TimelinePoint]:
        """Yield the points of ``timeline`` with the bytes of shards, and points for each gather and reduction."""
        points = list(timeline(self.chain, self.plan, at_most=True))
        yield from self._forward([point for point in points if point.phase == "forward"])
        yield from self._backward(list(_turns(points)))
        if self.reduces:
            yield self._now(points[-1])

    def _now(self, point: TimelinePoint, extra_bytes: int = 0) -> TimelinePoint:
        """Return ``point`` with the gradients and the traffic of this moment."""
        buffers = [*self.whole, *self.incoming, *([self.behind] if self.behind else [])]
        gathered_bytes = sum(unit.gathered_bytes for unit in buffers) + sum(unit.rounding_bytes for unit in self.whole)
        reduced_bytes = self.leaving.reduced_bytes if self.leaving else 0
        return replace(
            point,
            gradients_bytes=sum(self.gradients.values()) + self.waiting_bytes + self._shards_bytes(),
            traffic_bytes=gathered_bytes + reduced_bytes + extra_bytes,
        )

    def _shards_bytes(self) -> int:
        """Return the bytes of reduced gradients: rule 5."""
        sizes = [unit.reduced_bytes // self.shards.num_ranks for unit in self.reduced]
        if self.shards.num_replicas > 1 or self.shards.leaving_bytes is None:
            return 0 if self.shards.accumulates and self.shards.num_replicas == 1 else sum(sizes)
        return min(sum(sizes), self.shards.leaving_bytes + sum(sizes[-2:]))

    def _forward(self, points: list[TimelinePoint]) -> Iterator[TimelinePoint]:
        """Follow rule 1."""
        if self.root is not None:
            yield from self._gather(self.root, points[0])
        for point in points:
            for unit in [unit for unit, first in self.first.items() if first == point.position]:
                yield from self._gather(unit, point)
            yield self._now(point)
            for unit in [unit for unit, last in self.last.items() if last == point.position]:
                self.order.append(unit)
                if not unit.stays:
                    self.whole.discard(unit)
        if self.root is not None:
            self.order.append(self.root)
        self.behind = None

    def _gather(self, unit: ShardedUnit, point: TimelinePoint) -> Iterator[TimelinePoint]:
        """Gather a unit before the forward of ``point``."""
        variables_bytes = 0 if point.position is None else self.chain.blocks[point.position].variables_bytes
        before = _before(point, point.own_bytes - point.temporary_bytes + variables_bytes, "gathering")
        self.incoming.add(unit)
        if unit.frees_last:
            yield self._now(before)
            self.behind = None
        self.whole.add(unit)
        yield self._now(before, unit.cast_bytes)
        self.incoming.discard(unit)
        self.behind = unit

    def _backward(self, turns: list[list[TimelinePoint]]) -> Iterator[TimelinePoint]:
        """Follow rules 2 to 4, block by block."""
        begins = [*map(self._begin, turns), self._end(turns[-1][-1])]
        if self.root is not None:
            self._fill_before(self.root)
        done: set[ShardedUnit] = set()
        for number, turn in enumerate(turns):
            position = _position(turn)
            unit = self.unit_at.get(position)
            if unit is not None and self.last[unit] == position and any(self.trains[: position + 1]):
                yield from self._gather_again(unit, begins[number])
            for point in turn:
                yield from self._run(point)
            block = self.chain.blocks[position]
            if self.adds:
                self.waiting_bytes += block.tied_gradient_bytes
            else:
                self.gradients[self.unit_at.get(position, self.root)] += block.gradient_bytes
            if unit and self.first[unit] == position and unit.takes_gradient and any(self.trains[:position]):
                yield from self._reduce(unit, begins[number + 1])
                done.add(unit)
        self.waiting_bytes = 0
        for unit in self.shards.units:
            if unit not in done:
                yield from self._reduce(unit, begins[-1])
            self.incoming.discard(unit)
        self.leaving = None
        if self.shards.accumulates:
            self.reduced.clear()

    def _run(self, point: TimelinePoint) -> Iterator[TimelinePoint]:
        """Run a point of the backward; blocks of a sequence that recompute together are gathered one by one."""
        unit = None if point.position is None else self.unit_at.get(point.position)
        if point.phase == "recomputation" and unit is not None and unit not in self.whole:
            self.incoming.discard(unit)
            self.whole.add(unit)
            self.behind = unit
        yield self._now(point)
        self.behind = None

    def _gather_again(self, unit: ShardedUnit, begin: TimelinePoint) -> Iterator[TimelinePoint]:
        """Follow rule 2."""
        if unit not in self.whole:
            self.incoming.add(unit)
            self.whole.add(unit)
            yield self._now(begin, unit.cast_bytes)
            self.incoming.discard(unit)
        self._fill_before(unit)

    def _fill_before(self, unit: ShardedUnit) -> None:
        """Fill the buffer of the unit before it in the forward."""
        at = self.order.index(unit)
        if at > 0 and self.order[at - 1] not in self.whole:
            self.incoming.add(self.order[at - 1])

    def _reduce(self, unit: ShardedUnit, then: TimelinePoint) -> Iterator[TimelinePoint]:
        """Follow rule 3 at the moment ``then``."""
        self.whole.discard(unit)
        self.leaving = None
        if self.reduces and unit.reduced_bytes and (unit.is_root or unit in self.first):
            block = ROOT if unit.is_root else self.chain.blocks[self.first[unit]].name
            moment = replace(then, phase="reduction", block=block)
            yield self._now(moment, unit.reduced_bytes + unit.copied_bytes)
            self.gradients.pop(unit, None)
            self.reduced.append(unit)
            self.leaving = unit

    def _begin(self, turn: list[TimelinePoint]) -> TimelinePoint:
        """Return the point at which the backward of a block, or its second run, begins."""
        first, position = turn[0], _position(turn)
        live_bytes = self.states[position + 1] + self._untracked_bytes(position)
        return _before(first, first.own_bytes - first.temporary_bytes + live_bytes, "gathering")

    def _end(self, point: TimelinePoint) -> TimelinePoint:
        """Return the point at which the backward has ended; untracked bytes count as live still."""
        return replace(_before(point, self._untracked_bytes(0), "reduction"), held_bytes=0)

    def _untracked_bytes(self, position: int) -> int:
        """Return the bytes of the loss and the like; those of the next part where it has no backward."""
        for block in self.chain.blocks[position:]:
            if block.untracked_bytes or block.option(Action.KEEP).backward_transient_bytes:
                return block.untracked_bytes
        return 0


def _position(turn: list[TimelinePoint]) -> int:
    """Return the position of the block whose backward it is."""
    position = turn[-1].position
    assert position is not None, "of the optimizer alone"
    return position


def _before(point: TimelinePoint, own_bytes: int, phase: str) -> TimelinePoint:
    return replace(point, phase=phase, own_bytes=own_bytes, temporary_bytes=0)


def _turns(points: list[TimelinePoint]) -> Iterator[list[TimelinePoint]]:
    """Yield the points of each block's backward, after those of the second run that it begins with."""
    turn: list[TimelinePoint] = []
    for point in points:
        if point.phase in ("recomputation", "backward"):
            turn.append(point)
        if point.phase == "backward":
            yield turn
            turn = []


def communication_s(chain: Chain, shards: Shards, bytes_per_s: float) -> tuple[float, float]:
    """Return the seconds of communication in a micro-batch, and those that are exposed: not overlapped by computation.

    They are means over the micro-batches that are reduced together: NOTE [ traffic ].

    Args:
        bytes_per_s: the rate at which a rank sends.
    """
    sent = hidden = 0.0
    for unit in shards.units:
        own_s = sum(block.forward_s + block.backward_s for block in chain.blocks if block.name in unit.parts)
        for count, reduced_bytes in ((1, unit.reduced_bytes), (shards.num_unreduced, 0)):
            seconds = _sent_bytes(unit, reduced_bytes, shards) / bytes_per_s
            sent += count * seconds
            hidden += count * min(seconds, own_s)
    return sent / (1 + shards.num_unreduced), (sent - hidden) / (1 + shards.num_unreduced)


def _sent_bytes(unit: ShardedUnit, reduced_bytes: int, shards: Shards) -> float:
    gathered_bytes = unit.gathered_bytes * (1 if unit.stays or unit.is_root else 2)
    within = (gathered_bytes + reduced_bytes) * (shards.num_ranks - 1) / shards.num_ranks
    between = 2 * reduced_bytes / shards.num_ranks * (shards.num_replicas - 1) / shards.num_replicas
    return within + between
