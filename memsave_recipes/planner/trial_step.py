"""One micro-batch on this device before training: the memory of a step under a plan.

NOTE [ trial step ]
1. It is a forward and backward of the largest micro-batch as in training, twice where gradients accumulate, or of all
   micro-batches that one forward takes, on every rank. Gradients, random state and running statistics are restored.
2. On an accelerator, memory of the size of the optimizer's state is allocated meanwhile, so a device that is too small
   fails now. On a CPU the allocations of the trial step are added to the static memory.
3. It runs no collective, so a rank without memory leaves no other rank waiting; afterwards all ranks learn of it.
   BatchNorm over all ranks is the exception: with it the others wait for the timeout of the process group.
4. A ratio of compiled memory does not bound the memory of a step (https://github.com/pytorch/pytorch/issues/197838).
   Where the trial step of a plan that compiles peaks above the budget, the bytes that were missed are kept free, the
   ratio half-way to the next smaller one is measured, too, and the plan is chosen again among all of them.
5. In shards it gathers weights and reduces gradients, as in training: rule 3 does not hold, and a rank without memory
   ends the run. Gradients of the first of two micro-batches are then among the static memory, or, where they are
   reduced once a step, in the step, which then has up to three. On a CPU a buffer that a thread of gloo lets go last
   leaves no event, so a reading may be too high, by chance: the lowest of ``READINGS`` counts.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from memsave_recipes.activations import apply_plan
from memsave_recipes.planner.budget import Forecast, StaticMemory
from memsave_recipes.plans import Plan
from memsave_recipes.profiling.preserve_state import clear_gradients, preserve_state, without_layerdrop
from memsave_recipes.profiling.trace_events import DeviceInstruments, Meter

READINGS = 3
"""How often a trial step in shards is read on a CPU: rule 5."""

MAX_TRIALS = 4
"""Plans of a micro-batch that are run at most, each with more memory kept free than the one before, until one fits."""


def with_smaller_ratio(ratios: tuple[float, ...], plan: Plan) -> tuple[float, ...]:
    """Return the ratios to measure after ``plan`` has peaked above its budget: one more, where it compiles.

    It is half-way from the ratio of the plan to the next smaller one, or to 0.
    """
    ratio = plan.compiled_memory_ratio
    if ratio is None:
        return ratios
    below = max((other for other in ratios if other < ratio), default=0.0)
    return (*ratios, (below + ratio) / 2)


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


@contextmanager
def _gradients_as_in_a_step(static: StaticMemory, model: nn.Module) -> Iterator[None]:
    """Free each gradient as it is made where training does (for DDP's buckets, or an optimizer in the backward)."""

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
