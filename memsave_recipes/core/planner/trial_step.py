"""Steps on this device before training, on all ranks: measured, and run under the plan that has been chosen.

Notes: ``docs/design/planner.md``.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memsave_recipes.core.activations import apply_plan
from memsave_recipes.core.costs.block_costs import Measurement, Workload, measure_in_groups, num_runs
from memsave_recipes.core.costs.memory import empty_cache, is_out_of_memory
from memsave_recipes.core.costs.preserve_state import (
    freeing_gradients,
    preserve_state,
    without_layerdrop,
)
from memsave_recipes.core.costs.targets import Host
from memsave_recipes.core.costs.trace_events import DeviceInstruments, Meter
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.budget import Forecast
from memsave_recipes.core.plans import Plan
from memsave_recipes.core.plans.chain import StaticMemory
from memsave_recipes.core.text import Progress

T = TypeVar("T")
READINGS = 6
"""How often a trial step in shards is read on a CPU, where two in five of its readings are too high: rule 5."""

MAX_TRIALS = 4
"""Plans of a micro-batch that are run at most, each with more memory kept free than the one before, until one fits."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a training, of any launcher; by default a process alone. Call every method on all of them."""

    rank: int = 0
    number: int = 1

    @classmethod
    def of_world(cls) -> "Ranks":
        """Return the ranks of the default process group, if there is one."""
        grouped = dist.is_available() and dist.is_initialized()
        return cls(dist.get_rank(), dist.get_world_size()) if grouped else cls()

    @property
    def is_first(self) -> bool:
        """Whether this rank prints."""
        return self.rank == 0

    def of_first(self, action: Callable[[], T]) -> T:
        """Return the result of the first rank's ``action()`` on all ranks.

        Raises:
            InputError, RuntimeError: on all ranks, where the first one failed.
        """
        result: T | None = self.attempt(lambda: action() if self.is_first else None)
        found: T = self._of_all(result)[0]
        return found

    def largest(self, number: int) -> int:
        """Return the largest number of all ranks."""
        of_ranks: list[int] = self._of_all(number)
        return max(of_ranks)

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Return this rank's ``action()``; ``None`` on all ranks, where one of them ran out of memory.

        Raises:
            InputError, RuntimeError: on all ranks, where one failed otherwise; its own error on that one.
        """
        result, failed = None, False
        try:
            result = action()
        except Exception as error:
            if not is_out_of_memory(error):
                self._of_all((False, (isinstance(error, InputError), str(error) or type(error).__name__)))
                raise
            failed = True  # the error is not kept: its frames hold the tensors of the failed step
        of_ranks = self._of_all((failed, None))
        for is_mistake, message in (told for _, told in of_ranks if told):
            raise InputError(message) if is_mistake else RuntimeError(f"another rank failed: {message}")
        return None if any(failed for failed, _ in of_ranks) else result

    def _of_all(self, value: Any) -> list[Any]:
        found = [value] * self.number
        if self.number > 1:
            dist.all_gather_object(found, value)
        return found


ALONE = Ranks()


def measured_together(
    workload_of: Callable[[], Workload],
    plans_of: Callable[[Workload], Sequence[Plan]],
    ranks: Ranks,
    progress: Progress,
    *,
    device: torch.device,
    num_blocks: int,
    host: Host,
) -> Measurement | None:
    """Measure all blocks in one group, or in twice as many until no rank has too little memory.

    Called on all ranks; ``None`` where there is too little for the smallest groups as well.

    Args:
        workload_of: makes the workload, which may find no memory either.
        plans_of: the plans to measure.
        progress: of the forwards and backwards.
        num_blocks: groups at most.
        host: as of ``measure``.
    """

    def measure(num_groups: int) -> Measurement:
        workload = workload_of()
        plans = plans_of(workload)
        progress.total = (progress.total or 0) + num_groups * num_runs(plans)
        return measure_in_groups(workload, plans, num_groups, host=host, on_run=progress.update)

    num_groups = 1
    while (measured := ranks.attempt(partial(measure, num_groups))) is None:
        empty_cache(device)  # here, where no frame of the failed step holds its tensors any more
        if num_groups >= num_blocks:
            return None
        num_groups = min(2 * num_groups, num_blocks)
    return measured


def with_smaller_ratio(ratios: tuple[float, ...], plan: Plan) -> tuple[float, ...]:
    """Return the ratios to measure after ``plan`` has peaked above its budget: one more, where blocks save a part.

    It is half-way from the least ratio of the plan to the next smaller one, or to 0.
    """
    if not plan.ratios:
        return ratios
    least = plan.ratios[-1]
    below = max((other for other in ratios if other < least), default=0.0)
    return (*ratios, (below + least) / 2)


def step_bytes(
    forecast: Forecast,
    static: StaticMemory,
    model: nn.Module,
    forward: Callable[[], Tensor],
    device: torch.device,
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> int:
    """Run a step: return its peak bytes without overheads, on this process alone, or in shards on all.

    Runs two forwards and backwards for a reading; three or four under accumulation, where gradients are whole.

    Args:
        model: without a plan, its gradients cleared.
        forward: from one micro-batch to the loss; where weights are whole, without collectives.
        no_sync: the context of micro-batches before the last one of a step.
    """
    in_shards = forecast.in_shards is not None
    num_before = min(forecast.num_unreduced, 2) or int(static.gradients_resident)
    has_sums = in_shards and static.sums_bytes > 0
    with (
        apply_plan(model, forecast.plan),
        preserve_state(model, device),
        without_layerdrop(model),
        freeing_gradients([] if static.gradients_stay else model.parameters()),  # as training does
    ):
        ballast_bytes = 0 if device.type == "cpu" else static.state_bytes
        ballast = torch.empty(ballast_bytes, dtype=torch.uint8, device=device)

        def step(meter: Meter) -> None:
            for _ in range(num_before):
                with no_sync():
                    forward().backward()
            forward().backward()
            meter.mark()
            model.zero_grad()

        def rise_bytes() -> int:
            forward().backward()  # compiles what compiles
            if not has_sums:
                model.zero_grad()
            return max(reading.peak_bytes for reading in DeviceInstruments(device).read_memory(step))

        lowest_bytes = min(rise_bytes() for _ in range(READINGS if in_shards and device.type == "cpu" else 1))
        del ballast
    return lowest_bytes + forecast.chain.resident_bytes
