"""Optimizer state that waits on the host, and is on the device while its parameters are stepped.

A run has the bits of one whose state stays on the device: the same optimizer steps the same numbers there. torchao's
``CPUOffloadOptimizer`` and DeepSpeed's ZeRO-Offload (Ren et al. 2021, https://arxiv.org/abs/2101.06840) step on the
host, whose kernels round otherwise.

NOTE [ state on the host ]
1. An optimizer treats each parameter by itself, so it is given a few of them at a time: a *piece*. While one is
   stepped, the state of the next one is copied to the device. So at most two pieces are there.
2. Copies up and down run on two streams, at the same time. The device waits for them, the host does not.
3. A tensor of the state is the same object all the time, and its memory is on the host or on the device. So checkpoints
   and optimizers find it where they look for it, also in shards.
4. Small tensors stay on the device: counters of steps, tables of 8-bit values, Adafactor's means of rows and columns.
5. Torch pins powers of two of bytes, so tensors share slabs of such sizes.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from memsave_recipes.core.activations.offload import HOST_MEMORY, Copies, SideStream
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.sharding.tensors import local, num_parts

PIECE_BYTES = 2**25
"""Of the parameters of a piece, unless one alone is larger: copies of its state take longer than to start them."""
SMALLEST_BYTES = 2**12
"""Of a tensor that waits on the host."""
SLAB_BYTES = 2**26
ALIGNMENT = 2**6


def pieces_of(parameters: Iterable[Tensor], num_ranks: int | None = None) -> list[list[Tensor]]:
    """Cut a group of parameters into pieces, in their order; the same ones on every rank that has shards of them.

    Args:
        num_ranks: that are to hold whole ``parameters`` in shards; default: as they are.
    """
    pieces: list[list[Tensor]] = []
    free_bytes = 0
    for parameter in parameters:
        num_bytes = parameter.nbytes // (num_ranks or num_parts(parameter))
        if not pieces or num_bytes > free_bytes:
            pieces.append([])
            free_bytes = PIECE_BYTES
        pieces[-1].append(parameter)
        free_bytes -= num_bytes
    return pieces


@dataclass
class Slabs:
    """Places for tensors in slabs of powers of two of bytes: the size of each, and how much of it is taken."""

    sizes: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def place(self, num_bytes: int) -> tuple[int, int]:
        """Return the slab of the next tensor by its number, and the byte at which the tensor begins."""
        rounded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        rooms = (size - taken for size, taken in zip(self.sizes, self.taken, strict=True))
        number = next((number for number, room in enumerate(rooms) if room >= rounded), len(self.sizes))
        if number == len(self.sizes):
            self.sizes.append(max(SLAB_BYTES, 1 << (rounded - 1).bit_length()))
            self.taken.append(0)
        begin = self.taken[number]
        self.taken[number] += rounded
        return number, begin


class PinnedMemory:
    """Host memory for tensors, in slabs that ``empty_on_host`` makes."""

    def __init__(self, empty_on_host: Callable[[int], Tensor]) -> None:
        self._empty_on_host = empty_on_host
        self._places = Slabs()
        self._slabs: list[Tensor] = []

    def empty_like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for a dense ``tensor``, with its strides."""
        dtype = dtype or tensor.dtype
        num_bytes = tensor.numel() * dtype.itemsize
        number, begin = self._places.place(num_bytes)
        if number == len(self._slabs):
            self._slabs.append(self._empty_on_host(self._places.sizes[number]))
        flat = self._slabs[number][begin : begin + num_bytes].view(dtype)
        return flat.as_strided(tensor.size(), tensor.stride())


def pinned_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of the host that tensors of these sizes take, in their order."""
    slabs = Slabs()
    for size in sizes:
        slabs.place(size)
    return sum(slabs.sizes)


@torch.no_grad()
def copies_on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy ``tensors``, by name, for devices into pinned memory, and wait for these once."""
    devices = {tensor.device for tensor in tensors.values() if tensor.device.type not in HOST_MEMORY}
    memory = PinnedMemory(partial(torch.empty, dtype=torch.uint8, pin_memory=bool(devices)))
    copies = {}
    for name, tensor in tensors.items():
        copies[name] = memory.empty_like(torch.empty_like(tensor, device="meta"))  # which is dense
        copies[name].copy_(tensor, non_blocking=bool(devices))
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()
    return copies


