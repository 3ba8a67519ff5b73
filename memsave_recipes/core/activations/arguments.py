"""The call of a layer, kept for a second run: its method, the state that goes through it, and its other arguments.

NOTE [ arguments ]
1. The first run gets exactly what the model gives, and may fill lists, dicts and key-value caches. Each later run gets
   copies of them, as they were when the model called the layer, with the tensors and objects that were in them.
2. Tensors are not copied. A second run that finds one written on is refused: NOTE [ side effects ].
3. Caches of states that a layer computes with, as those of Mamba, are refused by name: with one the same layer takes
   another path, which rounds otherwise.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn

from memsave_recipes.core.activations.block_state import copied, is_cache
from memsave_recipes.core.activations.side_effects import PLAIN, leaves
from memsave_recipes.core.errors import InputError


@dataclass
class LayerCall:
    """``method`` with its arguments but the state, which is passed by position or as ``keyword``.

    Args:
        state: the list that the model gave as first argument, until the first run; ``None`` where it gave none.
    """

    method: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyword: str | None = None
    state: list[Any] | None = None
    ran: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.tensors: list[Tensor] = []
        """Among the arguments but the state."""
        self.is_plain = _collect((*self.args, *self.kwargs.values()), self.tensors)
        if not self.is_plain:
            self.tensors = [leaf for leaf in leaves(self.given) if isinstance(leaf, Tensor)]
        self.before = None if self.is_plain else (copied(self.args), copied(self.kwargs))
        self.takes_list = self.state is not None

    @property
    def given(self) -> tuple[Any, ...]:
        """The arguments but the state."""
        return self.args, self.kwargs

    def __call__(self, *state: Any) -> Any:
        """The output of the layer for a state: one tensor, or several, which the layer takes as a list."""
        is_first, self.ran = not self.ran, True
        args, kwargs = (self.args, self.kwargs) if is_first or self.before is None else copied(self.before)
        if self.takes_list:
            given, self.state = self.state, None
            state = (given if given is not None and _are_same(given, state) else list(state),)
        if self.keyword is None:
            return self.method(*state, *args, **kwargs)
        return self.method(*args, **{self.keyword: state[0]}, **kwargs)


def _are_same(some: list[Any], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _collect(values: tuple[Any, ...], tensors: list[Tensor]) -> bool:
    """Put those of ``values`` into ``tensors``, and tell whether writing on these is all that a run can change."""
    is_plain = True
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) is tuple:
            is_plain &= _collect(value, tensors)
        else:
            is_plain &= isinstance(value, PLAIN)
    return is_plain


def split_call(
    module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[LayerCall, tuple[Any, ...]]:
    """The call ``method(*args, **kwargs)`` of a layer, and the state that goes through it.

    The state is the first positional argument; without one, the first parameter or else the first tensor. There is none
    in a dict, which is an argument as any other.

    Raises:
        InputError: there is a cache of states, by NOTE [ arguments ].
    """
    if args:
        call, state = _split_args(method, args, kwargs)
    else:
        call, state = _split_kwargs(module, method, kwargs)
    if not call.is_plain and any(map(_keeps_states, chain(args, kwargs.values()))):
        raise InputError(
            f"strategy: {type(module).__name__} cannot run again with the cache of its states; "
            "call the model with use_cache=False, or set model.config.use_cache = False"
        )
    return call, state


def _split_args(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[LayerCall, tuple[Any, ...]]:
    first, *rest = args
    if isinstance(first, dict):
        return LayerCall(method, args, kwargs), ()
    if isinstance(first, list):
        return LayerCall(method, tuple(rest), kwargs, state=first), tuple(first)
    return LayerCall(method, tuple(rest), kwargs), (first,)


def _split_kwargs(
    module: nn.Module, method: Callable[..., Any], kwargs: dict[str, Any]
) -> tuple[LayerCall, tuple[Any, ...]]:
    names = _parameter_names(getattr(type(module), getattr(method, "__name__", ""), type(module).forward))
    tensors = (name for name in (*names[:1], *kwargs) if isinstance(kwargs.get(name), Tensor))
    keyword = next(tensors, None)
    others = {name: value for name, value in kwargs.items() if name != keyword}
    return LayerCall(method, (), others, keyword), () if keyword is None else (kwargs[keyword],)


def _keeps_states(value: Any) -> bool:
    return is_cache(value) and any(hasattr(layer, "recurrent_states") for layer in getattr(value, "layers", ()))


@cache
def _parameter_names(method: Callable[..., Any]) -> tuple[str, ...]:
    """Of a class's method, without ``self``."""
    return tuple(inspect.signature(method).parameters)[1:]
