"""A model's call of one of its layers, taken apart: the state that goes from layer to layer, and all the rest.

NOTE [ caches ]
1. A second run would fill a key-value cache a second time, so every run gets a copy of it, as empty or as filled (with
   a prefix, say) as it was. Leaving it out would do for most layers; but keys that went through a cache lie otherwise
   in memory, and attention may round otherwise.
2. A cache of states that a layer computes with, as those of Mamba, is another matter: with it the same layer takes
   another path, which rounds otherwise. It is refused by name.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from memsave_recipes.errors import InputError

CACHE_NAMES = ("past_key_values", "layer_past")


@dataclass(frozen=True)
class LayerCall:
    """``method`` with all that the model gave it but the state, which it gave by position or as ``keyword``."""

    method: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyword: str | None = None
    takes_list: bool = False

    def __call__(self, *state: Any) -> Any:
        """What the layer gives for a state: one tensor, or several, which a dense layer takes as a list."""
        flowing = (list(state),) if self.takes_list else state
        args = map(_own_copy, self.args)
        kwargs = {name: _own_copy(value) for name, value in self.kwargs.items()}
        if self.keyword is None:
            return self.method(*flowing, *args, **kwargs)
        return self.method(*args, **{self.keyword: flowing[0]}, **kwargs)


def taken_apart(
    module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[LayerCall, tuple[Any, ...]]:
    """The call ``method(*args, **kwargs)`` of a layer, and the state that goes through it.

    The state is the first positional argument; without one, the first parameter or else the first tensor.

    Raises:
        InputError: there is a cache of states, by NOTE [ caches ].
    """
    names = _parameter_names(getattr(type(module), getattr(method, "__name__", ""), type(module).forward))
    kwargs = {name: _checked(module, name, value) for name, value in kwargs.items()}
    if not args:
        tensors = (name for name in (*names[:1], *kwargs) if isinstance(kwargs.get(name), Tensor))
        keyword = next(tensors, None)
        state = () if keyword is None else (kwargs.pop(keyword),)
        return LayerCall(method, (), kwargs, keyword), state
    others = tuple(
        _checked(module, names[position] if position < len(names) else "", value)
        for position, value in enumerate(args[1:], start=1)
    )
    takes_list = isinstance(args[0], list)
    return LayerCall(method, others, kwargs, takes_list=takes_list), tuple(args[0]) if takes_list else args[:1]


@cache
def _parameter_names(method: Callable[..., Any]) -> tuple[str, ...]:
    """Of a class's method, without ``self``."""
    return tuple(inspect.signature(method).parameters)[1:]


def _checked(module: nn.Module, name: str, value: Any) -> Any:
    """An argument of a layer, by NOTE [ caches ]."""
    if name == "use_cache":
        return False
    if any(hasattr(layer, "recurrent_states") for layer in getattr(value, "layers", ())):
        raise InputError(
            f"--activation_checkpointing: {type(module).__name__} cannot run again with the cache of its states; "
            "call the model with use_cache=False, or set model.config.use_cache = False"
        )
    return None if name in CACHE_NAMES and not (_is_cache(value) or isinstance(value, tuple)) else value


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")


def _own_copy(value: Any) -> Any:
    """A cache that a run may fill; anything else as it is."""
    if not _is_cache(value):
        return value
    own = copy.copy(value)
    for name, part in vars(value).items():
        if isinstance(part, list):
            setattr(own, name, [copy.copy(layer) for layer in part])
        elif isinstance(part, dict) or _is_cache(part):
            setattr(own, name, _own_copy(part) if _is_cache(part) else dict(part))
    return own