@dataclass(eq=False)
class _Move:
    """Copies under way. When they are done, each tensor has its new memory."""

    copies: Copies
    targets: list[tuple[Tensor, Tensor]]
    event: Any

    @classmethod
    def start(cls, copies: Copies, targets: list[tuple[Tensor, Tensor]]) -> Self:
        event = copies.start([(target, tensor.detach()) for tensor, target in targets]) if targets else None
        return cls(copies, targets, event)

    def finish(self) -> None:
        """Let the device wait; the host goes on."""
        if self.targets:
            self.copies.wait(self.event)
        for tensor, target in self.targets:
            tensor.data = target
        self.targets = []


class StateOnHost:
    """Moves the state of an optimizer between host and device: NOTE [ state on the host ].

    Args:
        device: of the parameters.
        up, down: copies in both directions.
    """

    def __init__(self, device: torch.device, up: Copies, down: Copies) -> None:
        self._device, self._up, self._down = device, up, down
        self._memory = PinnedMemory(down.empty_on_host)
        self._homes: dict[Tensor, Tensor] = {}
        self._last: Any = None

    def visits(
        self, pieces: list[list[Tensor]], state_of: Callable[[Tensor], Iterable[Tensor]]
    ) -> Iterator[list[Tensor]]:
        """Yield each piece while its state is on the device, and bring that home afterwards.

        Args:
            state_of: the tensors of the state of a parameter.
        """

        def state(piece: list[Tensor]) -> list[Tensor]:
            return [tensor for parameter in piece for tensor in state_of(parameter)]

        arriving, leaving = self._fetch(state(pieces[0]) if pieces else []), self._bring_home([])
        for piece, following in zip(pieces, [*pieces[1:], []], strict=False):
            arriving.finish()
            leaving.finish()
            arriving = self._fetch(state(following))
            yield piece
            leaving = self._bring_home(state(piece))
        leaving.finish()

    def settle(self) -> None:
        """Wait until all state is on the host."""
        if self._last is not None:
            self._last.synchronize()

    def forget(self) -> None:
        """Let go of the memory of state that is replaced."""
        self.settle()
        self._memory, self._homes = PinnedMemory(self._down.empty_on_host), {}

    def take_in(self, tensor: Tensor) -> None:
        """Give ``tensor``, wherever it is, memory on the host, if it is large."""
        if waits(tensor):
            tensor.data = self._home_of(tensor).copy_(tensor)

    def _fetch(self, tensors: list[Tensor]) -> _Move:
        waiting = [tensor for tensor in tensors if tensor in self._homes]
        return _Move.start(self._up, [(tensor, torch.empty_like(tensor, device=self._device)) for tensor in waiting])

    def _bring_home(self, tensors: list[Tensor]) -> _Move:
        move = _Move.start(self._down, [(tensor, self._home_of(tensor)) for tensor in tensors if waits(tensor)])
        self._last = move.event or self._last
        return move

    def _home_of(self, tensor: Tensor) -> Tensor:
        if tensor not in self._homes:
            self._homes[tensor] = self._memory.empty_like(tensor)
        return self._homes[tensor]


def waits(tensor: Tensor) -> bool:
    """Whether a tensor of the state is large enough to wait on the host."""
    return tensor.nbytes >= SMALLEST_BYTES


class _OptimizerOnHost(Optimizer):
    """What ``keep_state_on_host`` puts before the methods of an optimizer."""

    on_host: StateOnHost
    kind: type[Optimizer]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; return the loss of ``closure``, if there is one."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        groups = self.param_groups
        found = [(group, pieces_of(one for one in group["params"] if one.grad is not None)) for group in groups]
        of_pieces = iter([group for group, pieces in found for _ in pieces])
        try:
            for piece in self.on_host.visits([piece for _, pieces in found for piece in pieces], self._state_of):
                self.param_groups = [{**next(of_pieces), "params": piece}]
                super().step()
        finally:
            self.param_groups = groups
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # so torch calls hooks for each piece, whose state is there

    def state_dict(self) -> dict[str, Any]:
        """Return the state, on the host. Wait for the device."""
        self.on_host.settle()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of ``state_dict``, also of an optimizer whose state was on the device."""
        stepped = self._stepped()
        state = {number: dict(entry) for number, entry in state_dict["state"].items()}
        large = {number: _large_ones(entry, stepped[number]) for number, entry in state.items()}
        for number, entry in large.items():
            state[number] = {key: value for key, value in state[number].items() if key not in entry}
        self.on_host.forget()
        super().load_state_dict({**state_dict, "state": state})
        for number, entry in large.items():
            self.state[stepped[number]].update(entry)
        self.take_in_state()

    @torch.no_grad()
    def take_in_state(self) -> None:
        """Give all present state memory on the host, one tensor after the other."""
        for parameter in self._stepped():
            entry = self.state.get(parameter, {})
            for key, value in entry.items():
                if isinstance(value, DTensor) and value.device != parameter.device:  # it would say so for ever
                    entry[key] = value.to(parameter.device)
                if isinstance(value, Tensor):
                    self.on_host.take_in(local(entry[key]))
                    local(value).data = local(entry[key])  # nobody else keeps what was loaded

    def _stepped(self) -> list[Tensor]:
        """All parameters, in the order in which they are numbered."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _state_of(self, parameter: Tensor) -> list[Tensor]:
        """The tensors of its state, in shards the parts of this rank."""
        return [local(value) for value in self.state.get(parameter, {}).values() if isinstance(value, Tensor)]


