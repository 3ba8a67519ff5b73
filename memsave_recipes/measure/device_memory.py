"""Device memory as the allocator and the driver report it, for any accelerator that ``torch.accelerator`` knows.

``record_history`` and ``write_snapshot`` are for CUDA devices alone, where torch's allocator keeps a diary.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

HISTORY_ENTRIES = 1_000_000  # allocations and releases that are remembered, several hundred bytes each


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes on one device.

    Args:
        peak_allocated_bytes: high-water mark of live tensors since the last reset.
        peak_reserved_bytes: high-water mark of what the caching allocator took from the driver.
        device_used_bytes: what the driver says the device holds now: context, libraries and other processes included.
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
    """Begin a new window: the peaks fall to what is held now."""
    torch.accelerator.reset_peak_memory_stats(device)


def empty_cache(device: torch.device) -> None:
    """Give the driver back what the allocator of ``device`` holds without need; that of a CPU holds nothing."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def record_history() -> None:
    """From now on the CUDA allocator notes what it gives and takes back, and for which line of the program."""
    torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)


def write_snapshot(path: Path) -> None:
    """Write what the CUDA allocator holds and what it has noted, for https://pytorch.org/memory_viz; note no more."""
    path.parent.mkdir(parents=True, exist_ok=True)  # other machines have no run folder
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
