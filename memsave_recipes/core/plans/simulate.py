"""Simulate a step under a plan: its memory timeline and peak, the added time, and the host memory that it pins.

Notes: NOTE [ the memory of one forward and backward ] and others, in ``docs/design/plans.md``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from memsave_recipes.core.plans.chain import BlockOption, Chain
from memsave_recipes.core.plans.plan import Action, Plan, Span, plan_for

PINNING = 8  # pinned memory is at most 1 / PINNING larger than what it holds
Storages = dict[str, int]
"""Bytes by the name of the storage; ``|`` joins two sets of them, each storage once."""


@dataclass(frozen=True, kw_only=True)
class TimelinePoint:
    """The live bytes while one block runs.

    Args:
        phase: forward, recomputation, backward or optimizer; in shards also gathering and reduction.
        block: the name of the block; empty in the optimizer's update.
        position: the position of the block in the chain.
        gradients_bytes: the parameter gradients made so far.
        held_bytes: what other blocks hold until their backward.
        own_bytes: what is live for this block alone, ``temporary_bytes`` included.
        temporary_bytes: its transient peak, and in recomputation and backward also the incoming gradient.
        traffic_bytes: weights that are gathered and gradients on their way, in shards.
    """

    phase: str
    block: str
    position: int | None = None
    resident_bytes: int
    gradients_bytes: int
    held_bytes: int
    own_bytes: int
    temporary_bytes: int
    traffic_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of the bytes above; ``temporary_bytes`` are in ``own_bytes`` already."""
        return self.resident_bytes + self.gradients_bytes + self.held_bytes + self.own_bytes + self.traffic_bytes


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The costs of a step under a plan. The solver minimises the sum of ``added_s`` and ``noise_s``, its error."""

    peak: TimelinePoint
    added_s: float
    noise_s: float
    host_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The bytes at the peak."""
        return self.peak.total_bytes


@dataclass(frozen=True)
class SpanCosts:
    """The bytes that a span adds to those held when the forward ends, and the seconds that it adds to the step."""

    held_bytes: int
    added_s: float


def simulate(chain: Chain, plan: Plan) -> Simulation:
    """Simulate a step of ``chain`` under ``plan``.

    Raises:
        ValueError: the plan is for other blocks, joins blocks of two stacks, or needs costs that the chain lacks.
    """
    seconds = [_seconds(chain, span) for span in _spans(chain, plan)]
    return Simulation(
        peak=max(timeline(chain, plan), key=lambda point: point.total_bytes),
        added_s=sum(added_s for added_s, _ in seconds),
        noise_s=sum(noise_s for _, noise_s in seconds),
        host_bytes=host_bytes(chain, plan),
    )


def keep_all(chain: Chain) -> Plan:
    """Return the baseline, no checkpointing, as a plan for the blocks of ``chain``."""
    return replace(plan_for("none", [chain.decided_names]), compiled=chain.compiled)


def host_bytes(chain: Chain, plan: Plan) -> int:
    """Return the most bytes of the host that ``plan`` pins: NOTE [ the memory of the host ]."""
    states = _states(chain)
    offloaded = [span for span in _spans(chain, plan) if span.action.kind.on_host]
    copied: Storages = {}
    for number, span in enumerate(offloaded, start=1):
        in_sublayers, is_last = span.action.kind.in_sublayers, number == len(offloaded)
        if is_last and not in_sublayers:
            continue
        recomputes = span.action.kind.on_host == "input"
        keeps, stays = (chain.blocks[span.start].option(action) for action in (Action.KEEP, span.action))
        if not recomputes:
            copied[f"inside {span.start}"] = max(0, keeps.saved_bytes - stays.saved_bytes)
        if (recomputes or keeps.saves_input) and not stays.saves_input:
            copied |= states[span.start]
        if in_sublayers and not is_last:
            copied[f"inside {span.start}"] = chain.blocks[span.start].output_bytes
    return chain.host_bytes + with_pinning(_total(copied))


def with_pinning(num_bytes: int) -> int:
    """Add what pinning wastes: rule 3 of NOTE [ the memory of the host ]."""
    return num_bytes + num_bytes // PINNING


