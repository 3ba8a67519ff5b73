"""Plans that treat all blocks alike: one action for all, or recompute every K-th."""

from collections.abc import Sequence

from memsave_recipes.plans.plan import Action, Span

Stacks = Sequence[Sequence[str]]
"""The names of a model's blocks. Blocks of one stack feed one another, so a span may hold several of them; no span
crosses from one stack into the next."""


def count_blocks(stacks: Stacks) -> int:
    """How many blocks the stacks hold together."""
    return sum(len(stack) for stack in stacks)


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
    """Keep everything: plain training."""
    return all_under(stacks, Action.KEEP)


def all_under(stacks: Stacks, action: Action) -> tuple[Span, ...]:
    """Every block by itself under one action."""
    return tuple(Span(start=index, stop=index + 1, action=action) for index in range(count_blocks(stacks)))
