"""Which samples a step trains, and on which rank and in which micro-batch: pure functions, no state, no devices.

The rules stand in NOTE [ the exact global batch ] in ``memsave_recipes/training/batching.py``.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from memsave_recipes.core.errors import InputError

Batch = dict[str, Tensor]
"""A micro-batch: its tensors by name."""
MAX_LISTED = 16
"""Micro-batches that ``BatchLayout.describe`` lists one by one."""


@dataclass(frozen=True)
class SampleKey:
    """The index of a data set: a sample, its epoch, whether it counts or is padding, and its partner.

    The partner, for what mixes two samples, is the one before it in the global batch, and the last one of the first. So
    a micro-batch has one picture more to load, and no rank or micro-batch changes who is mixed with whom.
    """

    index: int
    epoch: int = 0
    counted: bool = True
    partner: int | None = None


@dataclass(frozen=True, kw_only=True)
class GradientSums:
    """Bytes of a rank for sums of the gradients of earlier micro-batches.

    Args:
        held_bytes: sums that are there when a micro-batch begins.
        exchanged_bytes: buckets on their way between ranks during a backward.
        exchanged_after_bytes: likewise, when the last backward has ended.
        end_in_buckets: whether there are most of them beside the gradient that DDP's buckets take.
    """

    held_bytes: int
    exchanged_bytes: int
    exchanged_after_bytes: int
    end_in_buckets: bool


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """The split of a global batch over ranks and micro-batches of at most ``micro_batch_size`` samples.

    Args:
        sequence_parallel: neighbours that get the same samples, and share each of them.

    Raises:
        InputError: a size below 1, ranks that cannot be divided into groups, or fewer samples than ranks or groups.
    """

    is_bitwise: ClassVar[bool] = False
    """Whether gradients and losses have the same bits on any number of ranks."""
    needs_all_gradients: ClassVar[str | None] = None
    """Why no gradient of a step can be used before all are there, where that is so."""

    global_batch_size: int
    micro_batch_size: int
    num_processes: int
    sequence_parallel: int = 1

    def __post_init__(self) -> None:
        size = self.sequence_parallel
        if self.num_processes % size:
            raise InputError(
                f"sequence_parallel {size}: {count_of(self.num_processes, 'rank')} cannot be divided into groups of "
                f"{size}: launch a multiple of {size}, or leave it out"
            )
        if self.global_batch_size < 1:
            raise InputError(f"global_batch_size {self.global_batch_size} is not a positive number of samples")
        if self.micro_batch_size < 1:
            raise InputError(f"micro_batch_size {self.micro_batch_size} is not a positive number of samples")
        if self.global_batch_size < self.num_shares:
            raise InputError(
                f"global_batch_size {self.global_batch_size} is smaller than the {self._takers(self.num_shares)}: "
                f"raise it to at least {self.num_shares} or launch fewer processes"
            )

    @classmethod
    def of(
        cls, global_batch_size: int, micro_batch_size: int | None, num_processes: int, sequence_parallel: int = 1
    ) -> "BatchLayout":
        """The layout that the flags ask for; without a micro-batch size each rank forwards its whole share at once."""
        largest = cls._largest_micro_batch(global_batch_size * sequence_parallel, num_processes)
        size = largest if micro_batch_size is None else min(micro_batch_size, largest)
        return cls(
            global_batch_size=global_batch_size,
            micro_batch_size=size,
            num_processes=num_processes,
            sequence_parallel=sequence_parallel,
        )

    def with_micro_batch(self, size: int | None) -> "BatchLayout":
        """The same global batch on the same ranks, in other micro-batches."""
        return self.of(self.global_batch_size, size, self.num_processes, self.sequence_parallel)

    @property
    def halvings(self) -> "list[BatchLayout]":
        """The layouts whose micro-batches are a rank's share halved again and again, rounded up; smallest first."""
        found = [self.with_micro_batch(None)]
        while found[-1].micro_batch_size > 1:
            found.append(self.with_micro_batch(ceil(found[-1].micro_batch_size / 2)))
        return found[::-1]

    @classmethod
    def _largest_micro_batch(cls, global_batch_size: int, num_processes: int) -> int:
        return ceil(global_batch_size / num_processes)

    @property
    def num_shares(self) -> int:
        """Ranks, or groups of them, that have samples of their own."""
        return self.num_processes // self.sequence_parallel

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of a rank in a full step."""
        return ceil(ceil(self.global_batch_size / self.num_shares) / self.micro_batch_size)

    @property
    def forwards_per_step(self) -> int:
        """Of a rank in a full step, each with its backward."""
        return self.accumulation_steps

    def largest_forward(self, num_samples: int) -> list[int]:
        """The samples of each micro-batch that the largest forward of a step of ``num_samples`` takes: of one."""
        return [min(self.micro_batch_size, num_samples)]

    def joined(self, micro_batches: list[Batch], rank: int = 0, num_ranks: int = 1) -> Batch:
        """Return what one forward takes, outside of steps, of as many micro-batches as ``largest_forward`` says.

        Args:
            rank, num_ranks: that forward together.
        """
        (micro_batch,) = micro_batches
        return micro_batch

    def gradient_sums(self, parameters: Sequence[Tensor], gradients_bytes: int) -> GradientSums | None:
        """Return what sums of gradients take beside the gradients themselves; ``None``: nothing.

        Args:
            parameters: those that train.
            gradients_bytes: of all of them, as the device allocates them.
        """
        return None

    def describe_sums(self, model: nn.Module) -> str | None:
        """Return a line on what a step of ``model`` holds and sends for sums of gradients, if it does."""
        return None

    def micro_batches(self, num_samples: int) -> list[list[range]]:
        """For every rank its micro-batches, as ranges of positions among the step's ``num_samples`` samples.

        Every rank gets equally many; those of a rank whose share has run out are empty.
        """
        ends = [num_samples * number // self.num_shares for number in range(self.num_shares + 1)]
        shares = [range(start, stop) for start, stop in pairwise(ends)]
        size = self.micro_batch_size
        count = ceil(max(len(share) for share in shares) / size)
        cut = [[share[k * size : (k + 1) * size] for k in range(count)] for share in shares]
        return [cut[rank // self.sequence_parallel] for rank in range(self.num_processes)]

    def describe(self) -> str:
        """``256 samples = 8 x 4 ranks x 8 accumulation steps``, or the uneven sizes one by one."""
        share, num_larger = divmod(self.global_batch_size, self.num_shares)
        size = min(self.micro_batch_size, share)
        if not num_larger and not share % size:
            return (
                f"{count_of(self.global_batch_size, 'sample')} = {size} x {self._takers(self.num_shares)} "
                f"x {count_of(self.accumulation_steps, 'accumulation step')}"
            )
        shares = ((share, self.num_shares - num_larger), (share + 1, num_larger))
        rows = [f"({self._cut(share)}) x {self._takers(repeated)}" for share, repeated in shares if repeated]
        return f"{self.global_batch_size} samples = {' + '.join(rows)}"

    def _takers(self, number: int) -> str:
        """So many ranks, or groups of ranks."""
        if self.sequence_parallel == 1:
            return count_of(number, "rank")
        return f"{count_of(number, 'group')} of {self.sequence_parallel} ranks"

    def _cut(self, share: int) -> str:
        """The micro-batches of a rank's share: ``5+5+2``; of many, how many there are."""
        full, rest = divmod(share, self.micro_batch_size)
        if self.accumulation_steps > MAX_LISTED:
            return f"{full} of {self.micro_batch_size}" + (f" + {rest}" if rest else "")
        sizes = [self.micro_batch_size] * full + [rest] * (rest > 0)
        return "+".join(map(str, sizes + [0] * (self.accumulation_steps - len(sizes))))


