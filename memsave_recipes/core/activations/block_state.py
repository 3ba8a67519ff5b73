"""What the modules of a block hold beside their weights: found before its first run, put back around each later one.

Notes: ``docs/design/activations.md``.
"""

import copy
import random
import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

CONTAINERS = (list, dict, set, deque, UserDict)
OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes that every module has."""
OF_HOOKS = [name for name in OF_TORCH if "ward" in name and "hooks" in name]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
FORWARDS_OF_TORCH = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
"""Of BatchNorm layers whose second run counts nothing; those of a user may count in any way."""
CONSTANT = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.ReLU, nn.GELU, nn.SiLU)
"""Modules whose forward reads weights and constants: where they have no other attribute, none is looked at."""
ABSENT = object()
_needs_gradient = attrgetter("requires_grad")


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


def random_numbers() -> dict[str, Any]:
    """The states of the generators in ``RANDOM``."""
    return {name: get() for name, (get, _) in RANDOM.items()}


def set_random_numbers(states: dict[str, Any]) -> None:
    """Set some of them back."""
    for name, state in states.items():
        RANDOM[name][1](state)


def is_cache(value: Any) -> bool:
    """Whether it is a key-value cache of transformers, or one like it."""
    return not isinstance(value, (Tensor, type)) and hasattr(value, "get_seq_length")


def copied(value: Any) -> Any:
    """``value`` with containers and caches of its own, and the tensors and objects that were in them."""
    if type(value) is tuple:
        return tuple(map(copied, value))
    if is_cache(value):
        own = copy.copy(value)
        vars(own).update({name: _copied_part(part) for name, part in vars(value).items()})
        return own
    if not isinstance(value, CONTAINERS):
        return value
    try:
        own = copy.copy(value)
    except Exception:  # of a class that refuses to change, so that nobody changes it
        return value
    if isinstance(own, UserDict):
        own.data = copied(own.data)
    elif isinstance(own, dict):
        for key, one in own.items():
            dict.__setitem__(own, key, copied(one))
    elif not isinstance(own, set):
        for index, one in enumerate(own):
            own[index] = copied(one)
    return own


def _copied_part(part: Any) -> Any:
    """Of a cache: its layers, each of which holds keys and values, or the states themselves."""
    if not isinstance(part, list):
        return copied(part)
    return [layer if isinstance(layer, Tensor) else copy.copy(layer) for layer in part]


def _is_same(now: Any, before: Any) -> bool:
    """Whether a container holds what its copy holds: the same objects, or equal numbers and words."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, UserDict):
        return _is_same(now.data, before.data)
    if isinstance(now, dict):
        return list(now) == list(before) and all(_is_same(now[key], before[key]) for key in now)
    if isinstance(now, list | tuple | deque):
        return len(now) == len(before) and all(map(_is_same, now, before))
    return isinstance(now, set | int | float | str | bytes) and now == before


class Space:
    """Where names stand for values: the ``vars`` of a module or class, or a dictionary that torch keeps of a module.

    Args:
        held: the dictionary itself.
        owner: the module or class.
        is_part: whether it holds submodules, tensors or hooks.
    """

    def __init__(self, held: Any, owner: nn.Module | type, *, is_part: bool = False) -> None:
        self.held, self.owner, self.is_part = held, owner, is_part
        self.names = tuple(filter(self._is_looked_at, held))
        self.names += self.names if len(self.names) == 1 else ()  # so that the getter yields a tuple
        self.values: Callable[[Any], tuple[Any, ...]] = itemgetter(*self.names) if self.names else _none_of

    def _is_looked_at(self, name: str) -> bool:
        """Of a class, all but its methods and what Python keeps there; of BatchNorm, all but what counts once."""
        if self.is_part:
            return True
        if isinstance(self.owner, type):
            value = self.held[name]
            return not (name.startswith("__") or callable(value) or hasattr(value, "__get__"))
        is_own = name not in OF_TORCH or name == "training"
        return is_own and not (name == "momentum" and isinstance(self.owner, _BatchNorm))

    def now(self) -> dict[str, Any]:
        """The names, and what they stand for."""
        return {name: self.held[name] for name in self.held if self._is_looked_at(name)}

    def get(self, name: str) -> Any:
        """What one of them stands for; ``None`` where it stands for nothing."""
        return self.held.get(name)

    def set(self, name: str, value: Any) -> None:
        """Let it stand for ``value``, or with ``ABSENT`` for nothing."""
        if isinstance(self.owner, type):
            if value is not ABSENT:
                setattr(self.owner, name, value)
            elif name in self.held:
                delattr(self.owner, name)
        elif value is ABSENT:
            self.held.pop(name, None)
        else:
            self.held[name] = value


def _none_of(held: Any) -> tuple[Any, ...]:
    return ()