def span_costs(chain: Chain, plan: Plan) -> list[SpanCosts]:
    """Return the costs of each span of ``plan``."""
    costs = {position: SpanCosts(0, 0.0) for position in chain.decided}  # of a joint span, at its first block
    states = _states(chain)
    held: Storages = {}
    for span in _spans(chain, plan):
        if span.action.kind.is_joint:
            now = held | _held_by_span(chain, span, states)
        else:
            now = held | _saved(chain, span.start, chain.blocks[span.start].option(span.action, span.ratio), states)
        costs[span.start] = SpanCosts(_total(now) - _total(held), _seconds(chain, span)[0])
        held = now
    parts = [[costs[position] for position in chain.decided[span.start : span.stop]] for span in plan.spans]
    return [SpanCosts(sum(c.held_bytes for c in part), sum(c.added_s for c in part)) for part in parts]


def _spans(chain: Chain, plan: Plan) -> list[Span]:
    """Return the plan's spans in positions of the chain; those that do not run again together become single blocks."""
    if plan.blocks != chain.decided_names:
        raise ValueError(f"the plan {plan.strategy} was made for other blocks than those of this chain")
    spans = [Span(start=i, stop=i + 1, action=Action.KEEP) for i, b in enumerate(chain.blocks) if b.stack is None]
    for span in plan.spans:
        positions = chain.decided[span.start : span.stop]
        if span.action.kind.is_joint:
            if len({chain.blocks[position].stack for position in positions}) > 1:
                raise ValueError(f"the span {span.start}..{span.stop} of the plan leaves its stack")
            kept = [*takewhile(lambda position: chain.blocks[position].is_frozen, positions)]
            spans += [Span(start=position, stop=position + 1, action=Action.KEEP) for position in kept]
            if not (positions := positions[len(kept) :]):
                continue
            spans.append(Span(start=positions[0], stop=positions[-1] + 1, action=span.action))
        else:
            spans += [replace(span, start=position, stop=position + 1) for position in positions]
    return sorted(spans, key=lambda span: span.start)


def _seconds(chain: Chain, span: Span) -> tuple[float, float]:
    """Return the seconds that a span adds to the step, and their noise."""
    blocks = tuple(block for block in chain.blocks[span.start : span.stop] if block.has_backward)
    if not span.action.kind.is_joint:
        option = chain.blocks[span.start].option(span.action, span.ratio)
        return option.added_s, option.noise_s
    options: list[BlockOption] = []
    if span.action is Action.RECOMPUTE_NESTED:
        options = [chain.nested_option(position) for position in range(span.start, span.stop)]
        blocks = blocks[:-1]
    added_s = sum(block.forward_s for block in blocks) + sum(option.added_s for option in options)
    return added_s, sum(block.forward_noise_s for block in blocks) + sum(option.noise_s for option in options)


def timeline(chain: Chain, plan: Plan, *, at_most: bool = False) -> Iterator[TimelinePoint]:
    """Yield the live bytes of a step under ``plan``: every block's forward and backward, then the optimizer.

    Args:
        at_most: bound the first run of blocks that recompute from above: count all that a block saves until its end.
    """
    spans = _spans(chain, plan)
    states = _states(chain)
    held_before: list[Storages] = []
    runs_again = any(span.action.kind.runs_twice for span in plan.spans)
    held: Storages = {"extra arguments": chain.extra_args_bytes} if runs_again else {}
    unread: Storages = {}  # until the forward ends
    for span in spans:
        held_before.append(held)
        if span.action.kind.is_joint:
            yield from _forwards(chain, span, held | unread, states, at_most=at_most)
            now = _held_by_span(chain, span, states)
        else:
            option = chain.blocks[span.start].option(span.action, span.ratio)
            alive = states[span.start]
            if not runs_again:
                alive = {**alive, "extra arguments of the block": chain.blocks[span.start].extra_args_bytes}
            yield _point(chain, "forward", span.start, held | unread, 0, alive, option.forward_transient_bytes)
            now = _saved(chain, span.start, option, states)
        if _has_backward(chain, span):
            held = held | now
        else:
            unread = unread | now
    gradients_bytes = 0
    for span, held in zip(reversed(spans), reversed(held_before), strict=True):
        if _has_backward(chain, span):
            yield from _backward(chain, span, held, gradients_bytes, states)
        gradients_bytes += chain.new_gradients_bytes(*chain.blocks[span.start : span.stop])
    made_bytes = 0 if chain.gradients_resident else gradients_bytes
    yield _point(chain, "optimizer", None, {}, made_bytes, {}, chain.optimizer_bytes)


