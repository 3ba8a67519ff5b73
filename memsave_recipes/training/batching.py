"""One global batch, one curve: the gradient of the whole global batch on any number of ranks and accumulation steps.

Notes: ``docs/design/training.md``.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import fsum, isfinite
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import default_collate

from memsave_recipes.core.activations.micro_batches import WrapperTensor, inner_tensors
from memsave_recipes.core.processes import serve_parent_only
from memsave_recipes.core.step.batch_layout import (
    Batch,
    BatchLayout,
    MicroBatchSampler,
    SampleKey,
    SampleOrder,
    seed_for,
)
from memsave_recipes.training.exact.tree_sum import StepSums, TreeSum, step_sums
from memsave_recipes.training.launch.processes import end_workers_at_exit


class GlobalBatches:
    """Iterates over the optimizer steps of a run; each gives this rank's micro-batches of the step's global batch.

    Args:
        accelerator: for the ranks, the device and the backward.
        dataset: indexed by ``SampleKey``; gives the label -100 where ``counted`` is false.
        order: which samples each step trains.
        layout: how a step is cut up; another one may be set before the first step is taken. One that is bitwise gives
            the same bits on any number of ranks, to one model; with a single rank in it, each rank computes all of it
            by itself, with a model that Accelerate has not prepared.
        num_steps: where the run ends.
        count_valid: the number of positions of a micro-batch that count in the loss, such as its labels after the shift
            that are not -100. Without it every sample counts once, as in classification, and nothing needs counting.
        weights: of the samples in their mean, (N,), where they do not count alike: rule 3.
        num_workers: processes that load data.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        dataset: Any,
        *,
        order: SampleOrder,
        layout: BatchLayout,
        num_steps: int,
        seed: int,
        count_valid: Callable[[Batch], Tensor] | None = None,
        weights: Sequence[float] | None = None,
        collate_fn: Callable[[list[Any]], Batch] = default_collate,
        num_workers: int = 0,
    ) -> None:
        self.accelerator = accelerator
        self.order = order
        self.layout = layout
        self.seed = seed
        self.steps = range(num_steps)
        self.count_valid = count_valid
        self.weights = weights
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.num_workers = num_workers
        self._tree_sum = TreeSum()

    @property
    def smallest_micro_batch(self) -> int:
        """The fewest samples that a forward of the run is given; those of an epoch's last step may be few."""
        last_of_epoch = min(self.order.steps_per_epoch, self.steps.stop) - 1
        ranks = [
            rank for step in {0, last_of_epoch} for rank in self.layout.micro_batches(self.order.num_samples_in(step))
        ]
        return min(max(1, len(micro_batch)) for rank in ranks for micro_batch in rank)

    @property
    def num_steps(self) -> int:
        """Of the whole run."""
        return self.steps.stop

    def begin_after(self, step: int) -> None:
        """Leave out the first ``step`` steps of the run."""
        self.steps = range(step, self.steps.stop)

    def anew(self, layout: BatchLayout) -> "GlobalBatches":
        """All steps of the run once more, in another layout."""
        other = copy(self)
        other.layout = layout
        other.steps = range(self.steps.stop)
        return other

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator["GlobalBatch"]:
        micro_batches = iter(self._make_loader())
        samples = self.order.steps(self.steps.start, self.steps.stop)
        for step in self.steps:
            num_samples = self.order.num_samples_in(step)
            count = len(self.layout.micro_batches(num_samples)[0])
            mine = [next(micro_batches) for _ in range(count)]
            yield self._make_batch(
                accelerator=self.accelerator,
                step=step,
                epoch=self.order.epoch(step),
                num_samples=num_samples,
                num_valid=self._num_valid(mine, num_samples),
                weight=None if self.weights is None else exact_sum(self.weights[index] for index in next(samples)[1]),
                micro_batches=mine,
                seed=self.seed,
            )

    def _make_batch(self, *, num_samples: int, **parts: Any) -> "GlobalBatch":
        sums = step_sums(self.layout, num_samples, self._rank, self._tree_sum)
        if sums is None:
            return GlobalBatch(num_samples=num_samples, **parts)
        return BitwiseGlobalBatch(num_samples=num_samples, sums=sums, **parts)

    def outside_of_steps(self, micro_batch: Batch) -> Batch:
        """A micro-batch on the device as a forward takes it that is no part of a step: one for each rank."""
        on_device = send_to_device(micro_batch, self.accelerator.device)
        return self.layout.joined([on_device], self._rank, self.layout.num_processes)

    def largest_forward(self, layout: BatchLayout) -> Callable[[], Batch]:
        """Makes what the largest forward of a step takes, outside of steps, anew for each forward.

        All ranks take as many samples; the longest, where the data set has a ``longest(count)``. If others are shorter,
        the forward takes the mask of a padded row, which hides nothing here.
        """
        sizes = layout.largest_forward(min(layout.global_batch_size, self.order.num_samples))
        order = self.dataset.longest(len(self.dataset)) if hasattr(self.dataset, "longest") else range(sum(sizes))
        longest = iter(order)
        micro_batches = [
            self.collate_fn([self.dataset[SampleKey(index)] for index in islice(longest, size)]) for size in sizes
        ]
        mixed: list[dict[str, Any]] = [
            batch for batch, size in zip(micro_batches, sizes, strict=True) if size > 1 and "is_padded" in batch
        ]
        if mixed and len(self.dataset[order[0]]["input_ids"]) > len(self.dataset[order[-1]]["input_ids"]):
            for micro_batch in mixed:
                micro_batch["is_padded"] = True
        on_device = send_to_device(micro_batches, self.accelerator.device)
        return partial(layout.joined, on_device, self._rank, layout.num_processes)

    @property
    def _rank(self) -> int:
        """This one, in the layout."""
        return self.accelerator.process_index if self.layout.num_processes > 1 else 0

    def _make_loader(self) -> DataLoader[Any]:
        """Of this rank's micro-batches, step after step."""
        sampler = MicroBatchSampler(
            order=self.order,
            layout=self.layout,
            rank=self._rank,
            first_step=self.steps.start,
            last_step=self.steps.stop,
        )
        return make_loader(self.accelerator, self.dataset, sampler, self.collate_fn, self.num_workers)

    def _num_valid(self, mine: list[Batch], num_samples: int) -> Tensor | int:
        """Never waits for the device, which still computes the steps before: the host counts, and queues a fill."""
        if self.count_valid is None:
            return num_samples
        is_first_of_row = self._rank % self.layout.sequence_parallel == 0
        of_this_rank = sum(int(self.count_valid(micro_batch)) for micro_batch in mine) if is_first_of_row else 0
        if self.layout.num_processes == 1:
            return of_this_rank
        count = torch.full((), of_this_rank, device=self.accelerator.device)
        of_all_ranks: Tensor = self.accelerator.reduce(count, "sum")
        return of_all_ranks


