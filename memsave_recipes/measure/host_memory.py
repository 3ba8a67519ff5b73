"""Host memory: what the process holds, and the exact peak of one instrumented step on a CPU.

A CPU has no allocator statistics, and the resident set size moves with caches and fragmentation (6 % between identical
runs). So one step is recorded, allocation by allocation; the running sum of its bytes, on top of the tensors that were
there before it, is exact. ``memsave_recipes.measure.breakdown`` says what they are for.
"""

import resource
import sys
from collections.abc import Callable, Iterable
from itertools import accumulate

import psutil
import torch
from torch import Tensor, nn

from memsave_recipes.measure.allocations import Allocation, record_allocations, storages_of
from memsave_recipes.measure.breakdown import what_stays


def rss_bytes() -> int:
    """The resident set size of this process."""
    return psutil.Process().memory_info().rss


def peak_rss_bytes() -> int:
    """The most that the resident set of this process has ever been."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024  # getrusage(2): KiB everywhere else


def instrumented_peak_bytes(step: Callable[[], None]) -> int:
    """Run ``step`` once; the most that its allocations held at one time, beyond what was there before."""
    _, events = record_allocations(step)
    return max(accumulate((event.num_bytes for event in events if isinstance(event, Allocation)), initial=0))


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Parameters, buffers, gradients and optimizer state: what outlives a step. Shared storages count once."""
    return sum(sum(label.storages.values()) for label in what_stays(model, optimizer))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind ``tensors``, each storage once."""
    return sum(storages_of(tensors).values())
