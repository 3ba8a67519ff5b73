"""A step of a run on its devices before training, on all ranks: measured, and run once under the chosen plan."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from memsave_recipes.core.activations import block_names, find_stacks
from memsave_recipes.core.activations.micro_batches import tensors_in
from memsave_recipes.core.activations.streaming import host_bytes
from memsave_recipes.core.costs.block_costs import Workload
from memsave_recipes.core.costs.memory import is_out_of_memory
from memsave_recipes.core.costs.preserve_state import running_blocks
from memsave_recipes.core.planner.budget import workspaces_of_device
from memsave_recipes.core.planner.search import Candidate, SearchSpace
from memsave_recipes.core.planner.trial_step import Ranks, measured_together, step_bytes
from memsave_recipes.core.progress import ProgressBar
from memsave_recipes.core.sharding.shards import reduce_once_a_step
from memsave_recipes.core.step.batch_layout import Batch, BatchLayout
from memsave_recipes.core.text import first_line, format_bytes
from memsave_recipes.training.arguments import BUDGET_FLAG
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.launch.distributed import on_main_process


@dataclass(frozen=True)
class StepOnDevice:
    """A step of a run; every method is called on all ranks, since a model may synchronize them (SyncBatchNorm).

    Args:
        model: the module with the blocks, inside ``prepared``.
        prepared: the module that ``accelerator.prepare`` returned.
        loss_of: a forward of ``prepared`` on a micro-batch, as in training.
    """

    accelerator: Accelerator
    model: nn.Module
    batches: GlobalBatches
    prepared: nn.Module
    loss_of: Callable[[Batch], Tensor]

    def forward(self, layout: BatchLayout) -> Callable[[], Tensor]:
        """Return the largest forward of a step."""
        return self._forward(self.batches.largest_forward(layout))

    def smallest_micro_batch(self, layout: BatchLayout) -> int:
        """Return the fewest samples that a forward of the run is given in another layout."""
        return self.batches.anew(layout).smallest_micro_batch

    def running_blocks(self) -> dict[str, bool] | None:
        """Return what the core's ``running_blocks`` does; ``None``, without a run, for a single stack of blocks."""
        stacks = block_names(find_stacks(self.model))
        if len(stacks) < 2:
            return None
        return running_blocks(self.model, stacks, self.forward(self.batches.layout), self.accelerator.device)

    def candidates(self, space: SearchSpace, layout: BatchLayout, progress: ProgressBar) -> list[Candidate]:
        """Measure the blocks; return the first rank's candidates on all ranks, none if a rank has too little memory."""
        ranks, device = Ranks.of_world(), self.accelerator.device
        stacks = block_names(find_stacks(self.model))
        gc.collect()  # else the batch of the size before may be freed while bytes are read
        measured = measured_together(
            partial(self._workload, layout, stacks, gradients_stay=space.static(layout).gradients_stay),
            space.plans_of,
            ranks,
            progress,
            device=device,
            num_blocks=sum(map(len, stacks)) if space.strategy != "none" else 1,
            host=space.host,
        )
        if measured is None:
            return []
        known_bytes = measured.workload.resident_bytes + space.static(layout).buckets_bytes
        workspaces = workspaces_of_device(device, known_bytes)
        overheads = {**space.overheads, **dict.fromkeys(workspaces, ranks.largest(sum(workspaces.values())))}
        return on_main_process(
            self.accelerator, lambda: replace(space, overheads=overheads).candidates(measured, layout)
        )

    def _workload(self, layout: BatchLayout, stacks: Sequence[Sequence[str]], *, gradients_stay: bool) -> Workload:
        make_batch = self.batches.largest_forward(layout)
        return Workload(
            model=self.model,
            forward=self._forward(make_batch),
            batch=tensors_in(make_batch()),
            device=self.accelerator.device,
            stacks=stacks,
            host_bytes=host_bytes(self.model),
            gradients_stay=gradients_stay,
        )

    def _forward(self, make_batch: Callable[[], Batch]) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            with self.accelerator.no_sync(self.prepared):
                return self.loss_of(make_batch())

        return forward


def run_trial_step(candidate: Candidate, step: StepOnDevice) -> int | None:
    """Return the highest ``step_bytes`` of all ranks; ``None`` if one ran out of memory.

    In shards gradients are reduced as the candidate does: rule 5 of NOTE [ trial step ].

    Raises:
        torch.OutOfMemoryError: where this rank ran out of memory, and others may wait for it.
    """
    ranks, accelerator = Ranks.of_world(), step.accelerator
    of_candidate = partial(step_bytes, candidate.forecast, candidate.static, step.model)
    run = partial(of_candidate, step.forward(candidate.layout), accelerator.device)
    in_shards = candidate.forecast.in_shards is not None
    if not in_shards and candidate.layout.sequence_parallel == 1:
        own_bytes = ranks.attempt(run)
        return None if own_bytes is None else ranks.largest(own_bytes)
    if in_shards:
        reduce_once_a_step(step.prepared, candidate.reduces_once)
    try:
        return ranks.largest(run(partial(accelerator.no_sync, step.prepared)))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(
            f"error: no memory left in the trial step, so the prediction of {format_bytes(candidate.peak_bytes)} was "
            f"wrong: give a smaller {BUDGET_FLAG} ({first_line(error)})"
        ) from error