class Change(NamedTuple):
    """A name that stands for another value than it did ``before``; ``ABSENT`` where it stood for none."""

    space: Space
    name: str
    before: Any


class _Layout:
    """The spaces of a block, so that one look at all of them takes no longer than it must.

    Args:
        spaces: where values are.
        empty_hooks: dictionaries in which there is no hook, with their modules.
    """

    def __init__(self, spaces: list[Space], empty_hooks: list[Space]) -> None:
        self.spaces, self.empty_hooks = spaces, empty_hooks
        self.all_held = [space.held for space in spaces]
        self.sizes = [*map(len, self.all_held)]
        self.hooks = [space.held for space in empty_hooks]
        filled = [space for space in spaces if space.names]
        self.getters, self.filled = [space.values for space in filled], [space.held for space in filled]

    def values(self) -> list[Any] | None:
        """Of all names, one after the other; ``None`` where there are other names."""
        if self.sizes != [*map(len, self.all_held)] or any(self.hooks):
            return None
        try:
            return [*chain.from_iterable(map(call, self.getters, self.filled))]
        except KeyError:
            return None

    def changes(self, values: list[Any]) -> Iterator[Change]:
        """The names that stood for other ``values``."""
        left = iter(values)
        for space in (*self.spaces, *(hooks for hooks in self.empty_hooks if hooks.held)):
            before, now = dict(zip(space.names, left)), space.now()  # noqa: B905
            for name in dict.fromkeys(chain(before, now)):
                if now.get(name, ABSENT) is not before.get(name, ABSENT):
                    yield Change(space, name, before.get(name, ABSENT))


class Found(NamedTuple):
    """What a block holds at one moment."""

    layout: _Layout
    values: list[Any]
    contents: list[tuple[Space, str, Any, Any]]  # of containers: where it is, it, and a copy
    weights: list[Tensor]
    need_gradients: list[bool]
    random: dict[str, Any]
    buffers: list[tuple[nn.Module, str, Tensor | None]]  # copies: BatchNorm's, but for what torch's own forward counts


