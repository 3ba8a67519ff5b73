"""What lives on the device beside a forward and backward: optimizer state, DDP's buckets, what torch cannot count."""

import os
from dataclasses import dataclass, replace

import psutil
import torch
from torch import nn

from memsave_recipes.costs.targets import Target
from memsave_recipes.plans.chain import Chain
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.optimizers import state_bytes
from memsave_recipes.training.sample_order import Geometry

WORKSPACES = "workspaces"
"""Of the overheads the one that torch counts as allocated."""

MULTIPLYING_THREADS = 2
"""The forward's and that of autograd's backward: each has a cuBLAS handle, and torch a workspace for each handle and
stream (its notes on CUDA). An assumption: it has not been measured on a device yet."""

FRAGMENTATION = 0.05
"""Of a device's memory, what is left to its allocator: predictions are of allocated bytes, while a device is full of
reserved ones, which lie in blocks that no request fits. An assumption, of the order that full devices show."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What lives on the device beside the parameters, the buffers, the batch and what a forward and backward make.

    Args:
        state_bytes: what the optimizer keeps.
        buckets_bytes: those of DDP.
        gradients_resident: whether an earlier micro-batch's gradients are there already.
        gradients_stay: whether the gradient of a parameter outlives the backward of its block. One that goes into a
            bucket of DDP or is used up at once does not.
        optimizer_bytes: what the optimizer's update needs for itself.
    """

    state_bytes: int = 0
    buckets_bytes: int = 0
    gradients_resident: bool = False
    gradients_stay: bool = True
    optimizer_bytes: int = 0

    def added_to(self, chain: Chain) -> Chain:
        """``chain`` with all this in it."""
        blocks = chain.blocks if self.gradients_stay else [replace(block, gradient_bytes=0) for block in chain.blocks]
        return replace(
            chain,
            blocks=tuple(blocks),
            resident_bytes=chain.resident_bytes + self.state_bytes + self.buckets_bytes,
            gradients_resident=self.gradients_resident or not self.gradients_stay,
            optimizer_bytes=self.optimizer_bytes,
        )


def beside_the_step(optim: OptimizerArguments, model: nn.Module, geometry: Geometry) -> Beside:
    """What a run holds besides its forward and backward.

    Under DDP the gradients live in its buckets from the start; under accumulation the micro-batches' own do as well.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state = state_bytes(optim.optimizer, trained, momentum=optim.momentum)
    buckets = sum(parameter.nbytes for parameter in trained) if geometry.num_processes > 1 else 0
    accumulates = geometry.accumulation_steps > 1
    return Beside(
        state_bytes=state,
        buckets_bytes=buckets,
        gradients_resident=accumulates,
        gradients_stay=not optim.optimizer_in_backward and not (buckets and not accumulates),
    )


def usable_bytes(memory_bytes: int, device_type: str) -> int:
    """Of a device's whole memory, what a run without a budget may take; ``FRAGMENTATION`` is left."""
    return memory_bytes if device_type == "cpu" else int((1 - FRAGMENTATION) * memory_bytes)


def usable_host_bytes(device: torch.device) -> int | None:
    """Of this machine's memory, what is available to each of its ranks; ``None`` on a CPU, where nothing is offloaded.

    Known limit: a container's own limit is not in it.
    """
    if device.type == "cpu":
        return None
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def overheads_of_target(target: Target) -> dict[str, int]:
    """Bytes that a device of this kind takes besides the tensors, by what they are for."""
    workspaces_bytes = MULTIPLYING_THREADS * target.cublas_workspace_bytes
    lines = {"CUDA context": target.context_bytes, WORKSPACES: workspaces_bytes}
    return {name: num_bytes for name, num_bytes in lines.items() if num_bytes}


def overheads_of_device(device: torch.device) -> dict[str, int]:
    """What an accelerator that is here holds besides what torch holds of it; nothing on a CPU."""
    if device.type == "cpu":
        return {}
    free, total = torch.get_device_module(device).mem_get_info(device)
    return {"device context": max(0, total - free - torch.accelerator.memory_reserved(device))}


def workspaces_of_device(device: torch.device, known_bytes: int) -> dict[str, int]:
    """What torch holds on an accelerator besides ``known_bytes`` of tensors once steps have run; nothing on a CPU."""
    if device.type == "cpu":
        return {}
    return {WORKSPACES: max(0, torch.accelerator.memory_allocated(device) - known_bytes)}
