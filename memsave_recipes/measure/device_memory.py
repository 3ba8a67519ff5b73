"""Device memory as the allocator and the driver report it, for any accelerator that ``torch.accelerator`` knows."""

from dataclasses import dataclass

import torch


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
        peak_allocated_bytes=torch.accelerator.max_memory_allocated(device),
        peak_reserved_bytes=torch.accelerator.max_memory_reserved(device),
        device_used_bytes=total_bytes - free_bytes,
        num_alloc_retries=statistics.get("num_alloc_retries", 0),
        num_ooms=statistics.get("num_ooms", 0),
    )


def reset_peaks(device: torch.device) -> None:
    """Begin a new window: the peaks fall to what is held now."""
    torch.accelerator.reset_peak_memory_stats(device)
