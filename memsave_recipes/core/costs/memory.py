"""Memory of the host and of any accelerator as they report it, and the bytes that a forward saves for backward.

A CPU has no allocator statistics, and the resident set size moves with caches and fragmentation (6 % between identical
runs). So its exact peaks are read from recorded steps, in ``trace_events.py`` and ``breakdown.py``.
"""

import errno
import gc
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memsave_recipes.core.activations.recompute import kept_by_policy
from memsave_recipes.core.costs.breakdown import persistent_tensors
from memsave_recipes.core.sharding.shards import noting_gathered
from memsave_recipes.core.sharding.tensors import local

MESSAGES = (
    "out of memory",  # torch's allocators, the driver (pinned memory too), Triton, NCCL
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
    "CUDNN_STATUS_ALLOC_FAILED",
    "HOST_ALLOCATION_FAILED",  # of cuDNN 9
    "DEVICE_ALLOCATION_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "ROCBLAS_STATUS_MEMORY_ERROR",
    "DefaultCPUAllocator: can't allocate memory",
    "Cannot allocate memory",  # the C library's, of a mapped file or of memory shared with a data worker
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the host had no memory left, by the type of the error or by its message."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Add up parameters, buffers, gradients and optimizer state. Shared storages count once."""
    return sum(sum(label.storages.values()) for label in persistent_tensors(model, optimizer))


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """Bytes of one device now, and who holds them; of a CPU all of it alone.

    Args:
        outside_torch_bytes: held by this process besides torch's allocator.
        others_bytes: held by other processes.
    """

    total_bytes: int
    outside_torch_bytes: int = 0
    others_bytes: int = 0


def read_device_use(device: torch.device) -> DeviceUse:
    """Read who holds the memory of ``device``.

    NVML tells the processes apart (https://docs.nvidia.com/deploy/nvml-api). Where it cannot, as in a container with
    process numbers of its own, all is this process's.
    """
    if device.type == "cpu":
        return DeviceUse(total_bytes=psutil.virtual_memory().total)
    free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
    used_bytes = total_bytes - free_bytes
    own_bytes = min(_used_by_this_process(device) or used_bytes, used_bytes)
    return DeviceUse(
        total_bytes=total_bytes,
        outside_torch_bytes=max(0, own_bytes - torch.accelerator.memory_reserved(device)),
        others_bytes=used_bytes - own_bytes,
    )


def _used_by_this_process(device: torch.device) -> int | None:
    try:
        import pynvml  # of nvidia-ml-py, which the core can do without
    except ModuleNotFoundError:
        return None
    with suppress(AssertionError, AttributeError, pynvml.NVMLError):  # another kind of device has no such name
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid():
                used_bytes: int | None = process.usedGpuMemory
                return used_bytes
    return None


def empty_cache(device: torch.device) -> None:
    """Free what reference cycles hold, and give unused memory of ``device`` back to the driver; a CPU caches none."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


class SavedTensors:
    """``with SavedTensors(model) as saved: loss = ...`` and then ``saved.num_bytes``.

    Every storage that autograd saves counts once, those of parameters not at all; inside a span that recomputes none
    but its inputs, and what a selective policy keeps. ``storages`` holds the bytes of each by its identity. Leave the
    context before ``backward()``: the identity of a storage may be another one's once the backward has freed it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = {parameter.untyped_storage()._cdata for parameter in map(local, model.parameters())}
        self.storages: dict[int, int] = {}  # identity -> bytes
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages saved so far."""
        return sum(self.storages.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._parameters:
            self.storages[storage._cdata] = storage.nbytes()
        # Detached: a saved output that came back as itself would keep its own graph alive if no backward follows.
        return tensor.detach()

    def _leave_out(self, weights: Iterable[Tensor]) -> None:
        """Leave out parameters in shards, which are gathered again for the backward."""
        gathered = {weight.untyped_storage()._cdata for weight in weights}
        self._parameters |= gathered
        self.storages = {storage: size for storage, size in self.storages.items() if storage not in gathered}

    def __enter__(self) -> "SavedTensors":
        self._gathering = noting_gathered(self._model, self._leave_out)
        self._gathering.__enter__()
        self._hooks.__enter__()
        self._selective = kept_by_policy()
        self._kept = self._selective.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._selective.__exit__(*exception)
        self._hooks.__exit__(*exception)
        self.storages |= self._kept
        self._gathering.__exit__(*exception)
