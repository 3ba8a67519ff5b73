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

from memsave_recipes.activations.block_state import copied, is_cache
from memsave_recipes.activations.side_effects import PLAIN
from memsave_recipes.errors import InputError


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
        self.is_plain = all(map(_is_plain, chain(self.args, self.kwargs.values())))
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


def _is_plain(value: Any) -> bool:
    """Whether no run can change an argument but by writing on a tensor."""
    return all(map(_is_plain, value)) if type(value) is tuple else isinstance(value, (Tensor, *PLAIN))


def split_call(
    module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[LayerCall, tuple[Any, ...]]:
    """The call ``method(*args, **kwargs)`` of a layer, and the state that goes through it.

    The state is the first positional argument; without one, the first parameter or else the first tensor. There is none
    in a dict, which is an argument as any other.

    Raises:
        InputError: there is a cache of states, by NOTE [ arguments ].
    """
    for value in chain(args, kwargs.values()):
        if is_cache(value) and any(hasattr(layer, "recurrent_states") for layer in getattr(value, "layers", ())):
            raise InputError(
                f"strategy: {type(module).__name__} cannot run again with the cache of its states; "
                "call the model with use_cache=False, or set model.config.use_cache = False"
            )
    if not args:
        names = _parameter_names(getattr(type(module), getattr(method, "__name__", ""), type(module).forward))
        tensors = (name for name in (*names[:1], *kwargs) if isinstance(kwargs.get(name), Tensor))
        keyword = next(tensors, None)
        others = {name: value for name, value in kwargs.items() if name != keyword}
        return LayerCall(method, (), others, keyword), () if keyword is None else (kwargs[keyword],)
    first, *rest = args
    if isinstance(first, dict):
        return LayerCall(method, args, kwargs), ()
    if isinstance(first, list):
        return LayerCall(method, tuple(rest), kwargs, state=first), tuple(first)
    return LayerCall(method, tuple(rest), kwargs), (first,)


@cache
def _parameter_names(method: Callable[..., Any]) -> tuple[str, ...]:
    """Of a class's method, without ``self``."""
    return tuple(inspect.signature(method).parameters)[1:]
