"""From the words of ``--activation_checkpointing`` to the spans of a plan."""

from collections.abc import Callable
from functools import partial

from memsave_recipes.errors import InputError
from memsave_recipes.plans.plan import Action, Plan, Span
from memsave_recipes.plans.segments import segments
from memsave_recipes.plans.uniform import Stacks, all_under, count_blocks, every, full, none

PLAIN_STRATEGIES: dict[str, Callable[[Stacks], tuple[Span, ...]]] = {
    "none": none,
    "full": full,
    "selective": partial(all_under, action=Action.SELECT_OPS),
    "offload": partial(all_under, action=Action.OFFLOAD),
}
COUNTED_STRATEGIES = {"every": every, "segments": segments}
BUDGET_WORDS = ("budget", "budget:bitwise")  # made from measured costs, by memsave_recipes.planner
COMPILED_MEMORY_RATIO = 0.3
MOST_DIGITS = 10
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
    raise InputError(f"--activation_checkpointing {strategy}: no such strategy; choose {KNOWN}")


def _parse_count(strategy: str, argument: str, num_blocks: int) -> int:
    count = int(argument) if argument.isascii() and argument.isdigit() and len(argument) < MOST_DIGITS else 0
    if not 1 <= count <= num_blocks:
        name = strategy.partition(":")[0]
        raise InputError(
            f"--activation_checkpointing {strategy}: K in {name}:K is a whole number from 1 to {num_blocks}, "
            "the blocks of this model"
        )
    return count


def _parse_ratio(strategy: str, argument: str) -> float:
    try:
        ratio = float(argument)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise InputError(
            f"--activation_checkpointing {strategy}: RATIO in compiled:RATIO is a number from 0 to 1, "
            "the part of a compiled block's activations that it may keep"
        )
    return ratio
