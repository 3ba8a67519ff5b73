"""The batch layouts of a step with the same bits on any number of ranks, and the memory that its sums take."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from math import ceil
from typing import ClassVar

from torch import Tensor, nn
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.step.batch_layout import Batch, BatchLayout, GradientSums, count_of
from memsave_recipes.core.text import MIB, format_bytes
from memsave_recipes.training.exact.lockstep import in_lockstep
from memsave_recipes.training.exact.reduction_tree import Subtrees, deal_subtrees, join, largest_share

BUCKET_LIMITS = [1 * MIB, 25 * MIB]
"""Bytes at which DDP, as Accelerate makes it, closes its first bucket and the others."""


@dataclass(frozen=True, kw_only=True)
class IndexedLayout(BatchLayout):
    """The split of ``--bitwise_topology``: into the same micro-batches on any number of ranks.

    Micro-batch i has the samples from ``i * micro_batch_size`` on; the last one may be short. A rank has the indices of
    ``deal_subtrees``: rules 8 and 9 of NOTE [ the exact global batch ].

    Raises:
        InputError: as ``BatchLayout``, or fewer micro-batches than ranks.
    """

    is_bitwise: ClassVar[bool] = True
    needs_all_gradients: ClassVar[str | None] = "--bitwise_topology adds up all gradients of the global batch first"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_micro_batches < self.num_processes:
            raise InputError(
                f"--bitwise_topology: --micro_batch_size {self.micro_batch_size} makes "
                f"{count_of(self.num_micro_batches, 'micro-batch')} of --global_batch_size {self.global_batch_size}, "
                f"fewer than the {self.num_processes} ranks: launch fewer processes"
            )

    @classmethod
    def of(
        cls, global_batch_size: int, micro_batch_size: int | None, num_processes: int, sequence_parallel: int = 1
    ) -> "IndexedLayout":
        """A size that is given is the same on any number of ranks; ``None`` is the largest that gives each rank one."""
        size = micro_batch_size or cls._largest_micro_batch(global_batch_size, num_processes)
        size = min(size, global_batch_size)
        return cls(
            global_batch_size=global_batch_size,
            micro_batch_size=size,
            num_processes=num_processes,
            sequence_parallel=sequence_parallel,
        )

    @classmethod
    def _largest_micro_batch(cls, global_batch_size: int, num_processes: int) -> int:
        return max(1, global_batch_size // num_processes)

    @property
    def num_micro_batches(self) -> int:
        """Of a full step, over all ranks."""
        return ceil(self.global_batch_size / self.micro_batch_size)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of the rank with most in a full step; padding makes up for those that others lack."""
        return largest_share(self.subtrees(self.global_batch_size))

    def subtrees(self, num_samples: int) -> Subtrees:
        """Of a step's micro-batches, for every rank."""
        return deal_subtrees(ceil(num_samples / self.micro_batch_size), self.num_processes)

    @property
    def most_subtrees(self) -> int:
        """Of a rank in a full step."""
        return max(map(len, self.subtrees(self.global_batch_size)))

    def indices(self, num_samples: int) -> list[list[int | None]]:
        """For every rank the indices of its micro-batches; ``None`` where its share has run out."""
        ranks: list[list[int | None]] = [list(chain.from_iterable(own)) for own in self.subtrees(num_samples)]
        count = max(map(len, ranks))
        return [indices + [None] * (count - len(indices)) for indices in ranks]

    def micro_batches(self, num_samples: int) -> list[list[range]]:
        """As of ``BatchLayout``."""
        samples, size = range(num_samples), self.micro_batch_size
        return [
            [range(0) if i is None else samples[i * size : (i + 1) * size] for i in indices]
            for indices in self.indices(num_samples)
        ]

    @property
    def most_sums(self) -> tuple[int, bool]:
        """Sums of earlier micro-batches that a rank holds beside the gradient of the next one, in a full step.

        The most of them; and whether no rank has as many beside another gradient than the one that DDP's buckets take.
        """
        of_ranks = []
        for indices in self.indices(self.global_batch_size):
            sums: dict[range, None] = {}
            held = []
            for index in indices:
                held.append(len(sums))
                if index is not None:
                    join(sums, range(index, index + 1), None, self.num_micro_batches, lambda left, right: None)
            of_ranks.append((max(held), max(held) in held[:-1]))
        most, beside_others = max(of_ranks)
        return most, not beside_others

    def gradient_sums(self, parameters: Sequence[Tensor], gradients_bytes: int) -> GradientSums:
        """As of ``BatchLayout``: the copies of gradients in NOTE [ the tree of sums ], of a full step."""
        num_sums, only_beside_the_last = self.most_sums
        in_backward, after_it = exchanged_bytes(parameters, self, num_sums)
        return GradientSums(
            held_bytes=num_sums * gradients_bytes,
            exchanged_bytes=in_backward,
            exchanged_after_bytes=after_it,
            end_in_buckets=only_beside_the_last,
        )

    def describe_sums(self, model: nn.Module) -> str:
        """As of ``BatchLayout``."""
        num_bytes = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        copies = self.accumulation_steps.bit_length()
        held = f"at most {copies} x {format_bytes(num_bytes)} of gradients at once"
        if self.num_processes == 1:
            return f"bitwise topology: {held}"
        ratio = (self.most_subtrees + 1) / 2
        return f"bitwise topology: {held} besides DDP's, {ratio:g} x the bytes of an all-reduce between the ranks"

    def describe(self) -> str:
        """``25 samples = 6 micro-batches of 4 + 1 of 1, on 2 ranks in 4 accumulation steps``."""
        full, rest = divmod(self.global_batch_size, self.micro_batch_size)
        cut = f"{count_of(full, 'micro-batch')} of {self.micro_batch_size}" + (f" + 1 of {rest}" if rest else "")
        ranks, steps = count_of(self.num_processes, "rank"), count_of(self.accumulation_steps, "accumulation step")
        return f"{count_of(self.global_batch_size, 'sample')} = {cut}, on {ranks} in {steps}"


