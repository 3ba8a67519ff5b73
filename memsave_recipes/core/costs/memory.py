"""Memory of the host and of any accelerator as they report it, and the bytes that a forward saves for backward.

A CPU has no allocator statistics, and the resident set size moves with caches and fragmentation (6 % between identical
runs). So its exact peaks are read from recorded steps, in ``trace_events.py`` and ``breakdown.py``.
"""

import errno
import gc
import os
import resource
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memsave_recipes.core.activations.blocks import Block, Layer
from memsave_recipes.core.activations.micro_batches import tensors_in
from memsave_recipes.core.activations.recompute import kept_by_policy
from memsave_recipes.core.costs.breakdown import persistent_tensors
from memsave_recipes.core.sharding.shards import noting_gathered
from memsave_recipes.core.sharding.tensors import locals_of

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


def rss_bytes() -> int:
    """Return the resident set size of this process."""
    return psutil.Process().memory_info().rss


def peak_rss_bytes() -> int:
    """Return the most that the resident set of this process has ever been."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024  # getrusage(2): KiB everywhere else


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Add up parameters, buffers, gradients and optimizer state. Shared storages count once."""
    return sum(sum(label.storages.values()) for label in persistent_tensors(model, optimizer))


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes on one device: peaks of the allocator since the last reset, and what the driver has in use now.

    Args:
        num_alloc_retries: how often the allocator had to empty its cache and try again, since the process began.
        num_ooms: how often it failed even so.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int
    num_alloc_retries: int
    num_ooms: int


def read_device_memory(device: torch.device) -> DeviceMemory:
    """Read the figures of ``device`` now, without waiting for its queue; the allocator works ahead of it."""
    statistics = torch.accelerator.memory_stats(device)
    free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
    return DeviceMemory(
        peak_allocated_bytes=statistics.get("allocated_bytes.all.peak", 0),
        peak_reserved_bytes=statistics.get("reserved_bytes.all.peak", 0),
        device_used_bytes=total_bytes - free_bytes,
        num_alloc_retries=statistics.get("num_alloc_retries", 0),
        num_ooms=statistics.get("num_ooms", 0),
    )


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


def write_snapshot(path: Path) -> None:
    """Write the blocks of the CUDA allocator, for https://pytorch.org/memory_viz."""
    path.parent.mkdir(parents=True, exist_ok=True)  # other machines have no run folder
    torch.cuda.memory._dump_snapshot(str(path))


class SavedTensors:
    """``with SavedTensors(model) as saved: loss = ...`` and then ``saved.num_bytes``.

    Every storage that autograd saves counts once, those of parameters not at all; inside a span that recomputes none
    but its inputs, and what a selective policy keeps. ``storages`` holds the bytes of each by its identity. Leave the
    context before ``backward()``: the identity of a storage may be another one's once the backward has freed it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = {parameter.untyped_storage()._cdata for parameter in locals_of(model.parameters())}
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


class ForwardMeter:
    """Counts the bytes that the first forward of ``model`` inside its context saves, and in which blocks.

    Args:
        blocks: in the order of the forward, as ``PlanHandle`` has them. They must keep everything: tensors inside a
            recomputed block are not seen.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block | Layer] = ()) -> None:
        self._model = model
        self._blocks = blocks
        self._saved = SavedTensors(model)
        self._inputs: dict[int, int] = {}  # of the blocks: identity -> bytes
        self._in_blocks: list[dict[int, int]] = []  # storages that each block was the first to save
        self._before_block: set[int] = set()
        self._handles: list[Any] = []
        self._counting = self._has_begun = self._has_ended = False

    @property
    def num_bytes(self) -> int:
        """Bytes saved so far."""
        return self._saved.num_bytes

    @property
    def freed_by_recomputation_bytes(self) -> int | None:
        """How much less would be held with every block recomputed by itself; ``None`` while that is not known.

        Then the inputs of all blocks are kept instead, and one block at a time is rebuilt. Of a forward that did not
        end, only the blocks that had passed are in the figure.
        """
        if not self._in_blocks:
            return None
        in_blocks = {storage for saved in self._in_blocks for storage in saved}
        kept = {storage: size for storage, size in self._saved.storages.items() if storage not in in_blocks}
        kept |= self._inputs
        again = max(sum(size for storage, size in saved.items() if storage not in kept) for saved in self._in_blocks)
        freed = max(0, self.num_bytes - sum(kept.values()) - again)
        return freed if freed or self._has_ended else None

    def __enter__(self) -> "ForwardMeter":
        self._handles = [
            self._model.register_forward_pre_hook(self._begin, prepend=True),
            self._model.register_forward_hook(lambda *_: setattr(self, "_has_ended", True)),
            self._model.register_forward_hook(self._stop, always_call=True),
        ]
        for block in self._blocks:
            self._handles.append(block.modules[0].register_forward_pre_hook(self._enter_block))
            self._handles.append(block.modules[-1].register_forward_hook(self._leave_block))
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, *_: Any) -> None:
        if not self._has_begun:
            self._saved.__enter__()
            self._counting = self._has_begun = True

    def _stop(self, *_: Any) -> None:
        if self._counting:
            self._saved.__exit__(None, None, None)
            self._counting = False

    def _enter_block(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not self._counting:
            return
        self._before_block = set(self._saved.storages)
        for tensor in tensors_in(inputs):
            storage = tensor.untyped_storage()
            self._inputs[storage._cdata] = storage.nbytes()

    def _leave_block(self, *_: Any) -> None:
        if self._counting:
            saved = self._saved.storages
            self._in_blocks.append({storage: saved[storage] for storage in saved.keys() - self._before_block})
