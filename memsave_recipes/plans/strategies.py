"""Plans by name: the strategies of ``--activation_checkpointing`` that need no measurement.

``segments:K`` is the method of ``torch.utils.checkpoint.checkpoint_sequential``
(https://pytorch.org/docs/stable/checkpoint.html): every segment but the last keeps its input alone and recomputes as a
whole. The last segment is kept, since its backward comes first and recomputing it would free nothing; so ``segments:1``
is the baseline, training without checkpointing. Torch's last segment takes the whole remainder; here sizes differ by at
most one block.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import itemgetter

from memsave_recipes.errors import InputError
from memsave_recipes.plans.plan import Action, Plan, Span

Stacks = Sequence[Sequence[str]]
"""The names of a model's blocks. Blocks of one stack feed one another, so a span may hold several of them; no span
crosses from one stack into the next."""


def count_blocks(stacks: Stacks) -> int:
    """The number of blocks in all stacks."""
    return sum(len(stack) for stack in stacks)


def as_they_run(stacks: Stacks, running: Sequence[str]) -> list[Sequence[str]]:
    """The stacks of which a block runs, in the order in which they begin.

    Args:
        running: the blocks that run, in order.
    """
    first: dict[str, int] = {}
    for position, name in enumerate(running):
        first.setdefault(name, position)
    begins = [(min(first[name] for name in stack if name in first), stack) for stack in stacks if first.keys() & stack]
    return [stack for _, stack in sorted(begins, key=itemgetter(0))]


def every(stacks: Stacks, interval: int) -> tuple[Span, ...]:
    """Recompute each ``interval``-th block, beginning with the first, by itself.

    The same layers as ``activation_checkpointing_enable(every_n_layers)`` of transformers.
    """
    return tuple(
        Span(start=index, stop=index + 1, action=Action.KEEP if index % interval else Action.RECOMPUTE)
        for index in range(count_blocks(stacks))
    )


def full(stacks: Stacks) -> tuple[Span, ...]:
    """Recompute every block by itself."""
    return every(stacks, 1)


def none(stacks: Stacks) -> tuple[Span, ...]:
    """Keep everything: the baseline."""
    return all_under(stacks, Action.KEEP)


def all_under(stacks: Stacks, action: Action) -> tuple[Span, ...]:
    """Every block by itself under one action."""
    return tuple(Span(start=index, stop=index + 1, action=action) for index in range(count_blocks(stacks)))


def segments(stacks: Stacks, count: int) -> tuple[Span, ...]:
    """``count`` segments of nearly equal numbers of blocks; a segment is cut where a stack ends."""
    num_blocks = count_blocks(stacks)
    boundaries = [num_blocks * k // count for k in range(count + 1)]
    stack_ends = accumulate(len(stack) for stack in stacks)
    cuts = sorted({*boundaries, *stack_ends})
    last_segment = boundaries[-2]
    return tuple(
        Span(start=start, stop=stop, action=Action.KEEP if start >= last_segment else Action.RECOMPUTE)
        for start, stop in pairwise(cuts)
    )


PLAIN_STRATEGIES: dict[str, Callable[[Stacks], tuple[Span, ...]]] = {
    "none": none,
    "full": full,
    "selective": partial(all_under, action=Action.SELECT_OPS),
    "offload": partial(all_under, action=Action.OFFLOAD),
}
COUNTED_STRATEGIES = {"every": every, "segments": segments}
BUDGET_WORDS = ("budget", "budget:bitwise")  # solved from measured costs, by memsave_recipes.planner
COMPILED_MEMORY_RATIO = 0.3
MAX_DIGITS = 10
KNOWN = (
    "none, full, every:K, segments:K, selective, offload, compiled[:RATIO], bottleneck, budget, budget:bitwise or the "
    "path of a plan.json"
)


def plan_for(strategy: str, stacks: Stacks) -> Plan:
    """The plan that ``strategy`` makes for the blocks in ``stacks``.

    Args:
        strategy: ``none``, ``full``, ``selective``, ``offload``, ``every:K`` or ``segments:K`` with K from 1 to the
            number of blocks, ``compiled`` or ``compiled:RATIO`` with a ratio from 0 to 1.
        stacks: names of the blocks, in the order of the forward.

    Raises:
        InputError: no such strategy, or K or RATIO is no number in its range.
    """
    blocks = tuple(name for stack in stacks for name in stack)
    name, colon, argument = strategy.partition(":")
    if name in PLAIN_STRATEGIES and not colon:
        return Plan(strategy=strategy, blocks=blocks, spans=PLAIN_STRATEGIES[name](stacks))
    if name in COUNTED_STRATEGIES:
        count = _parse_count(strategy, argument, count_blocks(stacks))
        return Plan(strategy=strategy, blocks=blocks, spans=COUNTED_STRATEGIES[name](stacks, count))
    if name == "compiled":
        ratio = _parse_ratio(strategy, argument) if colon else COMPILED_MEMORY_RATIO
        spans = all_under(stacks, Action.COMPILE)
        return Plan(strategy=strategy, blocks=blocks, spans=spans, compiled_memory_ratio=ratio)
    raise InputError(f"strategy {strategy}: no such strategy; choose {KNOWN}")


def _parse_count(strategy: str, argument: str, num_blocks: int) -> int:
    count = int(argument) if argument.isascii() and argument.isdigit() and len(argument) < MAX_DIGITS else 0
    if not 1 <= count <= num_blocks:
        name = strategy.partition(":")[0]
        raise InputError(
            f"strategy {strategy}: K in {name}:K is a whole number from 1 to {num_blocks}, the blocks of this model"
        )
    return count


def _parse_ratio(strategy: str, argument: str) -> float:
    try:
        ratio = float(argument)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise InputError(
            f"strategy {strategy}: RATIO in compiled:RATIO is a number from 0 to 1, "
            "the part of a compiled block's activations that it may keep"
        )
    return ratio