def count_of(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def seed_for(*position: int | None) -> int:
    """A seed that depends on all of ``position`` and on nothing else: 63 bits of its BLAKE2 hash."""
    return int.from_bytes(hashlib.blake2b(repr(position).encode(), digest_size=8).digest()) >> 1


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Which samples each step trains: rule 1 of NOTE [ the exact global batch ].

    Args:
        num_samples: size of the data set.
        global_batch_size: samples of a full step; the last step of an epoch takes the rest.
        seed: of the permutations; ``None`` keeps the order of the data set.

    Raises:
        InputError: no samples.
    """

    num_samples: int
    global_batch_size: int
    seed: int | None

    def __post_init__(self) -> None:
        if not self.num_samples:
            raise InputError("the data set is empty: check the split and the filter that made it")

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        return -(-self.num_samples // self.global_batch_size)

    def epoch(self, step: int) -> int:
        """The epoch that ``step`` belongs to, from 0."""
        return step // self.steps_per_epoch

    def permutation(self, epoch: int) -> list[int]:
        """The order of the samples in ``epoch``."""
        if self.seed is None:
            return list(range(self.num_samples))
        generator = torch.Generator().manual_seed(seed_for(self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def steps(self, first: int, last: int) -> Iterator[tuple[int, list[int]]]:
        """The epoch and the samples of each step from ``first`` to ``last - 1``."""
        permutation: list[int] = []
        for step in range(first, last):
            position = step % self.steps_per_epoch * self.global_batch_size
            if not permutation or not position:
                permutation = self.permutation(self.epoch(step))
            yield self.epoch(step), permutation[position : position + self.global_batch_size]

    def num_samples_in(self, step: int) -> int:
        """How many samples ``step`` trains."""
        position = step % self.steps_per_epoch * self.global_batch_size
        return min(self.global_batch_size, self.num_samples - position)


@dataclass(frozen=True, kw_only=True)
class MicroBatchSampler(Sampler[list[SampleKey]]):
    """The micro-batches of one rank, step after step: rule 2 of NOTE [ the exact global batch ]."""

    order: SampleOrder
    layout: BatchLayout
    rank: int
    first_step: int
    last_step: int

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for epoch, samples in self.order.steps(self.first_step, self.last_step):
            for positions in self.layout.micro_batches(len(samples))[self.rank]:
                keys = [SampleKey(samples[i], epoch, partner=samples[i - 1]) for i in positions]
                yield keys or [SampleKey(samples[0], epoch, counted=False)]
