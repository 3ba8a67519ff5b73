"""From the words of ``--activation_checkpointing`` to the spans of a plan."""

from memsave_recipes.errors import InputError
from memsave_recipes.plans.plan import Plan
from memsave_recipes.plans.segments import segments
from memsave_recipes.plans.uniform import Stacks, count_blocks, every, full, none

PLAIN_STRATEGIES = {"none": none, "full": full}
COUNTED_STRATEGIES = {"every": every, "segments": segments}
KNOWN = "none, full, every:K, segments:K, bottleneck or the path of a plan.json"


def plan_for(strategy: str, stacks: Stacks) -> Plan:
    """The plan that ``strategy`` makes for the blocks in ``stacks``.

    Args:
        strategy: ``none``, ``full``, ``every:K`` or ``segments:K`` with K from 1 to the number of blocks.
        stacks: names of the blocks, in the order of the forward.

    Raises:
        InputError: no such strategy, or K is not a whole number in that range.
    """
    blocks = tuple(name for stack in stacks for name in stack)
    name, colon, argument = strategy.partition(":")
    if name in PLAIN_STRATEGIES and not colon:
        return Plan(strategy=strategy, blocks=blocks, spans=PLAIN_STRATEGIES[name](stacks))
    if name in COUNTED_STRATEGIES:
        count = _parse_count(strategy, argument, count_blocks(stacks))
        return Plan(strategy=strategy, blocks=blocks, spans=COUNTED_STRATEGIES[name](stacks, count))
    raise InputError(f"--activation_checkpointing {strategy}: no such strategy; choose {KNOWN}")


def _parse_count(strategy: str, argument: str, num_blocks: int) -> int:
    count = int(argument) if argument.isascii() and argument.isdigit() else 0
    if not 1 <= count <= num_blocks:
        name = strategy.partition(":")[0]
        raise InputError(
            f"--activation_checkpointing {strategy}: K in {name}:K is a whole number from 1 to {num_blocks}, "
            "the blocks of this model"
        )
    return count
