"""The memory at the peak of a training step by use: parameters, gradients, optimizer state, activations, temporaries.

One step is recorded under torch's profiler, whose events list every block of torch's allocators, nested in the
operations that asked for them. That nesting tells activations from temporaries; ``Labels`` among the events tell which
blocks became gradients and optimizer state.

The uses add up to the peak. On a CPU, which has no allocator statistics, that is the sum of the tensors known before
the step and of its own allocations. Elsewhere it is the allocator's, and anything else that it held before the step
(workspaces, rounding) counts as temporary.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import RecordScope, _EventType
from torch.autograd.profiler import profile, record_function

from memsave_recipes.core.activations.streaming import resident_tensors
from memsave_recipes.core.costs.preserve_state import hooked
from memsave_recipes.core.processes import only_errors_of_c10
from memsave_recipes.core.sharding.shards import noting_gathered
from memsave_recipes.core.sharding.tensors import local

# Kineto announces every start and stop on stderr; this is the level above its loudest message.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

MARK = "memsave label "
BESIDE_STATE = "memsave_beside_state"


class Use(Enum):
    """The use of a block of memory, as in ``torch.distributed._tools.mem_tracker``.

    Parameters include buffers and weights in shards that a forward has gathered; gradients DDP's buckets; activations
    all that forwards make, also in a second run, and the batch. Temporaries are those of the backward with the weights
    that it gathers, of kernels, of clipping and of the optimizer.
    """

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"


@dataclass(frozen=True)
class Allocation:
    """A block was allocated, or released: ``num_bytes`` is negative then."""

    address: int
    num_bytes: int
    device: torch.device
    use: Use


@dataclass(frozen=True)
class Label:
    """Storages that have a known use at this moment: address to bytes."""

    use: Use
    storages: dict[int, int]


Event = Allocation | Label


@dataclass
class Labels:
    """Labels among the events of a step that is being recorded."""

    added: list[Label] = field(default_factory=list)

    def add(self, use: Use, tensors: Iterable[Tensor]) -> None:
        """Give the storage of each of ``tensors`` this use from its allocation to its release."""
        with record_function(f"{MARK}{len(self.added)}"):
            self.added.append(Label(use, storages_of(tensors)))


@contextmanager
def record_allocations(labels: Labels | None = None) -> Iterator[list[Event]]:
    """Record the events of the block on all devices, in order; they are in the list when the block has ended.

    The profiler's tree has no root on an accelerator: what is released there between two operations, as a variable of
    Python is, is in the tree because the whole block is one event of the host.
    """
    events: list[Event] = []
    # The one of autograd, as torch.profiler's makes a list of the events as well, which takes longer than the step.
    profiling = profile(use_kineto=True, profile_memory=True)
    with only_errors_of_c10(), profiling as profiler, record_function("memsave block"):
        yield events
    roots = profiler.kineto_results.experimental_event_tree()
    found = _walk(roots, labels.added if labels else [])
    events += [event for _, event in sorted(found, key=lambda timed: timed[0])]


def storages_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return address and bytes of the storages behind ``tensors``; in shards, those of this rank."""
    storages = (tensor.untyped_storage() for tensor in map(local, tensors))
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _walk(roots: Iterable[Any], labels: list[Label]) -> Iterator[tuple[int, Event]]:
    """Yield each allocation and label with its time, parents before children."""
    pending = [(event, Use.ACTIVATIONS) for event in roots][::-1]
    while pending:
        event, use = pending.pop()
        if event.tag == _EventType.Allocation:
            block = event.extra_fields
            yield event.start_time_ns, Allocation(block.ptr, block.alloc_size, block.device, use)
        elif event.name.startswith(MARK):
            yield event.start_time_ns, labels[int(event.name.removeprefix(MARK))]
        else:
            within = _use_within(event, use)
            pending += [(child, within) for child in event.children][::-1]