def _has_backward(chain: Chain, span: Span) -> bool:
    return any(block.has_backward for block in chain.blocks[span.start : span.stop])


def _forwards(
    chain: Chain, span: Span, held: Storages, states: list[Storages], *, at_most: bool
) -> Iterator[TimelinePoint]:
    """Yield the points of the first run of a span that recomputes."""
    alive, begun_bytes = states[span.start], chain.span_bytes
    for position in range(span.start, span.stop):
        block = chain.blocks[position]
        run_bytes = block.option(Action.KEEP).forward_transient_bytes if at_most else block.until_last_saved_bytes
        yield _point(chain, "forward", position, held, 0, alive | states[position], begun_bytes + run_bytes)
        alive, begun_bytes = alive | {f"span from {span.start}": chain.span_bytes}, 0


def _backward(
    chain: Chain, span: Span, held: Storages, gradients_bytes: int, states: list[Storages]
) -> Iterator[TimelinePoint]:
    own: list[Storages] = []  # live in the span when the backward of its first, second ... block begins
    rebuilt = _held_by_span(chain, span, states) if span.action.kind.is_joint else {}
    if span.action is Action.RECOMPUTE_NESTED:
        options = [chain.nested_option(position) for position in range(span.start, span.stop)]
    else:
        action = Action.KEEP if span.action is Action.RECOMPUTE else span.action
        options = [block.option(action, span.ratio) for block in chain.blocks[span.start : span.stop]]
    last = next(block for block in reversed(chain.blocks[span.start : span.stop]) if block.has_backward)
    live_bytes = _total(states[span.stop]) + last.untracked_bytes + chain.span_bytes
    for position, option in enumerate(options, start=span.start):
        is_last = position == span.stop - 1
        if span.action is Action.RECOMPUTE or (span.action is Action.RECOMPUTE_NESTED and not is_last):
            block = chain.blocks[position]
            second_run_bytes = block.until_last_saved_bytes if is_last else option.forward_transient_bytes
            transient_bytes = live_bytes + second_run_bytes
            alive = rebuilt | states[position]
            yield _point(chain, "recomputation", position, held, gradients_bytes, alive, transient_bytes)
        rebuilt = rebuilt | _saved(chain, position, option, states)
        own.append(rebuilt)
    for position in reversed(range(span.start, span.stop)):
        block = chain.blocks[position]
        backward_bytes = options[position - span.start].backward_transient_bytes
        transient_bytes = _total(states[position + 1]) + backward_bytes
        yield _point(chain, "backward", position, held, gradients_bytes, own[position - span.start], transient_bytes)
        gradients_bytes += chain.new_gradients_bytes(block)


def _states(chain: Chain) -> list[Storages]:
    """List the input of every block, and the last output. The batch is resident, so the first is empty."""
    states: list[Storages] = [{}]
    for position, block in enumerate(chain.blocks):
        passed = states[-1] if block.passes_input else {}
        states.append({**passed, f"output of {position}": block.output_bytes})
    return states


def _held_by_span(chain: Chain, span: Span, states: list[Storages]) -> Storages:
    """Return what a span that recomputes holds between its forward and its backward."""
    held = {**states[span.start], f"span from {span.start}": chain.span_bytes}
    if span.action is Action.RECOMPUTE_NESTED:
        for position in range(span.start, span.stop):
            held[f"span inside {position}"] = chain.nested_option(position).saved_bytes
    return held


def _saved(chain: Chain, position: int, option: BlockOption, states: list[Storages]) -> Storages:
    """Return what a block holds between its forward and its backward."""
    saved = {f"inside {position}": option.saved_bytes}
    if option.saves_input:
        saved |= states[position]
    if option.saves_output:
        saved |= states[position + 1]
    return saved


def _point(
    chain: Chain,
    phase: str,
    position: int | None,
    held: Storages,
    gradients_bytes: int,
    own: Storages,
    transient_bytes: int,
) -> TimelinePoint:
    held_bytes = _total(held)
    return TimelinePoint(
        phase=phase,
        block="" if position is None else chain.blocks[position].name,
        position=position,
        resident_bytes=chain.static_bytes,
        gradients_bytes=gradients_bytes,
        held_bytes=held_bytes,
        own_bytes=_total(held | own) - held_bytes + transient_bytes,
        temporary_bytes=transient_bytes,
    )


def _total(storages: Storages) -> int:
    return sum(storages.values())
