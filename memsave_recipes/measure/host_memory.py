"""Host memory: what the process holds, and the exact peak of one instrumented step on a CPU.

A CPU has no allocator statistics, and the resident set size moves with caches and fragmentation (6 % between identical
runs). So one step runs under torch's profiler, whose events list every allocation and release of torch's CPU
allocator, scratch buffers of the kernels included; their running sum, on top of the tensors that were there before the
step, is exact. An instrumented step is slow: keep it out of timings.
"""

import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator

import psutil
import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

# Kineto announces every start and stop on stderr; this is the level above its loudest message.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def rss_bytes() -> int:
    """The resident set size of this process."""
    return psutil.Process().memory_info().rss


def peak_rss_bytes() -> int:
    """The most that the resident set of this process has ever been."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024  # getrusage(2): KiB everywhere else


def instrumented_peak_bytes(step: Callable[[], None]) -> int:
    """Run ``step`` once; the most that its allocations held at one time, beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    events = _flatten(profiler.profiler.kineto_results.experimental_event_tree())
    allocations = [event for event in events if event.tag == _EventType.Allocation]
    held = peak = 0
    for event in sorted(allocations, key=lambda event: event.start_time_ns):
        held += event.extra_fields.alloc_size  # negative for a release
        peak = max(peak, held)
    return peak


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Parameters, buffers, gradients and optimizer state: what outlives a step. Shared storages count once.

    Under DDP the gradient buckets, which live as long as the model, count too.
    """
    state = (value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor))
    gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    buckets = 0
    if isinstance(model, nn.parallel.DistributedDataParallel):
        buckets = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return storage_bytes([*model.parameters(), *model.buffers(), *gradients, *state]) + buckets


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind ``tensors``, each storage once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _flatten(events: Iterable) -> Iterator:
    for event in events:
        yield event
        yield from _flatten(event.children)
