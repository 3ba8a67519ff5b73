"""Saved tensors wait for the backward in pinned host memory, and come back one block ahead of it.

Copies run on a stream of their own, beside the computation; gradients are those of the plain run, bit for bit. It pays
where a block computes for longer than its bytes travel: long sequences, wide layers. The way back is the idea of vDNN
(Rhu et al. 2016, https://arxiv.org/abs/1602.08124), the hooks are those of ``torch.autograd.graph``.

NOTE [ what moves ]
1. Storages move, not tensors: all views of one, saved by whichever block, share one copy. Small ones stay.
2. What lives anyway stays: parameters, buffers, and inputs that nobody computed (the batch).
3. What a block returns belongs to the block that takes it: if that one is offloaded too, it moves it, else it stays.
4. A block moves when the next offloaded one begins. So the last one never does: its backward comes at once.

NOTE [ two blocks at a time ]
1. Forward: while block k runs, block k - 1 leaves. Block k + 1 begins when that is done, and only then is the memory of
   k - 1 free: an allocator that ran ahead of the copies would need all of it at once.
2. Backward: the first tensor of block k that is asked for waits for all of k, and sends for k - 1.
3. ``Mover.under_way`` holds both ends of every copy until the computing stream has waited for it, so that memory of an
   aborted step is not given away while something is still written there.
4. A copy belongs to what autograd saved: it goes when autograd lets go, and with ``retain_graph`` it stays.
5. Torch pins powers of two of bytes, up to twice what was asked for. So a storage leaves in pieces of such sizes, and
   takes at most an eighth more of the host's memory than of the device's.
6. Known limit: tensors of subclasses stay, and parameters that FSDP gathers for one forward are not for this.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

SMALLEST_BYTES = 1024**2
"""Below it, starting a copy takes about as long as the copy."""


def offload(function: Callable[..., Any], *inputs: Any, modules: Iterable[nn.Module]) -> Any:
    """``function(*inputs)``, with what it saves for the backward moved to the host. See NOTE [ what moves ].

    Where the inputs are on a CPU there is nowhere to move to: it runs as it is, and a warning says so once.

    Args:
        function: runs once.
        inputs: tensors among them are told apart from what ``function`` makes.
        modules: what ``function`` runs; their parameters and buffers stay.
    """
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.device.type not in ("cpu", "meta"):
            return _mover_for(leaf.device).run(function, *inputs, modules=modules)
    _say_once_that_nothing_moves()
    return function(*inputs)


@cache
def _say_once_that_nothing_moves() -> None:
    warnings.warn("offload: the model runs on a CPU, so its saved tensors stay where they are", stacklevel=3)


@cache
def _mover_for(device: torch.device) -> "OffloadEngine":
    return OffloadEngine(device, SideStream(device))


class Copies(Protocol):
    """Copies that run beside the computation."""

    def empty_on_host(self, num_bytes: int) -> Tensor:
        """Host memory, (num_bytes,) uint8, that copies can use while the computation goes on."""

    def start(self, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        """Copy each (target, source) once what was computed so far is done; gives an event that ``wait`` takes."""

    def wait(self, event: Any) -> None:
        """What is computed from now on waits for these copies."""


class SideStream:
    """``Copies`` on a stream of their own, of any accelerator that torch has streams for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device)

    def empty_on_host(self, num_bytes: int) -> Tensor:
        """Pinned memory, from torch's cache of it."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def start(self, pairs: list[tuple[Tensor, Tensor]]) -> torch.Event:
        """All of them after what the computing stream was given so far."""
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
    host: list[Tensor] = field(default_factory=list)  # its pieces, (bytes,) uint8 each


@dataclass(eq=False)
class _BlockStorages:
    """What one run of a block saved. Autograd alone keeps it alive, and its parcels."""

    before: "weakref.ref[_BlockStorages] | None"
    stays: set[StorageWeakRef]
    storage_records: "weakref.WeakValueDictionary[StorageWeakRef, _Storage]" = field(
        default_factory=weakref.WeakValueDictionary
    )
    returned: set[StorageWeakRef] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class _Packed:
    """A saved tensor: which view of which storage."""

    load: _BlockStorages
    storage_record: _Storage
    dtype: torch.dtype
    layout: tuple[Any, ...]  # offset, size, stride


@dataclass(frozen=True)
class _UnderWay:
    """Copies that were started, both their ends, and the parcels that leave the device by them."""

    event: Any
    pairs: list[tuple[Tensor, Tensor]]
    leaving: list[_Storage]


class OffloadEngine:
    """Moves what blocks on ``device`` save to the host and back, by ``copies``; storages under a size stay."""

    def __init__(self, device: torch.device, copies: Copies, smallest_bytes: int = SMALLEST_BYTES) -> None:
        self.device = device
        self.copies = copies
        self.smallest_bytes = smallest_bytes
        self.known: weakref.WeakValueDictionary[StorageWeakRef, _Storage] = weakref.WeakValueDictionary()
        self.last: weakref.ref[_BlockStorages] | None = None
        self.in_backward: weakref.ref[_BlockStorages] | None = None
        self.under_way: _UnderWay | None = None

    def run(self, function: Callable[..., Any], *inputs: Any, modules: Iterable[nn.Module]) -> Any:
        """``function(*inputs)``, as ``offload`` does it."""
        load = self._begin(inputs, modules)
        with saved_tensors_hooks(partial(self._pack, load), self._unpack):
            outputs = function(*inputs)
        load.returned = _keys(outputs)
        if load.storage_records:
            self.last = weakref.ref(load)
        return outputs

    def _begin(self, inputs: tuple[Any, ...], modules: Iterable[nn.Module]) -> _BlockStorages:
        """Send off what the block before saved, and take over what it returned. See NOTE [ what moves ]."""
        self._finish()
        self.in_backward = None
        load = _BlockStorages(self.last, stays=_living_anyway(inputs, modules))
        if before := self.last and self.last():
            here = [
                storage_record
                for storage_record in before.storage_records.values()
                if storage_record.storage is not None
            ]
            self._copy_to_host([storage_record for storage_record in here if storage_record.key not in before.returned])
            taken = before.returned & _keys(inputs)
            load.storage_records.update(
                {storage_record.key: storage_record for storage_record in here if storage_record.key in taken}
            )
        return load

    def _pack(self, load: _BlockStorages, tensor: Tensor) -> Tensor | _Packed:
        tensor = tensor.detach()  # a saved output would otherwise hold its own graph
        if tensor.device != self.device or not _is_plain(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage)
        if storage.nbytes() < self.smallest_bytes or key in load.stays:
            return tensor
        storage_record = self.known.setdefault(key, _Storage(key, storage))
        load.storage_records[key] = storage_record
        return _Packed(load, storage_record, tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride()))

    def _unpack(self, packed: Tensor | _Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self.in_backward is None or self.in_backward() is not packed.load:
            self._prefetch(packed.load)
        assert packed.storage_record.storage is not None
        return torch.empty(0, dtype=packed.dtype, device=self.device).set_(
            packed.storage_record.storage, *packed.layout
        )

    def _prefetch(self, load: _BlockStorages) -> None:
        """All of ``load`` is on the device, and the load before it is on its way."""
        self._finish(stay=True)
        self._fetch(load)
        self._finish()
        self.in_backward = weakref.ref(load)
        if before := load.before and load.before():
            self._fetch(before)

    def _copy_to_host(self, storage_records: list[_Storage]) -> None:
        pairs: list[tuple[Tensor, Tensor]] = []
        for storage_record in storage_records:
            assert storage_record.storage is not None
            source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage_record.storage)
            sizes = pinned_sizes(len(source))
            storage_record.host = [self.copies.empty_on_host(size) for size in sizes]
            pairs += zip(storage_record.host, source.split(sizes), strict=True)
        if pairs:
            self.under_way = _UnderWay(self.copies.start(pairs), pairs, storage_records)

    def _fetch(self, load: _BlockStorages) -> None:
        pairs: list[tuple[Tensor, Tensor]] = []
        for storage_record in reversed(
            list(load.storage_records.values())
        ):  # the last one saved is the first one needed
            if storage_record.storage is None:
                sizes = [len(piece) for piece in storage_record.host]
                target = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
                pairs += zip(target.split(sizes), storage_record.host, strict=True)
                storage_record.storage, storage_record.host = target.untyped_storage(), []
        if pairs:
            self.under_way = _UnderWay(self.copies.start(pairs), pairs, [])

    def _finish(self, *, stay: bool = False) -> None:
        """Wait for what is under way; with ``stay``, what was about to leave stays: the backward has come for it."""
        if self.under_way is None:
            return
        self.copies.wait(self.under_way.event)
        for storage_record in () if stay else self.under_way.leaving:
            storage_record.storage = None
        self.under_way = None


def pinned_sizes(num_bytes: int) -> list[int]:
    """Powers of two, the largest first, and a rest of at most an eighth; together ``num_bytes``."""
    sizes, rest = [], num_bytes
    while rest > num_bytes // 8:
        sizes.append(1 << (rest.bit_length() - 1))
        rest -= sizes[-1]
    return [*sizes, rest] if rest else sizes


def _is_plain(tensor: Tensor) -> bool:
    """Whether its storage, with size, stride and offset, is all there is to it."""
    is_own_kind = type(tensor) in (Tensor, nn.Parameter, FakeTensor) and tensor.layout is torch.strided
    return is_own_kind and not (tensor.is_conj() or tensor.is_neg())


def _living_anyway(inputs: tuple[Any, ...], modules: Iterable[nn.Module]) -> set[StorageWeakRef]:
    state = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_leaf]
    return _keys([*state, *leaves])


def _keys(values: Any) -> set[StorageWeakRef]:
    """The storages of all tensors in ``values``. A weak reference: its address is not used again while it is held."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor) and _is_plain(value)]
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}
