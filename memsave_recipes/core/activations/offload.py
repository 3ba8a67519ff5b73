"""Offload saved tensors to pinned host memory, and copy them back one block ahead of the backward.

A block that recomputes saves its input alone: around ``recompute``, only that waits on the host, as DeepSpeed's
``cpu_checkpointing`` does it (https://deepspeed.readthedocs.io/en/latest/activation-checkpointing.html). So does the
input of one that recomputes in micro-batches: that of all of them.

Copies run on a stream of their own, in parallel with the computation; gradients are bit for bit those of the baseline.
It pays where a block computes for longer than its bytes travel: long sequences, wide layers. The prefetch is the idea
of vDNN (Rhu et al. 2016, https://arxiv.org/abs/1602.08124), the hooks are those of ``torch.autograd.graph``.

Notes: ``docs/design/activations.md``.
"""

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from memsave_recipes.core.activations.micro_batches import tensors_in
from memsave_recipes.core.errors import InputError

HOST_MEMORY = ("cpu", "mps")
"""Types of devices that compute in the host's memory, from which nothing can be moved there."""
SMALLEST_BYTES = 1024**2
"""Below it, starting a copy takes about as long as the copy."""


def offload(function: Callable[..., Any], *inputs: Any, modules: Iterable[nn.Module]) -> Any:
    """``function(*inputs)``, with the tensors that it saves for backward on the host. See NOTE [ offloaded storages ].

    Where the inputs are on a CPU it runs as it is, and a warning says so once.

    Args:
        function: runs once.
        inputs: tensors among them are told apart from those that ``function`` makes.
        modules: run by ``function``; their parameters and buffers stay.
    """
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.device.type not in ("cpu", "meta"):
            return _engine_for(leaf.device).run(function, *inputs, modules=modules)
    _warn_once_on_cpu()
    return function(*inputs)


@cache
def _warn_once_on_cpu() -> None:
    warnings.warn("offload: the model runs on a CPU, so its saved tensors stay where they are", stacklevel=3)


@contextmanager
def unpinned_after(device: torch.device) -> Iterator[None]:
    """Give pinned memory back to the host at the end: torch keeps it for later copies, also of blocks that were tried.

    A CPU pins none.
    """
    try:
        yield
    finally:
        if device.type in ("cuda", "xpu"):  # which have such a cache
            index = torch.accelerator.current_device_index() if device.index is None else device.index
            _engine_for(torch.device(device.type, index)).unused.clear()
            if hasattr(torch.accelerator, "empty_host_cache"):  # not in torch 2.11
                torch.accelerator.empty_host_cache()


@cache
def _engine_for(device: torch.device) -> "OffloadEngine":
    return OffloadEngine(device, SideStream(device))


