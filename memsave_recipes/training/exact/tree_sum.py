"""The sum of the gradients of a global batch's micro-batches, with the same bits on any number of ranks.

Notes: ``docs/design/training.md``.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from memsave_recipes.core.step.batch_layout import Batch, BatchLayout
from memsave_recipes.training.exact.batch_layouts import IndexedLayout, LockstepLayout
from memsave_recipes.training.exact.lockstep import Lockstep, micro_batched
from memsave_recipes.training.exact.reduction_tree import Subtrees, count_leaves, join, largest_share

Gradients = dict[Tensor, Tensor]
"""By parameter; one without a gradient is missing."""
PADDING = range(0)
"""The node of a backward whose gradients do not count."""


class TreeSum:
    """Adds up the gradients of a model's global batches: NOTE [ the tree of sums ]. All methods are for all ranks.

    There is one for each prepared model; under DDP it becomes its communication hook, in place of the all-reduce.
    """

    def __init__(self) -> None:
        self._reducers: WeakSet[Any] = WeakSet()
        self._parameters: list[nn.Parameter] = []
        self._count = 0
        self._nodes: Iterator[range] = iter(())
        self._sums: dict[range, Gradients] = {}
        self._exchange: _Exchange | None = None

    def begin(self, model: nn.Module, subtrees: Subtrees, sums: dict[range, Gradients] | None = None) -> None:
        """Begin a step with the micro-batches of ``subtrees``; all ranks have as many backwards as the one with most.

        Args:
            sums: where one backward takes all micro-batches of this rank: those over all its subtrees but the last one;
                the backward fills them in, and leaves the gradient over the last one.
        """
        rank = dist.get_rank() if isinstance(model, DistributedDataParallel) else 0
        nodes = [range(index, index + 1) for index in chain.from_iterable(subtrees[rank])]
        if sums is not None:
            nodes = [subtrees[rank][-1]]
        else:
            nodes += [PADDING] * (largest_share(subtrees) - len(nodes))
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._count, self._nodes, self._sums = count_leaves(subtrees), iter(nodes), dict(sums or {})
        self._exchange = None
        if isinstance(model, DistributedDataParallel) and len(subtrees) > 1:
            self._exchange = _Exchange(subtrees, rank, self._count, self._sums, nodes[-1])
            if model.reducer not in self._reducers:  # --verify gives a model another one for a while
                model.register_comm_hook(None, self._hook)
                self._reducers.add(model.reducer)

    def take(self) -> None:
        """Take in the gradient that a backward has left; not for the last one under DDP."""
        gradients: Gradients = {one: _alone(one.grad) for one in self._parameters if one.grad is not None}
        for parameter in gradients:
            parameter.grad = None
        if (node := next(self._nodes)) != PADDING:
            join(self._sums, node, gradients, self._count, _add_gradients)

    def finish(self) -> None:
        """After the last backward: leave the gradient of the global batch on the parameters."""
        if self._exchange is not None:
            self._exchange.finish()
            self._exchange = None
            return
        self.take()
        (total,) = self._sums.values()
        self._sums.clear()
        for parameter, gradient in total.items():
            parameter.grad = gradient

    def _hook(self, _: Any, bucket: GradBucket) -> Future[Tensor]:
        """For each bucket; a backward outside of a step, whose gradients nobody uses, sends nothing."""
        if self._exchange is not None:
            self._exchange.send(bucket)
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer())
        return future


def _alone(gradient: Tensor) -> Tensor:
    """The gradient without the larger tensor that it may be a part of, which would be kept as long."""
    is_part = gradient.untyped_storage().nbytes() > gradient.nbytes
    return gradient.clone() if is_part else gradient


def _add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """In place; rule 2."""
    if both := left.keys() & right.keys():
        torch._foreach_add_([left[one] for one in both], [right[one] for one in both])
    for one in left.keys() ^ right.keys():
        left[one] = (left[one] if one in left else right[one]).add_(0.0)
    return left


def _pop(gradients: Gradients, parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """Those of ``parameters``; ``None`` for one without."""
    return [gradients.pop(parameter, None) for parameter in parameters]


def _add_where_there(views: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add to each view its gradient, in place; rule 2."""
    there = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
    if there:
        torch._foreach_add_([view for view, _ in there], [gradient for _, gradient in there])
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.add_(0.0)


