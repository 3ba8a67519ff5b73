"""What a block changes beside its outputs: put back before it runs again, or refused by name.

NOTE [ side effects ]
1. A block under a plan runs a second time in the backward. It then has to find what it found the first time, and what
   it changes must not count twice. So what its modules and their classes hold, and what it is given, is compared before
   and after its first run.
2. Attributes that it sets anew, and lists, dicts and sets among them, are put back for the second run, as are the
   random numbers of Python and numpy. What the first run has made of them stays in the end.
3. Lists and dicts that it is given: its first run gets the caller's own, and each later one a copy of what was in them
   before (``LayerCall``). A set is refused where it changes, as a copy may yield its members in another order.
4. Tensors that it writes on are refused: a copy of each would take the memory that a plan saves. BatchNorm's are not
   among them (NOTE [ statistics once ]), nor are parameters in shards, which FSDP2 gathers and frees around a module.
5. torch counts the writes on a tensor, but not those by way of ``.data``, as published code has them for codebooks and
   teachers. So in the first run of all, the bits of every tensor are added up before and after. That run also looks at
   objects (arrays, generators, iterators, functions, modules that are not registered) and at all that these hold. They
   are refused where they change. Known limits: global variables, and tensors above ``MAX_BYTES`` in objects.
6. After ``ENOUGH`` first runs in a row without a change, in the modes of training and evaluation that its modules are
   in, a block is looked at for writes on its buffers alone.
"""

import copy
import random
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, is_
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes

from memsave_recipes.errors import InputError

CONTAINERS = (list, dict, set, deque)
OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes that every module has."""
SEQUENCES = (list, tuple, deque)
PLAIN = (int, float, complex, str, bytes, type(None))
OPAQUE = (type, ModuleType)
"""Of which an object holds no state of its own."""
OURS = ("memsave_recipes.", "torch.distributed.")
"""Modules whose objects are around a block, not part of it."""
MAX_THINGS = 10_000
"""In an object, with all that it holds."""
MAX_BYTES = 2**26
"""Of a tensor in an object, or that a block is given, whose bits are added up."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a number."""
CHUNK = 2**16
"""Numbers that are added up at a time, as 64-bit integers."""
KINDS, ATTRIBUTE = ("parameter", "buffer"), "tensor"
"""Of tensors, as messages call them."""
ABSENT = object()
_IS_TRAINING = attrgetter("training")


def _state_of_numpy() -> tuple[Any, ...]:
    """As values that can be compared."""
    kind, keys, *others = np.random.get_state()
    return kind, np.asarray(keys).tobytes(), *others


def _set_state_of_numpy(state: tuple[Any, ...]) -> None:
    kind, keys, *others = state
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *others))


RANDOM: dict[str, tuple[Callable[[], tuple[Any, ...]], Callable[[tuple[Any, ...]], None]]] = {
    "python": (random.getstate, random.setstate),
    "numpy": (_state_of_numpy, _set_state_of_numpy),
}
"""The generators that all blocks share and torch does not put back: how their states are read and set."""
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


Owner = nn.Module | type | None
"""Of attributes: a module or its class; ``None`` of a generator in ``RANDOM``."""


@dataclass(frozen=True)
class _Change:
    """An attribute that a run has changed, and what it held before; ``ABSENT`` where there was none."""

    owner: Owner
    name: str
    before: Any


@contextmanager
def _as_before(changes: Iterable[_Change]) -> Iterator[None]:
    """Inside, attributes are what they were before they changed; then what they are now."""
    now = [(change.owner, change.name, _get(change.owner, change.name)) for change in changes]
    for change in changes:
        _set(change.owner, change.name, copied(change.before))
    try:
        yield
    finally:
        for owner, name, value in now:
            _set(owner, name, value)


def _get(owner: Owner, name: str) -> Any:
    return RANDOM[name][0]() if owner is None else vars(owner).get(name, ABSENT)


def _set(owner: Owner, name: str, value: Any) -> None:
    if owner is None:
        RANDOM[name][1](value)
    elif isinstance(owner, type):
        if value is not ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)
    elif value is ABSENT:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value


def _classes(layers: Iterable[nn.Module]) -> list[type]:
    """The classes of ``layers`` and those that they inherit from, but for torch's and Python's."""
    found = dict.fromkeys(kind for layer in layers for kind in type(layer).__mro__)
    return [kind for kind in found if kind.__module__.partition(".")[0] not in ("torch", "builtins", "abc", "typing")]


def _attributes(owner: nn.Module | type) -> dict[str, Any]:
    """Those that a forward may set: of a class, all but its methods and what Python keeps there."""
    if isinstance(owner, nn.Module):
        return vars(owner).copy()
    return {
        name: value
        for name, value in vars(owner).items()
        if not (name.startswith("__") or callable(value) or hasattr(value, "__get__"))
    }


