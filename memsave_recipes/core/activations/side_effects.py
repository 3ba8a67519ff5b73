"""What a block changes beside its outputs: put back before it runs again, or refused by name.

Notes: ``docs/design/activations.md``.
"""

import warnings
from collections import UserDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from operator import attrgetter, ne
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from memsave_recipes.core.activations.block_state import (
    OF_TORCH,
    RANDOM,
    BlockState,
    Change,
    Found,
    Space,
    is_cache,
    on_copies_of_buffers,
    random_numbers,
    set_random_numbers,
)
from memsave_recipes.core.errors import InputError

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
KINDS = ("parameter", "buffer")
"""Of the tensors of modules."""
_LOOKED_AT: WeakSet[nn.Module] = WeakSet()
"""Modules whose first run was looked at by rule 4."""
_version = attrgetter("_version")

Owner = nn.Module | type


class SideEffects:
    """Of the runs of a block.

    Args:
        modules: of the block.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.state = BlockState(modules)
        self.is_looked_at = False

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
        found: Found | None = None
        given: tuple[Any, ...] = getattr(function, "given", ())
        tensors_given: list[Tensor] = getattr(function, "tensors", [])
        writes = _writes_on(tensors_given)

        def first(*inputs: Any) -> Any:
            nonlocal found
            found = self.state.find()
            if self.state.scripted:
                raise InputError(
                    f"strategy: TorchScript runs a part of {self._name} otherwise in its first runs than later, so no "
                    "plan can run it a second time: use none"
                )
            if not self.is_looked_at:
                outputs, found = self._looked_at_closely(found, given, function, *inputs)
                return outputs
            watched = _Tensors(self.state)
            outputs = function(*inputs)
            if refusal := watched.refusal():
                raise refusal
            if writes != _writes_on(tensors_given):
                raise refusal_of(self.state.modules[0], "writes on a tensor that it is given")
            return outputs

        def later(*inputs: Any) -> Any:
            if writes != _writes_on(tensors_given):
                raise InputError(
                    f"strategy: a tensor that {self._name} is given beside its input is written on after it ran, so a "
                    "second run would compute with other numbers: write out of place (t = t + 1), or use none"
                )
            return self.state.run_with(found, function, *inputs) if found else function(*inputs)

        return first, later

    @property
    def _name(self) -> str:
        return type(self.state.modules[0]).__name__

    def _looked_at_closely(
        self, found: Found, given: Any, function: Callable[..., Any], *inputs: Any
    ) -> tuple[Any, Found]:
        """The outputs of the first run of all, and what the second run begins with: rules 4 and 5."""
        state = self.state
        look, drawn = _CloseLook(state, given), random_numbers()
        outputs = function(*inputs)
        if random_numbers() != drawn:
            state.draws = True
            found.random.update(drawn)
        if refusal := look.refusal_of_given():
            raise refusal
        refusal, has_other_parts = look.refusal(), state.has_other_parts(found)
        state.look_through()
        if refusal is not None or has_other_parts:
            set_up = state.find()
            if self._leaves_alone(set_up, given, function, *inputs):
                found = set_up
            elif refusal is not None:
                raise refusal
        self.is_looked_at = True
        if look.has_seen_all:
            _LOOKED_AT.update(state.layers)
        return outputs, found

    def _leaves_alone(self, found: Found, given: Any, function: Callable[..., Any], *inputs: Any) -> bool:
        """Whether one more run, on other inputs, changes nothing of what is refused and no parts."""
        tensors = [one for one in inputs if isinstance(one, Tensor)]
        if not all(type(one) in (Tensor, nn.Parameter) for one in tensors):
            return False
        look, python_and_numpy = _CloseLook(self.state, given), random_numbers()
        others = list(map(_another, inputs))
        leaves_alone = False

        def run() -> None:
            nonlocal leaves_alone
            function(*others)
            leaves_alone = look.refusal() is None and not self.state.has_other_parts(found)

        devices = [one.device for one in tensors if one.device.type != "cpu"]
        kind = devices[0].type if devices else "cuda"
        kept = torch.random.fork_rng(devices, device_type=kind)
        batchnorms = [layer for layer in self.state.layers if isinstance(layer, _BatchNorm)]
        with suppress(Exception), torch.no_grad(), _disable_current_modes(), kept, on_copies_of_buffers(batchnorms):
            self.state.run_with(found, run)
        set_random_numbers(python_and_numpy)
        return leaves_alone


@torch.no_grad()
def _another(value: Any) -> Any:
    """Other numbers in the form of a tensor."""
    return value * 2 + 1 if isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def undone(module: nn.Module) -> Iterator[list[Change]]:
    """Put back the attributes that runs of ``module`` inside have changed; afterwards the list has these changes.

    Raises:
        InputError: it writes on a tensor.
    """
    state, changes = BlockState([module]), list[Change]()
    found, tensors, drawn = state.find(), _Tensors(state), random_numbers()
    try:
        yield changes
    finally:
        if refusal := tensors.refusal():
            raise refusal
        changes += state.undo(found)
        changes += [Change(Space({}, module), name, was) for name, was in drawn.items() if RANDOM[name][0]() != was]
        set_random_numbers(drawn)


class _Tensors:
    """Those of a block, and how often each has been written on."""

    def __init__(self, state: BlockState) -> None:
        self.state = state
        self.tensors = [one for _, _, held in state.tensor_dicts for one in held.values() if one is not None]
        for space, name in state.watched:
            self.tensors += [leaf for leaf in leaves(space.get(name)) if isinstance(leaf, Tensor)]
        self.writes = _writes_on(self.tensors)

    def refusal(self) -> InputError | None:
        """Why the block cannot run again, if one has been written on since."""
        now = _writes_on(self.tensors)
        return None if now == self.writes else self.refusal_of([*map(ne, now, self.writes)].index(True))

    def refusal_of(self, index: int) -> InputError:
        """The refusal that names one of the tensors."""
        attributes = (
            (owner, "tensor", name, leaf) for owner, name, value in self.state.attributes() for leaf in leaves(value)
        )
        for owner, kind, name, tensor in (*self.state.tensors(), *attributes):
            if tensor is self.tensors[index]:
                return refusal_of(owner, f"writes on its {kind} {name}")
        return refusal_of(self.state.modules[0], "writes on a tensor that it holds")


class _CloseLook:
    """At all that a block may change, before and after a run: rule 4.

    Where its modules have been looked at before, under another plan, nothing is that a device would have to wait for.
    """

    def __init__(self, state: BlockState, given: Any) -> None:
        self.kinds = ("buffer",) if state.is_sharded else KINDS
        self.state, self.given = state, [leaf for leaf in leaves(given) if not isinstance(leaf, PLAIN)]
        self.tensors = _Tensors(state)
        self.tensors_given = [leaf for leaf in self.given if isinstance(leaf, Tensor)]
        self.writes = _writes_on(self.tensors_given)
        self.gradients = self._gradients()
        self.is_new = any(layer not in _LOOKED_AT for layer in state.layers)
        self.sums = self._sums()
        self.objects = [(*found, self._state_of(found[-1])) for found in self._objects()]
        looked_at = self.given if self.is_new else ()
        given = ((state.modules[0], f"{_changes_a(one)} that it is given", one) for one in looked_at)
        self.objects_given = [(*found, self._state_of(found[-1])) for found in given]

    @property
    def has_seen_all(self) -> bool:
        """Whether all tensors have bits to add up."""
        return all(sums is not None for sums in self.sums)

    def refusal(self) -> InputError | None:
        """Why the block cannot run again, by what has changed since of what its modules hold."""
        if refusal := self.tensors.refusal():
            return refusal
        if self.gradients != self._gradients():
            return refusal_of(self.state.modules[0], "adds to the gradients of its weights")
        for index, (was, now) in enumerate(zip(self.sums, self._sums(), strict=True)):
            if was != now:
                return self.tensors.refusal_of(index)
        return self._refusal_of_objects(self.objects)

    def refusal_of_given(self) -> InputError | None:
        """The same of what it is given."""
        if self.writes != _writes_on(self.tensors_given):
            return refusal_of(self.state.modules[0], "writes on a tensor that it is given")
        return self._refusal_of_objects(self.objects_given)

    def _refusal_of_objects(self, objects: list[tuple[Owner, str, Any, list[Any]]]) -> InputError | None:
        changed = (refusal_of(owner, what) for owner, what, one, was in objects if self._state_of(one) != was)
        return next(changed, None)

    def _gradients(self) -> list[Any]:
        gradients = [weight.grad for weight in self.state.weights]
        return [gradient if gradient is None else (id(gradient), gradient._version) for gradient in gradients]

    def _sums(self) -> list[int | None]:
        with torch.no_grad(), _disable_current_modes():
            return [_sum_of_bits(tensor) for tensor in self.tensors.tensors] if self.is_new else []

    def _state_of(self, value: Any) -> list[Any]:
        with torch.no_grad(), _disable_current_modes():
            return _state_of(value, self.kinds, known=self.state.layers)

    def _objects(self) -> Iterator[tuple[Owner, str, Any]]:
        """Those that modules hold, and what to say where they change."""
        for owner, name, value in self.state.attributes() if self.is_new else ():
            if name != "forward" and not _is_ours(value):
                objects = (leaf for leaf in leaves(value) if not isinstance(leaf, (Tensor, set, *PLAIN)))
                yield from ((owner, f"changes its {name}", leaf) for leaf in objects)


def _changes_a(given: Any) -> str:
    return "writes on a tensor" if isinstance(given, Tensor) else f"changes a {type(given).__name__}"


def leaves(value: Any) -> Iterator[Any]:
    """What is in lists, deques, dicts and tuples, at any depth, and the tensors of caches."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, (Tensor, *PLAIN)):
            yield one
        elif is_cache(one):
            parts = [*vars(one).values(), *map(vars, getattr(one, "layers", ()))]
            yield from (leaf for leaf in leaves(parts) if isinstance(leaf, Tensor))
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, SEQUENCES):
            left += one
        elif isinstance(one, UserDict):
            left.append(one.data)
        else:
            yield one


def _writes_on(tensors: Iterable[Tensor]) -> list[int]:
    """How often each has been written on, as far as torch counts it."""
    try:
        return [*map(_version, tensors)]
    except (RuntimeError, ValueError):
        return [-1 if is_lazy(one) or one.is_inference() else one._version for one in tensors]


def _sum_of_bits(tensor: Tensor, max_bytes: float = inf) -> int | None:
    """``None`` of what has no bits here: fake tensors, those in shards, on the meta device or with freed storages."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.layout != torch.strided:
        return None
    if tensor.nbytes > max_bytes:
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
            state += [id(one), *_writes_on([one]), _sum_of_bits(one, MAX_BYTES)]
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
        return [value.gi_frame and (value.gi_frame.f_lasti, value.gi_frame.f_locals), value.gi_yieldfrom]
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


def refusal_of(owner: Owner, what: str) -> InputError:
    """Of a block that changes what cannot be put back."""
    kind = owner if isinstance(owner, type) else type(owner)
    return InputError(
        f"strategy: {kind.__name__} {what} in every forward, so no plan can run it a second time: use none"
    )
