"""The sums of one step on one rank: gradients and losses with the same bits on any number of ranks."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from memsave_recipes.exact.batch_layouts import IndexedLayout, LockstepLayout
from memsave_recipes.exact.lockstep import Lockstep, micro_batched
from memsave_recipes.exact.reduction_tree import Subtrees, count_leaves
from memsave_recipes.exact.tree_sum import TreeSum
from memsave_recipes.step.batch_layout import Batch, BatchLayout


@dataclass(kw_only=True)
class StepSums:
    """The micro-batches of a rank, one by one: rules 8 to 10 of NOTE [ the exact global batch ].

    Args:
        indices: of this rank's micro-batches in the global batch; ``None`` for padding.
        subtrees: the indices of all ranks.
        losses: the parts of this rank's micro-batches in the loss of the step, 0 for padding.
    """

    tree_sum: TreeSum
    subtrees: Subtrees
    rank: int
    indices: list[int | None]
    losses: list[Tensor] = field(init=False, default_factory=list)

    def begin(self, model: nn.Module) -> None:
        """Begin the step; it may be computed again."""
        self.losses.clear()
        self.tree_sum.begin(model, self.subtrees)

    def taken_at_once(self, micro_batches: list[Batch]) -> list[list[Batch]]:
        """Return the micro-batches that each forward takes."""
        return [[micro_batch] for micro_batch in micro_batches]

    def joined(self, micro_batches: list[Batch]) -> Batch:
        """Return micro-batches, on the device, as their forward takes them."""
        (micro_batch,) = micro_batches
        return micro_batch

    def position(self, index: int) -> tuple[int | None, ...]:
        """Return the position of a forward in the step, for the seed of dropout."""
        return (self.indices[index],)

    def take(self, losses: list[Tensor]) -> None:
        """Take in what a backward has left; after the last one, the parameters have the sum over all ranks.

        Args:
            losses: of the micro-batches of its forward, as parts of the loss of the step.
        """
        for loss in losses:
            is_padding = self.indices[len(self.losses)] is None
            self.losses.append(torch.zeros_like(loss) if is_padding else loss)
        if len(self.losses) == len(self.indices):
            self.tree_sum.finish()
        else:
            self.tree_sum.take()


@dataclass(kw_only=True)
class LockstepSums(StepSums):
    """The micro-batches of a rank all at once, without padding: rule 11."""

    lockstep: Lockstep = field(init=False)

    def begin(self, model: nn.Module) -> None:
        """As of ``StepSums``."""
        self.lockstep = Lockstep(self.subtrees, self.rank, count_leaves(self.subtrees))
        self.losses.clear()
        self.tree_sum.begin(model, self.subtrees, self.lockstep.sums)

    def taken_at_once(self, micro_batches: list[Batch]) -> list[list[Batch]]:
        """As of ``StepSums``."""
        return [micro_batches[: len(self.lockstep.indices)]]

    def joined(self, micro_batches: list[Batch]) -> Batch:
        """As of ``StepSums``: of ``MicroBatched`` tensors."""
        return micro_batched(micro_batches, self.lockstep)

    def position(self, index: int) -> tuple[int | None, ...]:
        """The step's alone: the index of a micro-batch is part of rule 4 of NOTE [ lockstep ]."""
        return ()

    def take(self, losses: list[Tensor]) -> None:
        """As of ``StepSums``."""
        super().take(losses + [torch.zeros_like(losses[0])] * self.indices.count(None))


def step_sums(layout: BatchLayout, num_samples: int, rank: int, tree_sum: TreeSum) -> StepSums | None:
    """Return the sums of a step of ``num_samples``; ``None`` where the layout leaves them to DDP."""
    if not isinstance(layout, IndexedLayout):
        return None
    kind = LockstepSums if isinstance(layout, LockstepLayout) else StepSums
    subtrees, indices = layout.subtrees(num_samples), layout.indices(num_samples)[rank]
    return kind(tree_sum=tree_sum, subtrees=subtrees, rank=rank, indices=indices)
