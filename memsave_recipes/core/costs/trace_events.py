"""Trace a forward and backward block by block: storages, bytes and times at the boundaries of blocks.

A *boundary* is a place in a step at which its caller calls ``mark()`` of a meter. ``StepTracer`` marks the boundaries
of blocks and tells which storages each block takes, returns and saves.

Notes: ``docs/design/costs.md``.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from memsave_recipes.core.activations.micro_batches import tensors_in
from memsave_recipes.core.activations.offload import HOST_MEMORY
from memsave_recipes.core.activations.recompute import kept_by_policy
from memsave_recipes.core.costs.breakdown import Allocation, Event, Labels, Use, record_allocations
from memsave_recipes.core.costs.preserve_state import freeing_gradients, hooked
from memsave_recipes.core.plans.chain import allocated_bytes


@dataclass(frozen=True)
class Reading:
    """Bytes at a boundary above those at the beginning of the step; the peak and the seconds since the one before."""

    live_bytes: int
    peak_bytes: int
    seconds: float | None = None


class Meter(Protocol):
    """Reads a step at its boundaries."""

    def mark(self) -> None:
        """Read a boundary."""


@dataclass(frozen=True)
class DeviceInstruments:
    """Readings of steps that run on a device; a step gets a meter, on which it marks its boundaries.

    Args:
        repetitions: timed runs at least; 0 where the readings of memory have the seconds, and nothing has to warm up.
    """

    device: torch.device
    repetitions: int = 5

    def read_memory(self, step: Callable[[Meter], None]) -> list[Reading]:
        """Return a reading for each boundary, by the allocator's statistics or, on a CPU, torch's profiler.

        Bytes are counted from where the step begins.
        """
        if self.device.type == "cpu":
            return _read_profile(step)
        meter = _AllocatorMeter(self.device)
        step(meter)
        return meter.readings

    def read_clock(self, step: Callable[[Meter], None]) -> list[float]:
        """Return the seconds between the boundaries, by the host's clock on a CPU, else by events in the own stream.

        The events of Apple's GPUs may end in the wrong order or never (https://github.com/pytorch/pytorch/pull/196395).
        """
        clock = _HostClock(self.device) if self.device.type in HOST_MEMORY else _DeviceClock(self.device)
        step(clock)
        return clock.intervals_s()


class _HostClock:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []

    def mark(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self.times.append(perf_counter())

    def intervals_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]


class _DeviceClock:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: list[torch.Event] = []

    def mark(self) -> None:
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        self.events.append(event)

    def intervals_s(self) -> list[float]:
        torch.accelerator.synchronize(self.device)
        return [earlier.elapsed_time(later) / 1000 for earlier, later in pairwise(self.events)]


class _LabelMeter(Labels):
    """Boundaries as labels of no storages among the allocations of the profile."""

    def mark(self) -> None:
        self.add(Use.TEMPORARIES, ())


def _read_profile(step: Callable[[Meter], None]) -> list[Reading]:
    meter = _LabelMeter()
    with record_allocations(meter) as events:
        step(meter)
    return list(_readings(events))


def _readings(events: list[Event]) -> Iterator[Reading]:
    live = peak = 0
    own: dict[int, int] = {}  # bytes of the step's blocks: an older one may be released at any time, as garbage is
    for event in events:
        if not isinstance(event, Allocation):
            yield Reading(live, peak)
            peak = live
        elif event.device.type == "cpu":
            live -= own.pop(event.address, 0)  # also where a thread released it that is not recorded, as gloo's are
            if event.num_bytes > 0:
                own[event.address] = event.num_bytes
                live += event.num_bytes
            peak = max(peak, live)


class _AllocatorMeter:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin_bytes = torch.accelerator.memory_allocated(device)
        self.readings: list[Reading] = []
        torch.accelerator.reset_peak_memory_stats(device)

    def mark(self) -> None:
        live = torch.accelerator.memory_allocated(self.device) - self.begin_bytes
        peak = torch.accelerator.max_memory_allocated(self.device) - self.begin_bytes
        self.readings.append(Reading(live, peak))
        torch.accelerator.reset_peak_memory_stats(self.device)


Storages = dict[int, int]
"""Bytes of storages by their identity."""


@dataclass
class Part:
    """See NOTE [ the parts of a step ]; ``block`` is the name of its block, ``None`` between blocks.

    ``module`` is the name of the module that it is, outside of all blocks. ``forward`` and ``backward`` are the numbers
    of the boundaries where these begin.
    """

    block: str | None
    inputs: Storages
    forward: int = -1
    outputs: Storages = field(default_factory=dict)
    saved: Storages = field(default_factory=dict)
    extra_args: Storages = field(default_factory=dict)  # arguments of the block besides its state
    leaves: Storages = field(default_factory=dict)  # inputs that autograd did not make
    until_saved_bytes: int = 0  # the peak of its forward until its last tensor is saved
    backward: int | None = None
    needs_gradient: bool = False  # of its outputs
    is_read: bool = False  # whether its backward has read a tensor that it saved
    until_read_bytes: int = 0  # by which more is live just before that than when its backward begins
    gradient_bytes: int = 0  # of the parameters that get theirs in its backward
    tied_gradient_bytes: int = 0  # those of them that wait for an earlier use of the parameter
    accumulated_bytes: int = 0  # by which the peak of its backward is less where there are gradients to add them to
    module: str | None = None

    @property
    def name(self) -> str | None:
        """The name of its block or module; ``None`` between them."""
        return self.block or self.module


class _Mark(NamedTuple):
    """Between two boundaries ``part`` has saved a tensor; or its backward has made a gradient of so many bytes, of
    which ``left_bytes`` have gone to the host; or (``is_read``) is about to read the first tensor that it has saved.
    """

    part: Part
    gradient_bytes: int | None = None
    left_bytes: int = 0
    is_read: bool = False


class Ends(NamedTuple):
    """The numbers of the boundaries where the forward ends and where the backward does."""

    forward: int
    backward: int


class StepTracer:
    """The parts of the step that ``run`` runs.

    Args:
        model: with a plan applied whose watch is ``self.watch``.
        batch: the input of the forward; with the parameters and buffers it is resident.
        counting: storages too; else only the boundaries, which costs the step next to nothing.
        frees_gradients: free each gradient as it is made, which counts as if it stayed; those of tied weights do.
        extra_modules: the names of modules outside of all blocks that are parts of their own.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Iterable[Tensor],
        *,
        device: torch.device,
        counting: bool,
        frees_gradients: bool,
        extra_modules: Sequence[str],
    ) -> None:
        self.model = model
        self.device = device
        self.counting = counting
        self.frees_gradients = frees_gradients
        self.extra_modules = extra_modules
        self.parts: list[Part] = []
        self.ends = Ends(0, 0)
        self._references: list[StorageWeakRef] = []
        self._resident: Storages = {}
        self._resident = self._storages([*model.parameters(), *model.buffers(), *batch])
        uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
        self._tied = {parameter for parameter, count in uses.items() if count > 1}
        self._num_boundaries = 0
        self._marks: list[_Mark | None] = []  # None where a boundary is
        self._flowing: list[weakref.ref[Tensor]] = []  # the input of the current part
        self._before_blocks: list[StorageWeakRef] = []  # the inputs of blocks that parts between blocks made
        self._outlive: set[int] = set()  # those of them that were there when the last block had run
        self._in_backward: Part | None = None

    def run(self, forward: Callable[[], Tensor], meter: Meter) -> None:
        """Run ``forward()``, which ends in a loss, and its backward."""
        self._meter = meter
        self.parts = [Part(None, {}, self._boundary())]
        with (
            saved_tensors_hooks(self._pack, self._unpack) if self.counting else nullcontext(),
            self._watching_modules(),
        ):
            loss = forward()
        self._device = loss.device
        self.parts[-1].outputs = self._storages(tensors_in([loss]))
        forward_end = self._boundary()
        self._begin_backward(self.parts[-1])
        freed = set(self.model.parameters()) - self._tied if self.frees_gradients else ()
        with self._counting_gradients() if self.counting else nullcontext(), freeing_gradients(freed):
            loss.backward()
        self.ends = Ends(forward_end, self._boundary())

    def watch(self, name: str, run: Callable[..., Any], inputs: tuple[Any, ...], others: Any) -> Any:
        """Be the ``Watch`` of ``apply_plan``."""
        taken = tensors_in(inputs)
        leaves = self._storages([tensor for tensor in taken if tensor.is_leaf])
        self._begin(
            Part(name, self._storages(taken), extra_args=self._storages(tensors_in(others)), leaves=leaves), taken
        )
        with kept_by_policy() as kept:
            outputs = run(*inputs)
        given = _output_of(outputs, taken)
        if any(tensor.requires_grad for tensor in given):  # else no graph holds what the policy keeps
            self.parts[-1].saved |= kept
        self._begin(Part(None, self._storages(given)), given)
        return outputs

    def _watching_modules(self) -> AbstractContextManager[None]:
        """Make each of ``extra_modules`` a part when it runs."""

        def begin(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            taken = tensors_in((args, kwargs))
            self._begin(Part(None, self._storages(taken), module=name), taken)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            given = tensors_in(output)
            self._begin(Part(None, self._storages(given)), given)

        watched = [(partial(begin, name), self.model.get_submodule(name)) for name in self.extra_modules]
        begins = (module.register_forward_pre_hook(hook, with_kwargs=True) for hook, module in watched)
        return hooked(chain(begins, (module.register_forward_hook(end) for _, module in watched)))

    def _begin(self, part: Part, flowing: list[Tensor]) -> None:
        """End the current part with ``flowing`` as its output, and begin ``part``, whose input that is."""
        current = self.parts[-1]
        new = [tensor for tensor in flowing if not any(tensor is known() for known in self._flowing)]
        part.forward = self._boundary()
        if current.name is None and not current.saved and not new:
            self.parts[-1] = part  # nothing is between two blocks, or before the first
        else:
            current.outputs = part.inputs
            self._mark_backward(current, new)
            self.parts.append(part)
        if self.counting:
            self._follow(part, current, flowing)
        self._flowing = [weakref.ref(tensor) for tensor in flowing]

    def _follow(self, part: Part, current: Part, flowing: list[Tensor]) -> None:
        """Find out which inputs of earlier blocks are still there: rule 5 of the NOTE."""
        if part.block is not None and current.block is None:
            self._before_blocks += map(StorageWeakRef, storages_in(flowing))
        elif part.block is None and current.block is not None:
            self._outlive = {ref.cdata for ref in self._before_blocks if not ref.expired()} - current.inputs.keys()

    @property
    def variables_bytes(self) -> int:
        """Rule 5 of the NOTE."""
        saved = {storage for part in self.parts for storage in part.saved}
        made = {s: size for part in self.parts if part.block is None for s, size in part.outputs.items()}
        return sum(size for storage, size in made.items() if storage in self._outlive - saved)

    def _mark_backward(self, part: Part, outputs: list[Tensor]) -> None:
        """Let its backward begin with the gradient of the newest of its outputs."""
        trained = [tensor for tensor in outputs if tensor.requires_grad]
        part.needs_gradient = bool(trained)
        if trained:
            trained[-1].register_hook(lambda _: self._begin_backward(part))

    def _begin_backward(self, part: Part) -> None:
        part.backward = self._boundary()
        self._in_backward = part

    def _counting_gradients(self) -> AbstractContextManager[None]:
        def count(parameter: Tensor) -> None:
            # The gradient of a tied weight is made for the later of its uses, and waits for the earlier one.
            part = latest if parameter in self._tied else self._in_backward
            if part is not None and parameter.grad is not None:
                num_bytes = allocated_bytes([parameter.grad.untyped_storage().nbytes()], self.device)
                part.gradient_bytes += num_bytes
                part.tied_gradient_bytes += num_bytes if parameter in self._tied else 0
                if parameter not in self._tied:
                    left_bytes = num_bytes if self.frees_gradients or parameter.grad.device != self._device else 0
                    if self.frees_gradients:
                        parameter.grad = None  # before the mark, where the next peak begins
                    self._mark(_Mark(part, num_bytes, left_bytes))

        latest = next((part for part in reversed(self.parts) if part.module), self.parts[-1])
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return hooked(parameter.register_post_accumulate_grad_hook(count) for parameter in trained)

    def at_boundaries(self, readings: Iterable[Reading]) -> Iterator[Reading]:
        """Yield the readings at boundaries, as if all gradients stayed; those between them go into the parts."""
        left_bytes = 0
        peak_bytes = lower_peak_bytes = gradients_bytes = 0  # lower: without the gradients of this backward
        seconds, in_backward = None, None
        live_bytes: list[int] = []  # at the boundaries
        for reading, mark in zip(readings, self._marks, strict=True):
            reached_bytes = reading.peak_bytes + left_bytes
            peak_bytes = max(peak_bytes, reached_bytes)
            lower_peak_bytes = max(lower_peak_bytes, reached_bytes - gradients_bytes)
            seconds = None if reading.seconds is None else (seconds or 0.0) + reading.seconds
            if mark is None:
                if in_backward is not None:
                    in_backward.accumulated_bytes = peak_bytes - lower_peak_bytes
                live_bytes.append(reading.live_bytes + left_bytes)
                yield Reading(live_bytes[-1], peak_bytes, seconds)
                peak_bytes = lower_peak_bytes = gradients_bytes = 0
                seconds, in_backward = None, None
            elif mark.is_read:
                began = mark.part.backward or 0
                if began < len(live_bytes):  # else it begins once more: a part that runs twice is refused later
                    mark.part.until_read_bytes = reading.live_bytes + left_bytes - live_bytes[began]
            elif mark.gradient_bytes is None:
                mark.part.until_saved_bytes = peak_bytes
            else:
                gradients_bytes += mark.gradient_bytes
                left_bytes += mark.left_bytes
                in_backward = mark.part

    def _boundary(self) -> int:
        self._mark(None)
        self._num_boundaries += 1
        return self._num_boundaries - 1

    def _pack(self, tensor: Tensor) -> tuple[Part, Tensor]:
        part = self.parts[-1]
        part.saved |= self._storages([tensor])
        self._mark(_Mark(part))
        # Detached: a saved output that came back as itself would keep its own graph alive if no backward follows.
        return part, tensor.detach()

    def _unpack(self, packed: tuple[Part, Tensor]) -> Tensor:
        part, tensor = packed
        if part.backward is not None and not part.is_read:
            part.is_read = True
            self._mark(_Mark(part, is_read=True))
        return tensor

    def _mark(self, mark: _Mark | None) -> None:
        self._meter.mark()
        self._marks.append(mark)

    def _storages(self, tensors: Iterable[Tensor]) -> Storages:
        """Return the storages that are not resident."""
        found: Storages = {}
        for storage in storages_in(tensors) if self.counting else ():
            self._references.append(StorageWeakRef(storage))
            if storage._cdata not in self._resident:
                found[storage._cdata] = allocated_bytes([storage.nbytes()], self.device)
        return found


def storages_in(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return those of ``tensors``, and of the indices and values of sparse ones."""
    dense: list[Tensor] = []
    for tensor in tensors:
        if tensor.layout == torch.sparse_coo:
            dense += [tensor._indices(), tensor._values()]
        elif tensor.layout == torch.sparse_csr:
            dense += [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        else:
            dense.append(tensor)
    return [tensor.untyped_storage() for tensor in dense]


def _output_of(outputs: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output by rule 3 of the NOTE: of a dense layer all features, of a layer's tuple the hidden states."""
    given: list[Tensor] = []
    for tensors in map(tensors_in, tree_leaves(outputs)):
        given += tensors
        if tensors and not any(tensors[0] is taken for taken in inputs):
            break
    return given