class SideEffects:
    """Of the runs of a block.

    Args:
        modules: of the block.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers = list(dict.fromkeys(layer for module in modules for layer in module.modules()))
        self.kinds = ("buffer",) if any(isinstance(layer, FSDPModule) for layer in self.layers) else KINDS
        self.owners: list[nn.Module | type] = [*self.layers, *_classes(self.layers)]
        self.with_buffers = [one for one in self.layers if one._buffers and not isinstance(one, _BatchNorm)]
        self.is_looked_at = False
        self.unchanged_runs: Counter[tuple[bool, ...]] = Counter()  # in a row, by the modes of the modules
        self._find_containers()

    def _find_containers(self) -> None:
        self.containers = [
            (owner, name)
            for owner in self.owners
            for name, value in _attributes(owner).items()
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
            modes = tuple(map(_IS_TRAINING, self.layers))
            if self.unchanged_runs[modes] >= ENOUGH:
                return self._watching_buffers(function, *inputs)
            before = _State(self, getattr(function, "given", ()))
            outputs = function(*inputs)
            changes.extend(before.changes())
            self.is_looked_at = True
            self.unchanged_runs[modes] = 0 if changes else self.unchanged_runs[modes] + 1
            if changes:
                self._find_containers()
            return outputs

        def later(*inputs: Any) -> Any:
            if not changes:
                return function(*inputs)
            with _as_before(changes):
                return function(*inputs)

        return first, later

    def _watching_buffers(self, function: Callable[..., Any], *inputs: Any) -> Any:
        if not self.with_buffers:
            return function(*inputs)
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
            _set(change.owner, change.name, change.before)


class _State:
    """What the modules of a block hold before a run, and what is in the arguments that it is ``given``."""

    def __init__(self, block: SideEffects, given: Any = ()) -> None:
        self.layers, self.owners, self.kinds = block.layers, block.owners, block.kinds
        self.attributes = [_attributes(owner) for owner in self.owners]
        self.containers = [
            (owner, name, held, copied(held))
            for owner, name in block.containers
            if (held := vars(owner).get(name)) is not None
        ]
        self.random = {name: get() for name, (get, _) in RANDOM.items()}
        self.tensors = list(self._tensors())
        self.given = [leaf for leaf in _leaves(given) if not isinstance(leaf, PLAIN)]
        self.tensors_given = [(leaf, _version(leaf)) for leaf in self.given if isinstance(leaf, Tensor)]
        self.versions = [_version(tensor) for _, _, _, tensor in self.tensors]
        self.new = [] if block.is_looked_at else [layer for layer in self.layers if layer not in _LOOKED_AT]
        self.sums = self._sums() if self.new else []
        self.others = list(self._objects()) if self.new else []

    def changes(self) -> list[_Change]:
        """The attributes that have changed since.

        Raises:
            InputError: rules 3, 4 and 5.
        """
        for (owner, kind, name, tensor), version in zip(self.tensors, self.versions, strict=True):
            is_replaced = kind != ATTRIBUTE and getattr(owner, f"_{kind}s").get(name) is not tensor
            if is_replaced or _version(tensor) != version:
                raise _refusal(owner, f"writes on its {kind} {name}")
        if any(_version(tensor) != version for tensor, version in self.tensors_given):
            raise _refusal(self.layers[0], f"{_changes_a(self.tensors_given[0][0])} that it is given")
        self._look_closely()
        found = []
        for owner, before in zip(self.owners, self.attributes, strict=True):
            now = _attributes(owner)
            if len(now) != len(before) or not all(map(is_, now.values(), before.values())):
                names = [name for name in before | now if now.get(name, ABSENT) is not before.get(name, ABSENT)]
                found += [_Change(owner, name, before.get(name, ABSENT)) for name in names]
        found += [_Change(owner, name, copy) for owner, name, held, copy in self.containers if not _is_same(held, copy)]
        drawn = [name for name, state in self.random.items() if RANDOM[name][0]() != state]
        return found + [_Change(None, name, self.random[name]) for name in drawn]

    def _look_closely(self) -> None:
        """Rule 5."""
        if not self.new:
            return
        for (owner, kind, name, _), was, now in zip(self.tensors, self.sums, self._sums(), strict=True):
            if was != now:
                raise _refusal(owner, f"writes on its {kind} {name}")
        for owner, what, one, state in self.others:
            if self._state_of(one) != state:
                raise _refusal(owner, what)
        if all(sums is not None for sums in self.sums):
            _LOOKED_AT.update(self.new)

    def _sums(self) -> list[int | None]:
        with torch.no_grad(), _disable_current_modes():
            return [_sum_of_bits(tensor) for _, _, _, tensor in self.tensors]

    def _state_of(self, value: Any) -> list[Any]:
        with torch.no_grad(), _disable_current_modes():
            return _state_of(value, self.kinds, known=self.layers)

    def _tensors(self) -> Iterator[tuple[Owner, str, str, Tensor]]:
        """Those of the modules with their kinds and names, without BatchNorm's statistics."""
        for layer in self.layers:
            for kind in self.kinds:
                if kind == "buffer" and isinstance(layer, _BatchNorm):
                    continue
                for name, tensor in getattr(layer, f"_{kind}s").items():
                    if tensor is not None:
                        yield layer, kind, name, tensor
        yield from ((owner, ATTRIBUTE, name, leaf) for owner, name, leaf in self._held() if isinstance(leaf, Tensor))

    def _held(self) -> Iterator[tuple[Owner, str, Any]]:
        """What attributes hold that are not torch's, also in lists and dicts."""
        for owner, attributes in zip(self.owners, self.attributes, strict=True):
            for name, value in attributes.items():
                if name not in OF_TORCH and name != "forward" and not _is_ours(value):
                    yield from ((owner, name, leaf) for leaf in _leaves(value) if not isinstance(leaf, PLAIN))

    def _objects(self) -> Iterator[tuple[Owner, str, Any, list[Any]]]:
        """Those that are held or given, what to say where they change, and their states now."""
        held = ((owner, f"changes its {name}", one) for owner, name, one in self._held())
        others = [found for found in held if not isinstance(found[2], Tensor | set)]
        given = ((self.layers[0], f"{_changes_a(one)} that it is given", one) for one in self.given)
        for owner, what, one in (*others, *given):
            yield owner, what, one, self._state_of(one)


