"""What a step allocates and releases, in order, from torch's profiler.

Its events list every block of torch's allocators, scratch buffers of the kernels included, nested in the operations
that asked for them. That nesting says what a block is for (``Use``); what it cannot say, which blocks became gradients
and optimizer state, is told by ``Labels``, whose marks stand among the events. A step that is recorded is slow: keep it
out of timings.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._profiler import RecordScope, _EventType
from torch.profiler import ProfilerActivity, profile, record_function

# Kineto announces every start and stop on stderr; this is the level above its loudest message.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

MARK = "memsave label "
T = TypeVar("T")


class Use(Enum):
    """What memory is for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"


@dataclass(frozen=True)
class Allocation:
    """A block came, or went: ``num_bytes`` is negative then."""

    address: int
    num_bytes: int
    device: torch.device
    use: Use


@dataclass(frozen=True)
class Label:
    """The storages that are known to have a use at this moment: address to bytes."""

    use: Use
    storages: dict[int, int]


Event = Allocation | Label


@dataclass
class Labels:
    """Notes, while a step is recorded, what some storages are."""

    noted: list[Label] = field(default_factory=list)

    def note(self, use: Use, tensors: Iterable[Tensor]) -> None:
        """From its allocation to its release, the storage of each of ``tensors`` is of this use."""
        with record_function(f"{MARK}{len(self.noted)}"):
            self.noted.append(Label(use, storages_of(tensors)))


def record_allocations(step: Callable[[], T], labels: Labels | None = None) -> tuple[T, list[Event]]:
    """Run ``step`` once: what it returns, and its events on all devices in the order of time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = step()
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    found = _walk(roots, Use.ACTIVATIONS, labels.noted if labels else [])
    return result, [event for _, event in sorted(found, key=lambda timed: timed[0])]


def storages_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of the storages behind ``tensors``, each storage once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _walk(events: Iterable[Any], use: Use, noted: list[Label]) -> Iterator[tuple[int, Event]]:
    for event in events:
        if event.tag == _EventType.Allocation:
            block = event.extra_fields
            yield event.start_time_ns, Allocation(block.ptr, block.alloc_size, block.device, use)
        elif event.name.startswith(MARK):
            yield event.start_time_ns, noted[int(event.name.removeprefix(MARK))]
        else:
            yield from _walk(event.children, _use_within(event, use), noted)


def _use_within(event: Any, use: Use) -> Use:
    """Activations are what forwards make, also those that run again inside a backward; the rest is temporary.

    While a backward runs, only a recomputation records history, and whatever records history has a sequence number.
    """
    if event.tag != _EventType.TorchOp:
        return use
    details = event.extra_fields
    if details.scope == RecordScope.BACKWARD_FUNCTION or event.name.startswith(
        ("autograd::engine::", "Optimizer.step#")
    ):
        return Use.TEMPORARIES
    return Use.ACTIVATIONS if details.sequence_number >= 0 else use
