"""Workloads on a CPU, and the bytes at the peak of a step there."""

import torch
import torch.nn.functional as F

from memsave_recipes.core.activations import apply_plan, block_names, find_stacks
from memsave_recipes.core.costs.block_costs import Workload
from memsave_recipes.core.costs.estimate import Estimator
from memsave_recipes.core.costs.trace_events import DeviceInstruments
from memsave_recipes.core.plans.chain import CPU


def workload_of(model, loss_of, batch, stacks=None, device=CPU):
    """``loss_of(model, batch)`` on a tensor, or on a dictionary of which some entries are tensors."""
    entries = batch.values() if isinstance(batch, dict) else [batch]
    return Workload(
        model=model,
        forward=lambda: loss_of(model, batch),
        batch=[entry for entry in entries if isinstance(entry, torch.Tensor)],
        device=device,
        stacks=stacks or block_names(find_stacks(model)),
    )


def full_cross_entropy(hidden, weight, labels, *, bias=None, softcap=None, logit_scale=1.0):
    """Compute ``linear_cross_entropy`` on all logits at once."""
    logits = F.linear(hidden, weight, bias)  # (N, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels, reduction="sum")


def estimate_on_target(workload, plans, target, *, autocast_dtype=None):
    """The costs of a single micro-batch on a device that need not be here."""
    return Estimator(workload.model, target, autocast_dtype).estimate(workload, plans)


def peak_bytes(step):
    """The most that the allocations of ``step()`` hold at one time, beyond what was there before."""

    def marked(meter):
        step()
        meter.mark()

    return DeviceInstruments(CPU).read_memory(marked)[-1].peak_bytes


def measured_peak_bytes(workload, plan):
    """The most that a step under ``plan`` adds to what is there all the time."""
    with apply_plan(workload.model, plan):
        for _ in range(2):  # the first one warms up
            workload.model.zero_grad(set_to_none=True)
            measured = peak_bytes(lambda: workload.forward().backward())
    workload.model.zero_grad(set_to_none=True)
    return measured