def _laid_out(buffer: Tensor, views: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """Gradients as ``views`` lie in a bucket's ``buffer``, strides included; (n,) like it."""
    flat = torch.empty_like(buffer)
    for view, gradient in zip(views, gradients, strict=True):
        place = flat.as_strided(view.shape, view.stride(), view.storage_offset() - buffer.storage_offset())
        if gradient is None:
            place.zero_()
        else:
            place.copy_(gradient)
    return flat


@dataclass
class _Transfer:
    """A bucket under way.

    Args:
        buffer: the bucket's own, for the sum.
        sent, received: the sums over the subtrees of this rank; and over those of all ranks, this rank's slice.
    """

    buffer: Tensor
    sent: list[Tensor]
    received: list[Tensor]
    works: list[dist.Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.sent.clear()


@dataclass
class _Exchange:
    """The buckets of one step between the ranks: rules 3 and 4.

    Args:
        sums: of this rank, without the gradient in the buckets.
        last: the node of that gradient.
    """

    subtrees: Subtrees
    rank: int
    count: int
    sums: dict[range, Gradients]
    last: range
    _arriving: _Transfer | None = None
    _returning: _Transfer | None = None
    _holders: list[list[bool]] = field(init=False)

    def __post_init__(self) -> None:
        numbers = [len(own) for own in self.subtrees]
        self._holders = [[number > place for number in numbers] for place in range(max(numbers))]

    def send(self, bucket: GradBucket) -> None:
        """Send the slices of a bucket to their owners."""
        self._turn()
        buffer = bucket.buffer()
        sums, lengths = self._flat_sums(bucket), self._slices(buffer)
        own, transfer = lengths[self.rank], _Transfer(buffer, sums, [], [])
        for place, holders in enumerate(self._holders):
            received = buffer.new_empty(own * (sum(holders) if place else len(holders)))  # the first takes the sum back
            mine = sums[place] if holders[self.rank] else buffer[:0]
            work = dist.all_to_all_single(
                received[: own * sum(holders)],
                mine,
                output_split_sizes=[own * is_holder for is_holder in holders],
                input_split_sizes=[length * holders[self.rank] for length in lengths],
                async_op=True,
            )
            transfer.received.append(received)
            transfer.works.append(work)
        self._arriving = transfer

    def finish(self) -> None:
        """Wait until every bucket has its sum."""
        self._turn()
        self._turn()

    def _turn(self) -> None:
        """Send back the sums of the bucket that has arrived, and have those of the one before it."""
        if self._returning is not None:
            self._returning.wait()
        self._returning, self._arriving = self._arriving, None
        if self._returning is not None:
            self._returning.wait()
            self._send_back(self._returning)

    def _send_back(self, transfer: _Transfer) -> None:
        lengths = self._slices(transfer.buffer)
        own = lengths[self.rank]
        total = self._sum_slices(transfer.received, own)
        copies = transfer.received[0].view(len(lengths), own)
        if not copies[0].is_set_to(total):
            copies[0].copy_(total)
        copies[1:] = copies[0]
        transfer.received = [copies]
        work = dist.all_to_all_single(
            transfer.buffer,
            copies.view(-1),
            output_split_sizes=lengths,
            input_split_sizes=[own] * len(lengths),
            async_op=True,
        )
        transfer.works = [work]

    def _sum_slices(self, received: list[Tensor], own: int) -> Tensor:
        """Of all subtrees; in the memory of one of them."""
        sums: dict[range, Tensor] = {}
        for rank, nodes in enumerate(self.subtrees):
            for place, node in enumerate(nodes):
                row = sum(self._holders[place][:rank])
                join(sums, node, received[place][row * own : (row + 1) * own], self.count, Tensor.add_)
        (total,) = sums.values()
        return total

    def _flat_sums(self, bucket: GradBucket) -> list[Tensor]:
        """Over this rank's subtrees, each (n,) in the order of the bucket; the last one in its own buffer."""
        buffer, parameters, views = bucket.buffer(), bucket.parameters(), bucket.gradients()
        sums: dict[range, Any] = dict(self.sums)

        def add_to_buffer(gradients: Gradients, _: Tensor) -> Tensor:
            _add_where_there(views, _pop(gradients, parameters))
            return buffer

        if self.last != PADDING:
            join(sums, self.last, buffer, self.count, add_to_buffer)
        return [
            value if value is buffer else _laid_out(buffer, views, _pop(value, parameters)) for value in sums.values()
        ]

    def _slices(self, buffer: Tensor) -> list[int]:
        """How many elements of a bucket each rank adds up."""
        ends = [len(buffer) * rank // len(self.subtrees) for rank in range(len(self.subtrees) + 1)]
        return [stop - start for start, stop in pairwise(ends)]


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
