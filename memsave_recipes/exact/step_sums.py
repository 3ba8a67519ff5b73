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
    """The micro-batches of a rank: rules 8 to 11 of NOTE [ the exact global batch ].

    Args:
        indices: of this rank's micro-batches in the global batch; ``None`` for padding, at the end.
        subtrees: the indices of all ranks.
        joins: whether one forward takes all of them, without padding, in lockstep.
        losses: the parts of this rank's micro-batches in the loss of the step, 0 for padding.
    """

    tree_sum: TreeSum
    subtrees: Subtrees
    rank: int
    indices: list[int | None]
    joins: bool
    losses: list[Tensor] = field(init=False, default_factory=list)
    _lockstep: Lockstep = field(init=False)

    @property
    def num_counted(self) -> int:
        """The micro-batches that are not padding."""
        return len(self.indices) - self.indices.count(None)

    def begin(self, model: nn.Module) -> None:
        """Begin the step; it may be computed again."""
        self._lockstep = Lockstep(self.subtrees, self.rank, count_leaves(self.subtrees))
        self.losses.clear()
        self.tree_sum.begin(model, self.subtrees, self._lockstep.sums if self.joins else None)

    def joined(self, micro_batches: list[Batch]) -> Batch:
        """Return the counted micro-batches, on the device, as one forward takes them."""
        return micro_batched(micro_batches, self._lockstep)

    def position(self, index: int) -> tuple[int | None, ...]:
        """Return the position of a forward, for the seed of dropout; in lockstep rule 4 of its NOTE has the index."""
        return () if self.joins else (self.indices[index],)

    def take(self, losses: list[Tensor]) -> None:
        """Take in what a backward has left; after the last one, the parameters have the sum over all ranks.

        Args:
            losses: of the micro-batches of its forward, as parts of the loss of the step.
        """
        zero = torch.zeros_like(losses[0])
        if self.joins:
            losses = losses + [zero] * self.indices.count(None)
        elif self.indices[len(self.losses)] is None:
            losses = [zero]
        self.losses += losses
        if len(self.losses) == len(self.indices):
            self.tree_sum.finish()
        else:
            self.tree_sum.take()


def step_sums(layout: BatchLayout, num_samples: int, rank: int, tree_sum: TreeSum) -> StepSums | None:
    """Return the sums of a step of ``num_samples``; ``None`` where the layout leaves them to DDP."""
    if not isinstance(layout, IndexedLayout):
        return None
    return StepSums(
        tree_sum=tree_sum,
        subtrees=layout.subtrees(num_samples),
        rank=rank,
        indices=layout.indices(num_samples)[rank],
        joins=isinstance(layout, LockstepLayout),
    )
