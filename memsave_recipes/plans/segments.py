"""Plans of equal segments: all but the last recompute as a whole.

The method of ``torch.utils.checkpoint.checkpoint_sequential`` (https://pytorch.org/docs/stable/checkpoint.html): only
what enters a segment is kept. The last segment is kept as it is, since its backward comes first and recomputing it
would free nothing; so ``segments:1`` is plain training. Unlike torch, whose last segment takes the whole remainder,
the sizes here differ by at most one block.
"""

from itertools import accumulate, pairwise

from memsave_recipes.plans.plan import Action, Span
from memsave_recipes.plans.uniform import Stacks, count_blocks


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
