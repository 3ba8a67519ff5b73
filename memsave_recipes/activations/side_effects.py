"""What a block changes beside its outputs: put back before it runs again, or refused by name.

NOTE [ side effects ]
1. A block under a plan runs a second time in the backward. It then has to find what it found the first time, and what
   it changes must not count twice. So what its modules hold is compared before and after its first run.
2. Attributes that it sets anew, and lists, dicts and sets among them, are put back for the second run. What the first
   run has made of them stays in the end.
3. Lists, dicts and sets that it is given: its first run gets the caller's own, and each later one a copy of what was in
   them before (``LayerCall``).
4. Tensors that it writes on are refused: a copy of each would take the memory that a plan saves. BatchNorm's are not
   among them (NOTE [ statistics once ]), nor are parameters in shards, which FSDP2 gathers and frees around a module.
5. torch counts the writes on a tensor, but not those by way of ``.data``, as published code has them for codebooks and
   teachers. So in the first run of all, the bits of every tensor are added up before and after. That run also looks at
   the generators of random numbers and at the objects of a module's own, which are refused where they change.
6. After ``ENOUGH`` first runs in a row without a change, in the modes of training and evaluation that its modules are
   in, a block is looked at for writes on its buffers alone.
"""

import copy
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes

from memsave_recipes.errors import InputError

CONTAINERS = (list, dict, set, deque)
OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes that every module has."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a number."""
CHUNK = 2**16
"""Numbers that are added up at a time, as 64-bit integers."""
KINDS, ATTRIBUTE = ("parameter", "buffer"), "tensor"
"""Of tensors, as messages call them."""
ABSENT = object()
ENOUGH = 32
"""First runs of a block by which it shows that it changes nothing."""
_LOOKED_AT: WeakSet[nn.Module] = WeakSet()
"""Modules whose first run was looked at by rule 5."""


def copied(value: Any) -> Any:
    """``value`` with containers of its own, and the tensors and objects that were in them."""
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(map(copied, value))
    if not isinstance(value, CONTAINERS):
        return value
    own = copy.copy(value)
    if isinstance(own, dict):
        own.update({key: copied(one) for key, one in own.items() if isinstance(one, (tuple, *CONTAINERS))})
    elif not isinstance(own, set):
        for index, one in enumerate(own):
            own[index] = copied(one)
    return own