@dataclass(kw_only=True)
class GlobalBatch:
    """The micro-batches that one rank computes in one optimizer step.

    Args:
        step, epoch: from 0.
        num_samples: of the whole step, over all ranks.
        num_valid: positions that count in its loss, over all ranks; on the device where these have added it up.
        weight: the sum of the weights of the samples of the whole step, where they have some.
        micro_batches: this rank's, on the host.
    """

    accelerator: Accelerator
    step: int
    epoch: int
    num_samples: int
    num_valid: Tensor | int
    weight: float | None = None
    micro_batches: list[Batch]
    seed: int
    loss: Tensor | float = 0.0
    """This rank's part of the mean loss of the global batch; the parts of all ranks add up to it."""
    _factors: tuple[Tensor, Tensor] | None = field(init=False, default=None)
    _loss_sum: Tensor | None = field(init=False, default=None)

    def forwards(self, model: nn.Module) -> Iterator[Batch]:
        """The micro-batches on the device, for one forward and backward each; the last backward synchronises.

        Their ``index`` stays on the host: no model takes it.
        """
        last = len(self.micro_batches) - 1
        for index, micro_batch in enumerate(self.micro_batches):
            self._seed_dropout(index)
            with nullcontext() if index == last else self.accelerator.no_sync(model):
                yield send_to_device(micro_batch, self.accelerator.device, non_blocking=True, skip_keys="index")
            self.end_micro_batch()

    def _seed_dropout(self, index: int) -> None:
        """Rule 6, for the host and this device; ``torch.manual_seed`` costs 0.1 ms for each kind that is not there."""
        seed = seed_for(self.seed, self.step, *self._position(index))
        torch.default_generator.manual_seed(seed)
        if self.accelerator.device.type != "cpu":
            torch.get_device_module(self.accelerator.device).manual_seed(seed)

    def _divisor_and_gradient(self, loss_sum: Tensor) -> tuple[Tensor, Tensor]:
        """What divides a summed loss, and the gradient that it has then by rule 4: computed once a step.

        A global batch without a valid position, or without weight, has no loss: 0 / 1, not 0 / 0.
        """
        if self._factors is None:
            count = self.num_valid if self.weight is None else self.weight
            above_0 = count.clamp(min=1) if isinstance(count, Tensor) else count or 1
            divisor = torch.as_tensor(above_0, dtype=loss_sum.dtype)
            gradient = torch.full_like(divisor, self._num_averaged) / divisor
            on_device = isinstance(count, Tensor)
            self._factors = (divisor, gradient) if on_device else (self._filled(divisor), self._filled(gradient))
        return self._factors

    def _filled(self, on_host: Tensor) -> Tensor:
        """A number of the host on the device, without a copy, which would wait for it."""
        return torch.full((), on_host.item(), dtype=on_host.dtype, device=self.accelerator.device)

    def _position(self, index: int) -> tuple[int | None, ...]:
        """Of a micro-batch in its step, for the seed of dropout."""
        return index, self.accelerator.process_index

    @property
    def loss_parts(self) -> list[Tensor]:
        """Equally many on all ranks; those of all of them add up to the mean loss of the global batch."""
        return [torch.as_tensor(self.loss)]

    def share_of(self, loss_sum: Tensor) -> Tensor:
        """Return the gradient of a micro-batch's summed loss: its part of the global mean (rules 3 and 4).

        ``accelerator.backward`` begins with it. Where the loss is not finite, neither is the gradient, so that every
        rank sees it in the norm. Of a weighted loss torch would make the same one with four more operators.
        """
        _, gradient = self._divisor_and_gradient(loss_sum)
        self._loss_sum = loss_sum.detach()
        return torch.add(gradient, self._loss_sum, alpha=0)

    def end_micro_batch(self) -> None:
        """Add the loss of a micro-batch, which has gone backward."""
        if self._loss_sum is None:
            return
        divisor, _ = self._divisor_and_gradient(self._loss_sum)
        loss, self._loss_sum = self._loss_sum / divisor, None
        self.loss = loss if isinstance(self.loss, float) else self.loss + loss

    @property
    def _num_averaged(self) -> int:
        """The number of ranks, by which DDP will divide."""
        count: int = self.accelerator.num_processes
        return count