class Copies(Protocol):
    """Copies in parallel with the computation."""

    def empty_on_host(self, num_bytes: int) -> Tensor:
        """Host memory, (num_bytes,) uint8, that copies can use while the computation goes on."""

    def start(self, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        """Copy each (target, source) after the computation so far; returns an event for ``wait``."""

    def wait(self, event: Any) -> None:
        """The computation from now on waits for these copies."""


class SideStream:
    """``Copies`` on a stream of their own, of any accelerator that torch has streams for."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "mps":
            raise InputError(
                "an Apple GPU (mps) computes in the host's memory, so nothing can be moved there: leave out "
                "offload_optimizer, stream_weights and strategies with offload in their name"
            )
        self.device = device
        self.stream = torch.Stream(device)

    def empty_on_host(self, num_bytes: int) -> Tensor:
        """Pinned memory, from torch's cache of it."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def start(self, pairs: list[tuple[Tensor, Tensor]]) -> torch.Event:
        """All of them after the work that is queued on the computing stream."""
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def wait(self, event: torch.Event) -> None:
        """The computing stream waits; the program does not."""
        torch.accelerator.current_stream(self.device).wait_event(event)


@dataclass(eq=False)
class _Storage:
    """A storage that was saved: on the device, on the host (then ``storage`` is ``None``), or on both."""

    key: StorageWeakRef
    storage: torch.UntypedStorage | None
    num_bytes: int
    host: list[Tensor] = field(default_factory=list)  # pinned memory for its pieces, (bytes,) uint8 each


@dataclass(eq=False)
class _BlockStorages:
    """The storages that one run of a block saved. Autograd alone keeps it and its records alive.

    Args:
        before: the block that was run before it.
        stays: storages that are not copied.
        ungathered: its modules whose weights are not gathered yet, where these are in shards.
    """

    before: "weakref.ref[_BlockStorages] | None"
    stays: set[StorageWeakRef]
    ungathered: list[nn.Module]
    records: "weakref.WeakValueDictionary[StorageWeakRef, _Storage]" = field(
        default_factory=weakref.WeakValueDictionary
    )
    returned: set[StorageWeakRef] = field(default_factory=set)

    def keeps(self, key: StorageWeakRef) -> bool:
        """Whether a storage stays on the device, by rules 2 and 5 of NOTE [ offloaded storages ]."""
        if self.ungathered and key not in self.stays:
            self.stays |= _state_of(self.ungathered)
            self.ungathered = _in_shards(self.ungathered)
        return key in self.stays


@dataclass(frozen=True, eq=False)
class _Packed:
    """A saved tensor: which view of which storage."""

    block: _BlockStorages
    record: _Storage
    dtype: torch.dtype
    layout: tuple[Any, ...]  # offset, size, stride


@dataclass(frozen=True)
class _InFlight:
    """Copies that were started, both their ends, and what is free when they are done: storages, or pieces."""

    event: Any
    pairs: list[tuple[Tensor, Tensor]]
    storages: Sequence[_Storage] = ()
    pieces: Sequence[Tensor] = ()


class OffloadEngine:
    """Copies the saved tensors of blocks on ``device`` to the host and back; small storages stay."""

    def __init__(self, device: torch.device, copies: Copies, smallest_bytes: int = SMALLEST_BYTES) -> None:
        self.device = device
        self.copies = copies
        self.smallest_bytes = smallest_bytes
        self.known: weakref.WeakValueDictionary[StorageWeakRef, _Storage] = weakref.WeakValueDictionary()
        self.last: weakref.ref[_BlockStorages] | None = None
        self.in_backward: weakref.ref[_BlockStorages] | None = None
        self.in_flight: _InFlight | None = None
        self.unused: defaultdict[int, list[Tensor]] = defaultdict(list)  # pinned memory by its bytes

    def run(self, function: Callable[..., Any], *inputs: Any, modules: Iterable[nn.Module]) -> Any:
        """``function(*inputs)``, as ``offload`` does it."""
        block = self._begin(inputs, list(modules))
        with saved_tensors_hooks(partial(self._pack, block), self._unpack):
            outputs = function(*inputs)
        block.returned = _keys(outputs)
        if block.records:
            self.last = weakref.ref(block)
        return outputs

    def _begin(self, inputs: tuple[Any, ...], modules: list[nn.Module]) -> _BlockStorages:
        """Copy the storages of the block before, and take over its outputs. See NOTE [ offloaded storages ]."""
        self._finish()
        self.in_backward = None
        stays = _state_of(modules) | _keys([leaf for leaf in tensors_in(inputs) if leaf.is_leaf])
        block = _BlockStorages(self.last, stays, ungathered=_in_shards(modules))
        if before := self.last and self.last():
            here = [record for record in before.records.values() if record.storage is not None]
            self._copy_to_host([record for record in here if record.key not in before.returned])
            taken = before.returned & _keys(inputs)
            block.records.update({record.key: record for record in here if record.key in taken})
        return block

    def _pack(self, block: _BlockStorages, tensor: Tensor) -> Tensor | _Packed:
        tensor = tensor.detach()  # a saved output would otherwise hold its own graph
        if tensor.device != self.device or not _is_plain(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage)
        if storage.nbytes() < self.smallest_bytes or block.keeps(key):
            return tensor
        record = self.known.setdefault(key, _Storage(key, storage, storage.nbytes()))
        block.records[key] = record
        return _Packed(block, record, tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride()))

    def _unpack(self, packed: Tensor | _Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self.in_backward is None or self.in_backward() is not packed.block:
            self._prefetch(packed.block)
        assert packed.record.storage is not None
        return torch.empty(0, dtype=packed.dtype, device=self.device).set_(packed.record.storage, *packed.layout)

    def _prefetch(self, block: _BlockStorages) -> None:
        """Wait until all of ``block`` is on the device, and start to copy the block before it."""
        self._finish(stay=True)
        self._fetch(block)
        self._finish()
        self.in_backward = weakref.ref(block)
        if before := block.before and block.before():
            self._fetch(before)

    def _copy_to_host(self, records: list[_Storage]) -> None:
        pairs: list[tuple[Tensor, Tensor]] = []
        for record in records:
            assert record.storage is not None
            source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(record.storage)
            sizes = pinned_sizes(len(source))
            record.host = [self._empty_on_host(size) for size in sizes]
            pairs += zip(_beginnings(record.host, sizes), source.split(sizes), strict=True)
        if pairs:
            self.in_flight = _InFlight(self.copies.start(pairs), pairs, storages=records)

    def _empty_on_host(self, num_bytes: int) -> Tensor:
        """Memory that an earlier copy has left, or new memory, of as many bytes as torch pins for so many."""
        pinned_bytes = 1 << (num_bytes - 1).bit_length()
        left = self.unused[pinned_bytes]
        return left.pop() if left else self.copies.empty_on_host(pinned_bytes)

    def _fetch(self, block: _BlockStorages) -> None:
        pairs: list[tuple[Tensor, Tensor]] = []
        pieces: list[Tensor] = []
        for record in reversed(list(block.records.values())):  # the last one saved is the first one needed
            if record.storage is None:
                sizes = pinned_sizes(record.num_bytes)
                target = torch.empty(record.num_bytes, dtype=torch.uint8, device=self.device)
                pairs += zip(target.split(sizes), _beginnings(record.host, sizes), strict=True)
                pieces += record.host
                record.storage, record.host = target.untyped_storage(), []
        if pairs:
            self.in_flight = _InFlight(self.copies.start(pairs), pairs, pieces=pieces)

    def _finish(self, *, stay: bool = False) -> None:
        """Wait for copies in flight; with ``stay``, storages copied to the host stay on the device as well."""
        if self.in_flight is None:
            return
        self.copies.wait(self.in_flight.event)
        pieces = [*self.in_flight.pieces]
        for record in self.in_flight.storages:
            if stay:
                pieces += record.host
                record.host = []
            else:
                record.storage = None
        for piece in pieces:
            self.unused[len(piece)].append(piece)
        self.in_flight = None


def pinned_sizes(num_bytes: int) -> list[int]:
    """Powers of two, the largest first, and a rest of at most an eighth; together ``num_bytes``."""
    sizes, rest = [], num_bytes
    while rest > num_bytes // 8:
        sizes.append(1 << (rest.bit_length() - 1))
        rest -= sizes[-1]
    return [*sizes, rest] if rest else sizes


def _beginnings(pieces: list[Tensor], sizes: list[int]) -> list[Tensor]:
    return [piece[:size] for piece, size in zip(pieces, sizes, strict=True)]


def _is_plain(tensor: Tensor) -> bool:
    """Whether its storage, with size, stride and offset, is all there is to it."""
    is_own_kind = type(tensor) in (Tensor, nn.Parameter, FakeTensor) and tensor.layout is torch.strided
    return is_own_kind and not (tensor.is_conj() or tensor.is_neg())


def _state_of(modules: list[nn.Module]) -> set[StorageWeakRef]:
    """Of their parameters and buffers, without those that are in shards now."""
    return _keys([tensor for module in modules for tensor in (*module.parameters(), *module.buffers())])


def _in_shards(modules: list[nn.Module]) -> list[nn.Module]:
    """Those with weights that are not gathered."""
    return [module for module in modules if any(isinstance(weight, DTensor) for weight in module.parameters())]


def _keys(values: Any) -> set[StorageWeakRef]:
    """The storages of all tensors in ``values``. A weak reference: its address is not used again while it is held."""
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in(values) if _is_plain(tensor)}