def _is_same(now: Any, before: Any) -> bool:
    """Whether a container holds what its copy holds: the same objects, or equal numbers and words."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, dict):
        return list(now) == list(before) and all(_is_same(now[key], before[key]) for key in now)
    if isinstance(now, list | tuple | deque):
        return len(now) == len(before) and all(map(_is_same, now, before))
    return isinstance(now, set | int | float | str | bytes) and now == before


@dataclass(frozen=True)
class _Change:
    """An attribute that a run has changed, and what it held before; ``ABSENT`` where there was none."""

    layer: nn.Module
    name: str
    before: Any


@contextmanager
def _as_before(changes: Iterable[_Change]) -> Iterator[None]:
    """Inside, attributes are what they were before they changed; then what they are now."""
    now = [(change.layer, change.name, vars(change.layer).get(change.name, ABSENT)) for change in changes]
    for change in changes:
        _set(change.layer, change.name, copied(change.before))
    try:
        yield
    finally:
        for layer, name, value in now:
            _set(layer, name, value)


def _set(layer: nn.Module, name: str, value: Any) -> None:
    if value is ABSENT:
        vars(layer).pop(name, None)
    else:
        vars(layer)[name] = value


class SideEffects:
    """Of the runs of a block.

    Args:
        modules: of the block.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers = list(dict.fromkeys(layer for module in modules for layer in module.modules()))
        self.kinds = ("buffer",) if any(isinstance(layer, FSDPModule) for layer in self.layers) else KINDS
        self.with_buffers = [one for one in self.layers if one._buffers and not isinstance(one, _BatchNorm)]
        self.is_looked_at = False
        self.unchanged_runs: Counter[tuple[bool, ...]] = Counter()  # in a row, by the modes of the modules
        self._find_containers()

    def _find_containers(self) -> None:
        self.containers = [
            (layer, name)
            for layer in self.layers
            for name, value in vars(layer).items()
            if name not in OF_TORCH and isinstance(value, CONTAINERS)
        ]

    def once(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, of which the first run alone changes what it changes.

        Raises:
            InputError: by the first run, where it changes what cannot be put back.
        """
        next_run, later = self.around(function)

        def run(*inputs: Any) -> Any:
            nonlocal next_run
            this_run, next_run = next_run, later
            return this_run(*inputs)

        return run

    def around(self, function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """``function`` for its first run, and for later ones: as ``once``."""
        changes: list[_Change] = []

        def first(*inputs: Any) -> Any:
            modes = tuple([layer.training for layer in self.layers])
            if self.unchanged_runs[modes] >= ENOUGH:
                return self._watching_buffers(function, *inputs)
            before = _State(self)
            outputs = function(*inputs)
            changes.extend(before.changes())
            self.is_looked_at = True
            self.unchanged_runs[modes] = 0 if changes else self.unchanged_runs[modes] + 1
            if changes:
                self._find_containers()
            return outputs

        def later(*inputs: Any) -> Any:
            with _as_before(changes):
                return function(*inputs)

        return first, later

    def _watching_buffers(self, function: Callable[..., Any], *inputs: Any) -> Any:
        before = self._buffers()
        outputs = function(*inputs)
        now = self._buffers()
        if now != before:
            layer, name = next(key for key in {**before, **now} if before.get(key) != now.get(key))
            raise _refusal(layer, f"writes on its buffer {name}")
        return outputs

    def _buffers(self) -> dict[tuple[nn.Module, str], tuple[int, int]]:
        """Their identities and versions, by module and name."""
        return {
            (layer, name): (id(buffer), 0 if buffer is None else _version(buffer))
            for layer in self.with_buffers
            for name, buffer in layer._buffers.items()
        }


@contextmanager
def undone(module: nn.Module) -> Iterator[list[Any]]:
    """Put back the attributes that runs of ``module`` inside have changed; afterwards the list has these changes.

    Raises:
        InputError: it writes on a tensor.
    """
    effects, found = SideEffects([module]), list[Any]()
    effects.is_looked_at = True
    before = _State(effects)
    try:
        yield found
    finally:
        found += before.changes()
        for change in found:
            _set(change.layer, change.name, change.before)


class _State:
    """What the modules of a block hold before a run."""

    def __init__(self, block: SideEffects) -> None:
        self.layers = block.layers
        self.attributes = [vars(layer).copy() for layer in self.layers]
        self.containers = [
            (layer, name, held, copied(held))
            for layer, name in block.containers
            if (held := vars(layer).get(name)) is not None
        ]
        self.tensors = list(_tensors(self.layers, block.kinds))
        self.versions = [_version(tensor) for _, _, _, tensor in self.tensors]
        self.new = [] if block.is_looked_at else [layer for layer in self.layers if layer not in _LOOKED_AT]
        self.sums = self._sums() if self.new else []
        self.others = [(layer, name, one, _state_of(one)) for layer, name, one in _objects(self.new)]

    def changes(self) -> list[_Change]:
        """The attributes that have changed since.

        Raises:
            InputError: rules 4 and 5.
        """
        for (layer, kind, name, tensor), version in zip(self.tensors, self.versions, strict=True):
            is_replaced = kind != ATTRIBUTE and getattr(layer, f"_{kind}s").get(name) is not tensor
            if is_replaced or _version(tensor) != version:
                raise _refusal(layer, f"writes on its {kind} {name}")
        self._look_closely()
        found = []
        for layer, before in zip(self.layers, self.attributes, strict=True):
            now = vars(layer)
            if len(now) != len(before) or not all(map(is_, now.values(), before.values())):
                names = [name for name in before | now if now.get(name, ABSENT) is not before.get(name, ABSENT)]
                found += [_Change(layer, name, before.get(name, ABSENT)) for name in names]
        found += [_Change(layer, name, copy) for layer, name, held, copy in self.containers if not _is_same(held, copy)]
        return found

    def _look_closely(self) -> None:
        """Rule 5."""
        if not self.new:
            return
        for (layer, kind, name, _), was, now in zip(self.tensors, self.sums, self._sums(), strict=True):
            if was != now:
                raise _refusal(layer, f"writes on its {kind} {name}")
        for layer, name, one, state in self.others:
            if not _is_same(_state_of(one), state):
                raise _refusal(layer, f"changes its {name}")
        if all(sums is not None for sums in self.sums):
            _LOOKED_AT.update(self.new)

    def _sums(self) -> list[int | None]:
        with torch.no_grad(), _disable_current_modes():
            return [_sum_of_bits(tensor) for _, _, _, tensor in self.tensors]


def _tensors(layers: Iterable[nn.Module], kinds: Collection[str]) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """Those of ``layers`` with their kinds and names, without BatchNorm's statistics."""
    for layer in layers:
        for kind in kinds:
            if kind == "buffer" and isinstance(layer, _BatchNorm):
                continue
            for name, tensor in getattr(layer, f"_{kind}s").items():
                if tensor is not None:
                    yield layer, kind, name, tensor
        for name, value in vars(layer).items():
            if isinstance(value, Tensor):
                yield layer, ATTRIBUTE, name, value


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _sum_of_bits(tensor: Tensor) -> int | None:
    """``None`` of what has no bits here: fake tensors, those in shards, and those on the meta device."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.layout != torch.strided:
        return None
    if tensor.itemsize not in INTEGERS:
        return 0
    bits = tensor.detach().view(INTEGERS[tensor.itemsize])
    parts = bits.reshape(-1).split(CHUNK) if bits.is_contiguous() else [bits]
    return sum(int(part.sum(dtype=torch.int64)) for part in parts)


def _objects(layers: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Any]]:
    """Generators of random numbers, and objects that have attributes of their own and are no modules."""
    for layer in layers:
        for name, value in vars(layer).items():
            if name not in OF_TORCH and _state_of(value) is not None:
                yield layer, name, value


def _state_of(value: Any) -> Any:
    """What may change in an object; ``None`` where nothing may."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, type | nn.Module | Tensor) or callable(value):
        return None
    return copied(vars(value)) if hasattr(value, "__dict__") else None


def _refusal(layer: nn.Module, what: str) -> InputError:
    return InputError(
        f"strategy: {type(layer).__name__} {what} in every forward, so no plan can run it a second time: use none"
    )