@dataclass(kw_only=True)
class BitwiseGlobalBatch(GlobalBatch):
    """A global batch whose result has the same bits on any number of ranks: rules 8 to 11."""

    sums: StepSums

    def forwards(self, model: nn.Module) -> Iterator[Batch]:
        """As of ``GlobalBatch``, or once with all micro-batches joined."""
        self.sums.begin(model)
        if not self.sums.joins:
            yield from super().forwards(model)
            return
        self._seed_dropout(0)
        counted = self.micro_batches[: self.sums.num_counted]
        yield self.sums.joined(send_to_device(counted, self.accelerator.device, non_blocking=True))
        self.end_micro_batch()

    @property
    def loss_parts(self) -> list[Tensor]:
        """The parts of this rank's micro-batches."""
        return self.sums.losses

    def end_micro_batch(self) -> None:
        """As of ``GlobalBatch``; the last one leaves the sum over all ranks on the parameters."""
        loss_sum = self._loss_sum
        super().end_micro_batch()
        if loss_sum is None:
            return
        divisor, _ = self._divisor_and_gradient(loss_sum)
        losses = [loss / divisor for loss in inner_tensors([loss_sum])]
        if isinstance(loss_sum, WrapperTensor):
            self.loss = torch.stack(losses).sum()
        self.sums.take(losses)

    def _position(self, index: int) -> tuple[int | None, ...]:
        return self.sums.position(index)

    @property
    def _num_averaged(self) -> int:
        return 1


def exact_sum(values: Iterable[float]) -> float:
    """The sum, rounded once, so that no order changes it."""
    terms = list(values)
    return fsum(terms) if all(map(isfinite, terms)) else sum(terms)


def make_loader(
    accelerator: Accelerator,
    dataset: Any,
    sampler: MicroBatchSampler,
    collate_fn: Callable[[list[Any]], Batch],
    num_workers: int,
) -> DataLoader[Any]:
    """A torch loader; Accelerate's own would shard and pad the batches again.

    Data workers are forks on Linux, which is no longer Python's default from 3.14 on: they import nothing, the data are
    not copied to them, and the rank is their parent, with which they end.
    """
    end_workers_at_exit()
    forks = num_workers > 0 and sys.platform == "linux"
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate_fn,
        num_workers=num_workers,
        multiprocessing_context="fork" if forks else None,
        pin_memory=accelerator.device.type == "cuda",
        worker_init_fn=serve_parent_only,
    )
