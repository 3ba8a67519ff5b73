"""Memory of the host and of any accelerator, as the system, torch's allocator and the driver report it.

A CPU has no allocator statistics, and the resident set size moves with caches and fragmentation (6 % between identical
runs). So its exact peaks are read from recorded steps, in ``trace_events.py`` and ``breakdown.py``.

``record_history`` and ``write_snapshot`` are for CUDA devices alone, where torch's allocator keeps a history.
"""

import errno
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from memsave_recipes.profiling.breakdown import persistent_tensors

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
    """Whether a device or the host had no memory left, by the type of the error or by its message."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


def rss_bytes() -> int:
    """The resident set size of this process."""
    return psutil.Process().memory_info().rss


def peak_rss_bytes() -> int:
    """The most that the resident set of this process has ever been."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024  # getrusage(2): KiB everywhere else


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Parameters, buffers, gradients and optimizer state, which outlive a step. Shared storages count once."""
    return sum(sum(label.storages.values()) for label in persistent_tensors(model, optimizer))


HISTORY_ENTRIES = 1_000_000  # allocations and releases that are remembered, several hundred bytes each


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes on one device.

    Args:
        peak_allocated_bytes: high-water mark of live tensors since the last reset.
        peak_reserved_bytes: high-water mark of the memory that the caching allocator took from the driver.
        device_used_bytes: in use now, by the driver: context, libraries and other processes included.
        num_alloc_retries: how often the allocator had to empty its cache and try again, since the process began.
        num_ooms: how often it failed even so.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int
    num_alloc_retries: int
    num_ooms: int


def read_device_memory(device: torch.device) -> DeviceMemory:
    """The figures of ``device`` now. Does not wait for its queue; the allocator works ahead of it."""
    statistics = torch.accelerator.memory_stats(device)
    free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
    return DeviceMemory(
        peak_allocated_bytes=statistics.get("allocated_bytes.all.peak", 0),
        peak_reserved_bytes=statistics.get("reserved_bytes.all.peak", 0),
        device_used_bytes=total_bytes - free_bytes,
        num_alloc_retries=statistics.get("num_alloc_retries", 0),
        num_ooms=statistics.get("num_ooms", 0),
    )


def reset_peaks(device: torch.device) -> None:
    """Begin a new window: the peaks fall to the present figures."""
    torch.accelerator.reset_peak_memory_stats(device)


def empty_cache(device: torch.device) -> None:
    """Give unused cached memory of ``device`` back to the driver; a CPU caches none."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def record_history() -> None:
    """From now on the CUDA allocator records allocations and releases, with the stack of each."""
    torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)


def write_snapshot(path: Path) -> None:
    """Write the blocks and the history of the CUDA allocator, for https://pytorch.org/memory_viz; stop recording."""
    path.parent.mkdir(parents=True, exist_ok=True)  # other machines have no run folder
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