def _large_ones(entry: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """The tensors in an entry of a saved state that may wait on the host, in the dtype that torch loads them in."""
    found = {key: value for key, value in entry.items() if isinstance(value, Tensor)}
    cast = {key: value.to(parameter.dtype) if value.is_floating_point() else value for key, value in found.items()}
    return {key: value for key, value in cast.items() if waits(local(value))}


def keep_state_on_host(optimizer: Optimizer) -> None:
    """Let the state of ``optimizer`` wait on the host, and visit the device of its parameters for each update.

    Of a model on a CPU it stays, and a warning says so.

    Args:
        optimizer: torch's own, before a schedule or another wrapper takes it, with parameters that are on the device.

    Raises:
        InputError: ``step_on_host`` or a schedule has taken it already, or it steps all parameters at once.
    """
    if is_on_host(optimizer):
        return
    refuse_unfit(optimizer)
    device = first_device(optimizer)
    if may_leave(device):
        move_state(optimizer, StateOnHost(device, SideStream(device), SideStream(device)))


def may_leave(device: torch.device) -> bool:
    """Whether ``device`` is another place than the host; else a warning says that all stays."""
    on_cpu = device.type == "cpu"
    if on_cpu:
        warnings.warn("offload_optimizer: the model runs on a CPU, so all of it stays where it is", stacklevel=3)
    return not on_cpu


def is_on_host(optimizer: Optimizer) -> bool:
    """Whether the state of ``optimizer`` waits on the host."""
    return isinstance(optimizer, _OptimizerOnHost)


def kind_of(optimizer: Optimizer) -> type[Optimizer]:
    """The class of ``optimizer`` as it was made."""
    return optimizer.kind if isinstance(optimizer, _OptimizerOnHost) else type(optimizer)


def first_device(optimizer: Optimizer) -> torch.device:
    """The device of its first parameter.

    Raises:
        InputError: it has none.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return local(parameter).device
    raise InputError("offload_optimizer: the optimizer has no parameters: make it of those of the model")


def refuse_unfit(optimizer: Optimizer) -> None:
    """Raise ``InputError`` where something has taken the ``step`` of ``optimizer``, or that takes no pieces."""
    if isinstance(optimizer, LBFGS):
        raise InputError("offload_optimizer: LBFGS steps all parameters at once: leave it on the device")
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        raise InputError("offload_optimizer: the optimizer is wrapped already: pass it before prepare or setup")
    if is_on_host(optimizer) or hasattr(optimizer, "masters"):
        raise InputError("offload_optimizer: keep_state_on_host and step_on_host exclude each other: call one of them")
    if "step" in vars(optimizer):
        raise InputError(
            "offload_optimizer: a schedule holds the optimizer's step already: keep its state on the host before the "
            "schedule is made"
        )


def move_state(optimizer: Optimizer, on_host: StateOnHost) -> None:
    """Let ``on_host`` move the state of ``optimizer``, which stays what it is.

    Raises:
        InputError: as ``keep_state_on_host``.
    """
    refuse_unfit(optimizer)
    kind: Any = type(optimizer)
    moved: Any = optimizer
    moved.__class__ = type(kind.__name__, (_OptimizerOnHost, kind), {"on_host": on_host, "kind": kind})
    moved.take_in_state()
