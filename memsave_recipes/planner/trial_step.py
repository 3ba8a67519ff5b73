"""One micro-batch on this device before training: the costs of its blocks, and the memory of a step under a plan.

NOTE [ trial step ]
1. It is a forward and backward of the largest micro-batch as in training, twice where gradients accumulate; in lockstep
   those of the largest share, on every rank. Gradients, random state and running statistics are restored.
2. On an accelerator, memory of the size of the optimizer's state is allocated meanwhile, so a device that is too small
   fails now. On a CPU the allocations of the trial step are added to the static memory.
3. It runs no collective, so a rank without memory leaves no other rank waiting; afterwards all ranks learn of it.
   BatchNorm over all ranks is the exception: with it the others wait for the timeout of the process group.
4. The part of its activations that a compiled layer may save bounds neither the memory of its kernels nor that of a
   step, which may rise where the ratio falls (https://github.com/pytorch/pytorch/issues/197838). So plans are chosen by
   the measured bytes of each ratio. Where the trial step of a plan that compiles peaks above the budget nevertheless,
   the bytes that were missed are kept free, the ratio half-way to the next smaller one is measured, too, and the plan
   is chosen again among all of them: ``MAX_TRIALS`` plans in all.
5. Where weights are in shards, it gathers them and reduces gradients, as in training: rule 3 does not hold, and a rank
   without memory ends the run, as one does in a step. Gradients of the first of two micro-batches are then among the
   static memory, or, where they are reduced once a step, in the step, which then has up to three. On a CPU a buffer
   that a thread of gloo lets go last leaves no event, so a reading may be too high, by chance: the lowest of
   ``READINGS`` counts.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from memsave_recipes.activations import apply_plan, block_names, find_stacks
from memsave_recipes.activations.lockstep import parts_of
from memsave_recipes.distributed import fail_together, on_main_process
from memsave_recipes.planner.budget import Forecast, StaticMemory, plans_to_measure, workspaces_of_device
from memsave_recipes.planner.search import Candidate, SearchSpace
from memsave_recipes.plans import Plan
from memsave_recipes.profiling.block_costs import Measurement, Workload, measure_in_groups, num_runs
from memsave_recipes.profiling.memory import empty_cache, is_out_of_memory
from memsave_recipes.profiling.preserve_state import clear_gradients, preserve_state, running_blocks, without_layerdrop
from memsave_recipes.profiling.trace_events import DeviceInstruments, Meter
from memsave_recipes.sharding.shards import reduce_once_a_step
from memsave_recipes.text import ProgressBar, first_line, format_bytes
from memsave_recipes.training.batch_layout import BatchLayout
from memsave_recipes.training.batching import Batch, GlobalBatches

READINGS = 3
"""Of a trial step in shards, on a CPU: rule 5."""

MAX_TRIALS = 4
"""Plans of a micro-batch that are run at most, each with more memory kept free than the one before, until one fits."""


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
        """The largest forward of a step."""
        return self._forward(self.batches.largest_forward(layout))

    def running_blocks(self) -> list[str] | None:
        """The blocks that a forward runs, in order; ``None``, without a run, for a single stack of blocks."""
        stacks = block_names(find_stacks(self.model))
        if len(stacks) < 2:
            return None
        return running_blocks(self.model, stacks, self.forward(self.batches.layout), self.accelerator.device)

    def candidates(self, space: SearchSpace, layout: BatchLayout, progress: ProgressBar) -> list[Candidate]:
        """The first rank's candidates, on all ranks; none if a rank has too little memory to measure.

        All blocks are measured at once, or group by group where memory is too small for that and plans may recompute.
        """
        num_blocks = sum(map(len, block_names(find_stacks(self.model))))
        for num_groups in group_counts(num_blocks if space.strategy != "none" else 1):
            found = self._measured(space, layout, num_groups, progress)
            if found is not None:
                return found
            empty_cache(self.accelerator.device)  # here, where no frame of the failed step holds its tensors any more
        return []

    def _measured(
        self, space: SearchSpace, layout: BatchLayout, num_groups: int, progress: ProgressBar
    ) -> list[Candidate] | None:
        """The candidates of a measurement, or ``None`` where a rank ran out of memory."""
        try:
            with out_of_memory_together(self.accelerator) as largest:
                measured = self._measure(space, layout, num_groups, progress)
                known_bytes = measured.workload.resident_bytes + space.static(layout).buckets_bytes
                workspaces = workspaces_of_device(self.accelerator.device, known_bytes)
                largest.bytes = sum(workspaces.values())
        except torch.OutOfMemoryError:
            return None
        overheads = {**space.overheads, **dict.fromkeys(workspaces, largest.bytes)}
        return on_main_process(
            self.accelerator, lambda: replace(space, overheads=overheads).candidates(measured, layout)
        )

    def _measure(self, space: SearchSpace, layout: BatchLayout, num_groups: int, progress: ProgressBar) -> Measurement:
        make_batch = self.batches.largest_forward(layout)
        workload = Workload(
            model=self.model,
            forward=self._forward(make_batch),
            batch=parts_of([value for value in make_batch().values() if isinstance(value, Tensor)]),
            device=self.accelerator.device,
            stacks=block_names(find_stacks(self.model)),
        )
        plans = plans_to_measure(
            space.strategy,
            workload,
            device_type=workload.device.type,
            ratios=space.compiled_ratios,
            micro_batch_size=space.micro_batch_size,
        )
        progress.total = (progress.total or 0) + num_groups * num_runs(plans)
        host_budget_bytes = space.host_budget_bytes
        return measure_in_groups(
            workload, plans, num_groups, host_budget_bytes=host_budget_bytes, on_run=progress.update
        )

    def _forward(self, make_batch: Callable[[], Batch]) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            with self.accelerator.no_sync(self.prepared):
                return self.loss_of(make_batch())

        return forward


def group_counts(num_blocks: int) -> Iterator[int]:
    """The numbers of groups to measure blocks in, one after the other until memory suffices: 1 and its doublings."""
    num_groups = 1
    while num_groups < num_blocks:
        yield num_groups
        num_groups *= 2
    yield max(1, num_blocks)


def with_smaller_ratio(ratios: tuple[float, ...], plan: Plan) -> tuple[float, ...]:
    """The ratios to measure after ``plan`` has peaked above its budget: one more, where it compiles.

    It is half-way from the ratio of the plan to the next smaller one, or to 0.
    """
    ratio = plan.compiled_memory_ratio
    if ratio is None:
        return ratios
    below = max((other for other in ratios if other < ratio), default=0.0)
    return (*ratios, (below + ratio) / 2)


def run_trial_step(
    candidate: Candidate, accelerator: Accelerator, model: nn.Module, forward: Callable[[], Tensor]
) -> int:
    """The peak bytes of a step without overheads, on the rank where it is highest. NOTE [ trial step ].

    Args:
        model: without a plan, its gradients cleared.
        forward: from one micro-batch to the loss, without collectives.

    Raises:
        torch.OutOfMemoryError: on all ranks, if a rank ran out of memory.
    """
    with out_of_memory_together(accelerator) as largest:
        largest.bytes = step_bytes(candidate.forecast, candidate.static, model, forward, accelerator.device)
    return largest.bytes


def run_trial_step_in_shards(candidate: Candidate, step: StepOnDevice) -> int:
    """As ``run_trial_step``, by rule 5 of NOTE [ trial step ]; gradients are then reduced as the candidate does.

    Raises:
        torch.OutOfMemoryError: this rank ran out of memory.
    """
    accelerator, prepared = step.accelerator, step.prepared
    forward, no_sync = step.forward(candidate.layout), partial(accelerator.no_sync, prepared)
    reduce_once_a_step(prepared, candidate.reduces_once)
    try:
        own_bytes = step_bytes(candidate.forecast, candidate.static, step.model, forward, accelerator.device, no_sync)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(
            f"error: no memory left in the trial step, so the prediction of {format_bytes(candidate.peak_bytes)} was "
            f"wrong: give a smaller --memory_budget_gib ({first_line(error)})"
        ) from error
    of_ranks = accelerator.gather(torch.tensor([own_bytes], dtype=torch.int64, device=accelerator.device))
    return int(of_ranks.max())


def step_bytes(
    forecast: Forecast,
    static: StaticMemory,
    model: nn.Module,
    forward: Callable[[], Tensor],
    device: torch.device,
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> int:
    """As ``run_trial_step``, on this process alone, or in shards on all of them.

    Runs two forwards and backwards for a reading; three or four under accumulation, where gradients are whole.

    Args:
        no_sync: the context of micro-batches before the last one of a step.
    """
    in_shards = forecast.in_shards is not None
    num_before = min(forecast.num_unreduced, 2) or int(static.gradients_resident)
    has_sums = in_shards and static.sums_bytes > 0
    with (
        apply_plan(model, forecast.plan),
        preserve_state(model, device),
        without_layerdrop(model),
        _gradients_as_in_a_step(static, model),
    ):
        ballast_bytes = 0 if device.type == "cpu" else static.state_bytes
        ballast = torch.empty(ballast_bytes, dtype=torch.uint8, device=device)

        def step(meter: Meter) -> None:
            for _ in range(num_before):
                with no_sync():
                    forward().backward()
            forward().backward()
            meter.mark()
            clear_gradients(model)

        def rise_bytes() -> int:
            forward().backward()  # compiles what compiles
            if not has_sums:
                clear_gradients(model)
            return max(reading.peak_bytes for reading in DeviceInstruments(device).read_memory(step))

        lowest_bytes = min(rise_bytes() for _ in range(READINGS if in_shards and device.type == "cpu" else 1))
        del ballast
    return lowest_bytes + forecast.chain.resident_bytes


class LargestOfRanks:
    """A number of bytes that each rank measures; 0 on a rank that ran out of memory."""

    bytes = 0


@contextmanager
def out_of_memory_together(accelerator: Accelerator) -> Iterator[LargestOfRanks]:
    """Inside, no rank may run a collective; afterwards ``bytes`` is the largest of all ranks.

    Raises:
        torch.OutOfMemoryError: on all ranks, if a rank ran out of memory.
        InputError, RuntimeError: on all ranks, where one failed in another way; its own error on that one.
    """
    largest, failed, other = LargestOfRanks(), False, None
    try:
        yield largest
    except Exception as error:
        failed, other = (True, None) if is_out_of_memory(error) else (False, error)
    fail_together(other)
    found = torch.tensor([largest.bytes, failed], dtype=torch.int64, device=accelerator.device)
    of_ranks = accelerator.gather(found).view(-1, 2)
    if of_ranks[:, 1].any():
        raise torch.OutOfMemoryError("a rank had no memory left")
    largest.bytes = int(of_ranks[:, 0].max())


@contextmanager
def _gradients_as_in_a_step(static: StaticMemory, model: nn.Module) -> Iterator[None]:
    """Frees each gradient as it is made where training does (for DDP's buckets, or an optimizer in the backward)."""

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    freed = [] if static.gradients_stay else [p for p in model.parameters() if p.requires_grad]
    on_gradient: list[Callable[..., RemovableHandle]] = [p.register_post_accumulate_grad_hook for p in freed]
    handles = [register(free) for register in on_gradient]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