class BlockState:
    """Finds and puts back what the modules of a block hold: NOTE [ block state ].

    Args:
        modules: of the block.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = tuple(modules)
        self.look_through()
        self.draws = any(map(_may_draw, _classes(self.layers)))

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which finds its own modules when it first runs."""
        return {"modules": self.modules, "draws": self.draws, "layout": None}

    def look_through(self) -> None:
        """Find the modules and what they hold; again after a run that has added some."""
        layers = dict.fromkeys(layer for module in self.modules for layer in module.modules())
        self.layers = [layer for layer in layers if not isinstance(layer, torch.jit.ScriptModule)]
        self.scripted = [layer for layer in layers if isinstance(layer, torch.jit.ScriptModule)]
        self.is_sharded = any(isinstance(layer, FSDPModule) for layer in self.layers)
        self.owned = [Space(vars(kind), kind) for kind in _classes(self.layers)]
        spaces, hooks = list(self.owned), list[Space]()
        self.batchnorm_buffers: list[tuple[nn.Module, str]] = []
        self.tensor_dicts: list[tuple[nn.Module, str, dict[str, Tensor | None]]] = []
        for layer in self.layers:
            held = vars(layer)
            self.owned.append(Space(held, layer))
            spaces += [] if _is_constant(layer) else self.owned[-1:]
            kinds = ["module"] if self.is_sharded else ["module", "parameter"]
            if isinstance(layer, _BatchNorm):
                counted = STATISTICS if type(layer).forward in FORWARDS_OF_TORCH else ()
                self.batchnorm_buffers += [(layer, name) for name in layer._buffers if name not in counted]
            else:
                kinds.append("buffer")
            spaces += [Space(held[f"_{kind}s"], layer, is_part=True) for kind in kinds]
            self.tensor_dicts += [(layer, kind, held[f"_{kind}s"]) for kind in kinds[1:]]
            hooks += [Space(held[name], layer, is_part=True) for name in OF_HOOKS]
        spaces += [one for one in hooks if one.held]
        self.layout = _Layout(spaces, [one for one in hooks if not one.held])
        self.weights = [one for _, kind, _, one in self.tensors() if kind == "parameter" and not is_lazy(one)]
        own = [(space, *item) for space in self.owned for item in space.now().items() if item[0] not in OF_TORCH]
        self.containers = [(space, name) for space, name, value in own if isinstance(value, CONTAINERS)]
        self.watched = [(space, name) for space, name, value in own if isinstance(value, (Tensor, tuple, *CONTAINERS))]

    def tensors(self) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
        """Parameters and buffers with owner, kind and name; not BatchNorm's statistics, nor weights in shards."""
        for layer, kind, held in self.tensor_dicts:
            yield from ((layer, kind, name, tensor) for name, tensor in held.items() if tensor is not None)

    def attributes(self) -> Iterator[tuple[nn.Module | type, str, Any]]:
        """Those that are not torch's, with their owners and names."""
        for space in self.owned:
            yield from ((space.owner, *item) for item in space.now().items() if item[0] not in OF_TORCH)

    def find(self) -> Found:
        """What they hold now."""
        values = self.layout.values() if self.layout else None
        if values is None:
            self.look_through()
            return self.find()
        contents = [
            (space, name, held, copied(held))
            for space, name in self.containers
            if isinstance(held := space.get(name), CONTAINERS)
        ]
        return Found(
            self.layout,
            values,
            contents,
            self.weights,
            [*map(_needs_gradient, self.weights)],
            random_numbers() if self.draws else {},
            [(layer, name, clone_of(layer._buffers[name])) for layer, name in self.batchnorm_buffers],
        )

    def changes(self, found: Found) -> list[Change]:
        """The names that stand for other values now."""
        now = found.layout.values()
        if now is not None and all(map(is_, now, found.values)):
            return []
        return list(found.layout.changes(found.values))

    def run_with(self, found: Found, function: Callable[..., Any], *inputs: Any) -> Any:
        """``function(*inputs)`` with what was found; afterwards all is as it was before."""
        changes = self.changes(found)
        if any(map(self._is_new, changes)):
            self.look_through()
        is_simple = not (changes or found.contents or found.random or found.buffers)
        now = found if is_simple else self.find()
        buffers = [(layer, name, layer._buffers[name]) for layer, name, _ in found.buffers]
        self._set(found, changes)
        for layer, name, buffer in found.buffers:
            layer._buffers[name] = clone_of(buffer)
        for space, name, _, content in found.contents:
            space.set(name, copied(content))
        try:
            return function(*inputs)
        finally:
            for layer, name, buffer in buffers:
                layer._buffers[name] = buffer
            self.put_back(now)

    def _is_new(self, change: Change) -> bool:
        is_watched = isinstance(change.space.get(change.name), (Tensor, tuple, nn.Module, *CONTAINERS))
        known = ((space.owner is change.space.owner, name) for space, name in self.watched)
        return is_watched and (True, change.name) not in known

    def has_other_parts(self, found: Found) -> bool:
        """Whether they have other submodules, parameters, buffers or hooks than those that were found."""
        return any(change.space.is_part for change in self.changes(found))

    def put_back(self, found: Found) -> None:
        """What was found, but for the contents of containers."""
        self._set(found, self.changes(found))

    def undo(self, found: Found) -> list[Change]:
        """Put back what was found, and return what had changed."""
        changes = self.changes(found)
        changes += [
            Change(space, name, content) for space, name, held, content in found.contents if not _is_same(held, content)
        ]
        self._set(found, changes)
        return changes

    def _set(self, found: Found, changes: Iterable[Change]) -> None:
        for space, name, value in changes:
            space.set(name, value)
        if found.need_gradients != [*map(_needs_gradient, found.weights)]:
            for weight, needs_gradient in zip(found.weights, found.need_gradients, strict=True):
                weight.requires_grad_(needs_gradient)
        set_random_numbers(found.random)


def _is_constant(layer: nn.Module) -> bool:
    constants: Any = layer.__constants__ if type(layer) in CONSTANT else ()
    return type(layer) in CONSTANT and vars(layer).keys() - OF_TORCH <= {*constants, "_is_hf_initialized"}


def clone_of(tensor: Tensor | None) -> Tensor | None:
    """A copy that no graph and no dispatch mode knows of."""
    with torch.no_grad(), _disable_current_modes():
        return None if tensor is None else tensor.clone()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give ``owner`` an attribute ``name`` of its own; afterwards it is as before."""
    before = vars(owner).get(name, ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def on_copies_of_buffers(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, these layers write on copies."""
    buffers = [(layer._buffers, layer._buffers.copy()) for layer in layers]
    for held, before in buffers:
        held.update({name: clone_of(buffer) for name, buffer in before.items()})
    try:
        yield
    finally:
        for held, before in buffers:
            held.update(before)


def _classes(layers: Iterable[nn.Module]) -> list[type]:
    """The classes of ``layers`` and those that they inherit from, but for torch's and Python's."""
    found = dict.fromkeys(kind for layer in layers for kind in type(layer).__mro__)
    return [kind for kind in found if kind.__module__.partition(".")[0] not in ("torch", "builtins", "abc", "typing")]


def _may_draw(kind: type) -> bool:
    """Whether the module that defines a class has Python's or numpy's random numbers at hand."""
    names = vars(sys.modules.get(kind.__module__, random)).values()
    return any(one is random or one is np or one is np.random or _draws(one) for one in names)


def _draws(one: Any) -> bool:
    return isinstance(getattr(one, "__self__", None), random.Random | np.random.RandomState)