def _use_within(event: Any, use: Use) -> Use:
    """Tell activations, which forwards make, also inside a backward, from temporaries.

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


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """Bytes by use at one moment."""

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_state_bytes: int = 0
    activations_bytes: int = 0
    temporaries_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return sum(vars(self).values())


@dataclass
class PeakOfStep:
    """The ``breakdown`` of a step that has ended."""

    breakdown: MemoryBreakdown | None = None


@contextmanager
def break_down_peak(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[PeakOfStep]:
    """Record the uses of ``device`` at the peak of the block: a forward, a backward and an optimizer step.

    Args:
        model: its parameters and buffers, whether they train or not.
        optimizer: torch's own, not a wrapper of it. It may step inside the backward.

    Yields:
        The peak. Without a breakdown on Apple's GPUs: their allocator tells torch's profiler nothing.
    """
    peak = PeakOfStep()
    if device.type == "mps":
        yield peak
        return
    resident = persistent_tensors(model, optimizer)
    held_before = None if device.type == "cpu" else torch.accelerator.memory_allocated(device)
    labels = Labels()
    with _labelling(model, optimizer, labels, device), record_allocations(labels) as events:
        yield peak
    on_device = [event for event in events if isinstance(event, Label) or event.device.type == device.type]
    peak.breakdown = _at_the_peak(on_device, resident, held_before)


def persistent_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Label]:
    """Return the storages that outlive a step, as far as they are there now."""
    return [
        Label(Use.PARAMETERS, storages_of(resident_tensors(model))),
        Label(Use.GRADIENTS, storages_of(_gradients(model))),
        Label(Use.OPTIMIZER_STATE, storages_of(_on_device(model, _state(optimizer)))),
    ]


def _gradients(model: nn.Module) -> Iterator[Tensor]:
    return (one.grad for one in resident_tensors(model) if one.grad is not None)


def count_as_state(optimizer: torch.optim.Optimizer, tensors: Iterable[Tensor]) -> None:
    """Let ``tensors``, such as an average of the weights, count as state of an optimizer."""
    setattr(getattr(optimizer, "optimizer", optimizer), BESIDE_STATE, list(tensors))  # Accelerate may have wrapped it


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield it, with the masters of weights in fewer bits, and what counts as state."""
    yield from getattr(optimizer, BESIDE_STATE, ())
    masters = getattr(optimizer, "masters", None)
    yield from () if masters is None else filter(masters.is_saved, masters.of.values())
    yield from (value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor))


def _on_device(model: nn.Module, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield those that are where the model is, and not on the host."""
    devices = {tensor.device for tensor in map(local, resident_tensors(model))}
    return (tensor for tensor in map(local, tensors) if tensor.device in devices)


@contextmanager
def _labelling(
    model: nn.Module, optimizer: torch.optim.Optimizer, labels: Labels, device: torch.device
) -> Iterator[None]:
    """Label gradients when they have been accumulated, the optimizer's state after its step, weights when gathered.

    Gradients in shards that are reduced once a step are those of gathered weights until then. An optimizer that steps
    inside the backward frees a gradient before any later hook sees it, so they are also labelled when it begins. One
    that steps on the host has neither on ``device``, and a thread that must not look at a model while it runs.
    """

    def label_gradient(parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.device.type == device.type:  # that of a streamed weight is not
            labels.add(Use.GRADIENTS, [parameter.grad])

    def label_gradients(*_: object) -> None:
        labels.add(Use.GRADIENTS, _gradients(model))

    def label_gathered(weights: list[Tensor]) -> None:
        labels.add(Use.PARAMETERS, weights)
        labels.add(Use.GRADIENTS, [weight.grad for weight in weights if weight.grad is not None])

    def label_state(*_: object) -> None:
        labels.add(Use.OPTIMIZER_STATE, _on_device(model, _state(optimizer)))

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    handles = [parameter.register_post_accumulate_grad_hook(label_gradient) for parameter in trained]
    stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if any(parameter.device.type == device.type for parameter in stepped):
        handles += [optimizer.register_step_pre_hook(label_gradients), optimizer.register_step_post_hook(label_state)]
    with hooked(handles), noting_gathered(model, label_gathered):
        yield


@dataclass
class _Block:
    use: Use
    num_bytes: int
    born: int  # the number of its event; -1 if it was there before
    freed: float = inf


def _at_the_peak(events: list[Event], resident: list[Label], held_before: int | None) -> MemoryBreakdown:
    blocks = _lifetimes(events, resident)
    peak = _time_of_peak(blocks)
    totals = Counter(dict.fromkeys(Use, 0))
    for block in blocks:
        if block.born <= peak < block.freed:
            totals[block.use] += block.num_bytes
    if held_before is not None:
        totals[Use.TEMPORARIES] += held_before - sum(block.num_bytes for block in blocks if block.born < 0)
    return MemoryBreakdown(**{f"{use.value}_bytes": num_bytes for use, num_bytes in totals.items()})


def _lifetimes(events: list[Event], resident: list[Label]) -> list[_Block]:
    """Return every block, with its use and the events between which it lived; releases of unknown ones do not count."""
    blocks: list[_Block] = []
    living: dict[int, _Block] = {}
    before = -1

    def add(address: int, block: _Block) -> None:
        blocks.append(block)
        living[address] = block

    for now, event in [*((before, label) for label in resident), *enumerate(events)]:
        if isinstance(event, Label):
            for address, num_bytes in event.storages.items():
                if address in living:
                    living[address].use = event.use
                else:  # there before, but unknown until now: DDP's buckets
                    add(address, _Block(event.use, num_bytes, born=before))
        elif event.num_bytes > 0:
            if event.address in living:  # released by a thread that is not recorded, as gloo's are
                living.pop(event.address).freed = now
            add(event.address, _Block(event.use, event.num_bytes, born=now))
        elif event.address in living:
            living.pop(event.address).freed = now
    return blocks


def _time_of_peak(blocks: list[_Block]) -> float:
    """Return the first event at which the live blocks took most."""
    change: Counter[float] = Counter()
    for block in blocks:
        change[block.born] += block.num_bytes
        change[block.freed] -= block.num_bytes
    times = sorted(change)
    held = list(accumulate(change[time] for time in times))
    return times[held.index(max(held))] if held else 0
