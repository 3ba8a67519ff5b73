"""One micro-batch under a plan before training: does it need what was predicted?

NOTE [ rehearsal ]
1. It is a forward and backward of the largest micro-batch as the training will run it, twice where gradients
   accumulate, with nothing left behind: no gradient, no random number, no running statistic.
2. On an accelerator the bytes that the optimizer's state will take are held meanwhile, so a device that is too small
   says so now. On a CPU the allocations of the rehearsal are added to what stays.
3. No collective runs inside, so a rank without memory leaves no other one waiting; afterwards all ranks hear of it.
   SyncBatchNorm is the exception: with it the other ranks wait for the timeout of the process group.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from memsave_recipes.activations import apply_plan
from memsave_recipes.agreement import fail_together
from memsave_recipes.costs import DeviceInstruments
from memsave_recipes.costs.meters import Meter
from memsave_recipes.costs.undisturbed import clear_gradients, undisturbed
from memsave_recipes.measure.no_memory import is_out_of_memory
from memsave_recipes.planner.search import Candidate


def rehearse(candidate: Candidate, accelerator: Accelerator, model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """The bytes that a step takes at its peak on the rank where it takes most; overheads are not among them.

    Args:
        model: without a plan, its gradients cleared.
        forward: of one micro-batch, to the loss, without collectives.

    Raises:
        torch.OutOfMemoryError: on all ranks, if a rank had no memory left.
    """
    device = accelerator.device
    with (
        out_of_memory_together(accelerator) as attempt,
        apply_plan(model, candidate.forecast.plan),
        undisturbed(model, device),
        _gradients_as_in_a_step(candidate, model),
    ):
        ballast_bytes = 0 if device.type == "cpu" else candidate.beside.state_bytes
        ballast = torch.empty(ballast_bytes, dtype=torch.uint8, device=device)

        def step(meter: Meter) -> None:
            for _ in range(1 + candidate.beside.gradients_resident):
                forward().backward()
            meter.note()
            clear_gradients(model)

        forward().backward()  # compiles what compiles
        clear_gradients(model)
        rise_bytes = max(reading.peak_bytes for reading in DeviceInstruments(device).read_memory(step))
        attempt.bytes = rise_bytes + candidate.forecast.chain.resident_bytes
        del ballast
    return attempt.bytes


class Attempt:
    """What a rank found out; 0 bytes where it had no memory left."""

    bytes = 0


@contextmanager
def out_of_memory_together(accelerator: Accelerator) -> Iterator[Attempt]:
    """Inside, no rank may run a collective; afterwards ``bytes`` is the largest of all ranks.

    Raises:
        torch.OutOfMemoryError: on all ranks, if a rank had no memory left.
        InputError, RuntimeError: on all ranks, where one failed in another way; its own error on that one.
    """
    attempt, failed, other = Attempt(), False, None
    try:
        yield attempt
    except Exception as error:
        failed, other = (True, None) if is_out_of_memory(error) else (False, error)
    fail_together(other)
    if failed and accelerator.device.type != "cpu":
        torch.accelerator.empty_cache()
    found = torch.tensor([attempt.bytes, failed], dtype=torch.int64, device=accelerator.device)
    of_ranks = accelerator.gather(found).view(-1, 2)
    if of_ranks[:, 1].any():
        raise torch.OutOfMemoryError("a rank had no memory left")
    attempt.bytes = int(of_ranks[:, 0].max())


@contextmanager
def _gradients_as_in_a_step(candidate: Candidate, model: nn.Module) -> Iterator[None]:
    """Where a step frees each gradient as it is made (DDP's buckets take it, or the optimizer), so does this."""

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    trained = [] if candidate.beside.gradients_stay else [p for p in model.parameters() if p.requires_grad]
    handles = [parameter.register_post_accumulate_grad_hook(free) for parameter in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