def _changes_a(given: Any) -> str:
    return "writes on a tensor" if isinstance(given, Tensor) else f"changes a {type(given).__name__}"


def _leaves(value: Any) -> Iterator[Any]:
    """What is in lists, deques, dicts and tuples, at any depth."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, SEQUENCES):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _sum_of_bits(tensor: Tensor) -> int | None:
    """``None`` of what has no bits here: fake tensors, those in shards, on the meta device or with freed storages."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.layout != torch.strided:
        return None
    if tensor.nbytes and not tensor.untyped_storage().nbytes():
        return None
    if tensor.itemsize not in INTEGERS:
        return 0
    bits = tensor.detach().view(INTEGERS[tensor.itemsize])
    parts = bits.reshape(-1).split(CHUNK) if bits.is_contiguous() else [bits]
    return sum(int(part.sum(dtype=torch.int64)) for part in parts)


def _state_of(value: Any, kinds: Collection[str] = KINDS, known: Collection[nn.Module] = ()) -> list[Any]:
    """What may change in an object and in all that it holds, as values that can be compared.

    Args:
        kinds: of tensors that are looked at in modules.
        known: modules that are looked at elsewhere.
    """
    state: list[Any] = []
    seen, left = {id(module): module for module in known}, [value]
    while left and len(state) < MAX_THINGS:
        one = left.pop()
        state.append(one if isinstance(one, PLAIN) else type(one))
        if isinstance(one, (*PLAIN, *OPAQUE)) or _is_ours(one) or id(one) in seen:
            continue
        seen[id(one)] = one  # alive, so that no other object has its identity
        if isinstance(one, Tensor):
            state += [id(one), _version(one), _sum_of_bits(one) if one.nbytes <= MAX_BYTES else None]
        else:
            left += _parts(one, kinds)
    return state


def _is_ours(value: Any) -> bool:
    """Return whether this package or torch's sharding has put it there: a plan, streamed weights, gathered ones."""
    return type(value).__module__.startswith(OURS) and not isinstance(value, nn.Module)


def _parts(value: Any, kinds: Collection[str]) -> Iterable[Any]:
    """What an object holds: of most objects, what a pickle of it would hold."""
    if isinstance(value, dict):
        return [*value, *value.values(), *_vars_of(value)]
    if isinstance(value, (set, frozenset, *SEQUENCES)):
        return [*value, *_vars_of(value)]
    if isinstance(value, nn.Module):
        own = [one for name, one in vars(value).items() if name not in OF_TORCH and name != "forward"]
        return [*(getattr(value, f"_{kind}s") for kind in kinds), *value.children(), *own]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        return [vars(value), value.__defaults__, value.__kwdefaults__, *map(_content, value.__closure__ or ())]
    if isinstance(value, GeneratorType):
        return [value.gi_frame and (value.gi_frame.f_lasti, value.gi_frame.f_locals)]
    if isinstance(value, torch.Generator):
        return [value.get_state().numpy().tobytes()]
    if type(value).__module__ == "itertools" and "__reduce__" not in vars(type(value)):
        return [float("nan")]  # from Python 3.14 on they do not tell where they are: refused, as this equals no other
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 lets go of iterators that can be pickled
            reduced = value.__reduce_ex__(4)
    except Exception:  # by whatever the class of a user does
        return _vars_of(value)
    return reduced[1:] if isinstance(reduced, tuple) else ()


def _vars_of(value: Any) -> list[Any]:
    return [vars(value)] if hasattr(value, "__dict__") else []


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _refusal(owner: Owner, what: str) -> InputError:
    kind = owner if isinstance(owner, type) else type(owner)
    return InputError(
        f"strategy: {kind.__name__} {what} in every forward, so no plan can run it a second time: use none"
    )