@dataclass(frozen=True, kw_only=True)
class LockstepLayout(IndexedLayout):
    """An ``IndexedLayout`` of which one forward takes all micro-batches of a rank, in lockstep.

    Rule 11 of NOTE [ the exact global batch ].

    Raises:
        InputError: as ``IndexedLayout``.
    """

    @property
    def forwards_per_step(self) -> int:
        """One, whatever the ``accumulation_steps``."""
        return 1

    @property
    def most_sums(self) -> tuple[int, bool]:
        """As of ``IndexedLayout``: one backward makes the sums of all subtrees, the last one in DDP's buckets."""
        return self.most_subtrees - 1, True

    def describe(self) -> str:
        """``25 samples = 6 micro-batches of 4 + 1 of 1, on 2 ranks in lockstep``."""
        on_ranks, _, _ = super().describe().rpartition(" in ")
        return f"{on_ranks} in lockstep"

    def largest_forward(self, num_samples: int) -> list[int]:
        """As of ``BatchLayout``: of all micro-batches of the rank with most samples."""
        ranks = ([len(one) for one in of_rank if one] for of_rank in self.micro_batches(num_samples))
        return max(ranks, key=sum)

    def joined(self, micro_batches: list[Batch], rank: int = 0, num_ranks: int = 1) -> Batch:
        """As of ``BatchLayout``: all of them in lockstep."""
        return in_lockstep(micro_batches, rank, num_ranks)


def exchanged_bytes(parameters: Sequence[Tensor], layout: IndexedLayout, num_sums: int) -> tuple[int, int]:
    """The most that buckets under way between the ranks take besides DDP's own buffers: in a backward, and after it.

    A rank receives its slice of all subtrees. What it sends is in new memory, but for what is in the bucket itself; on
    ranks with padding that is nothing. The sums that it is made from are given back, bucket by bucket. The last bucket
    is ready when the backward has ended: no sum is then anywhere else, and of the gradients that it was filled with
    only the last one is still there, at most the largest.

    Args:
        num_sums: that the ranks hold, at most, beside the last gradient.
    """
    if layout.num_processes == 1 or not parameters:
        return 0, 0
    indices, _ = _compute_bucket_assignment_by_size(list(reversed(parameters)), BUCKET_LIMITS)
    sizes = [sum(parameters[-1 - index].nbytes for index in bucket) for bucket in indices]
    subtrees = layout.subtrees(layout.global_batch_size)
    received = sum(map(len, subtrees)) / layout.num_processes
    sent = max(len(own) - (sum(map(len, own)) >= layout.forwards_per_step) for own in subtrees)
    *earlier, (before_last, last) = pairwise([0, *sizes])
    in_backward = 0.0
    for (before, size), given_back in zip(earlier, accumulate(sizes), strict=False):
        in_backward = max(in_backward, before + (received + sent) * size - num_sums * given_back)
    after_it = before_last + (received + sent) * last + max(parameters[-1 - index].nbytes for index in indices[-1])
    return ceil(in_backward), ceil(after_it)
