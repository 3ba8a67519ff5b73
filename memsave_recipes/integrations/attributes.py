"""Put back attributes of objects: the numbers, lists and tensors in which trainers and modules keep metrics."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

MAX_ELEMENTS = 100_000
"""Of an attribute that is put back. Larger ones are data and weights, which no forward changes."""
CONTAINERS = (dict, list, set, deque)
_ABSENT = object()


@contextmanager
def preserve_attributes(owners: Iterable[Any]) -> Iterator[None]:
    """Afterwards the attributes of ``owners`` are as they were: numbers, texts, tensors, and containers of these.

    Other objects are put back where they were, and not changed themselves.
    """
    kept = [
        (vars(owner), {name: _restorer(value) for name, value in vars(owner).items() if _is_small(value)})
        for owner in owners
    ]
    names = [set(attributes) for attributes, _ in kept]
    try:
        yield
    finally:
        for (attributes, restorers), before in zip(kept, names, strict=True):
            for added in attributes.keys() - before:
                del attributes[added]
            attributes.update({name: restore() for name, restore in restorers.items()})


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, ``owner`` has an attribute ``name`` of its own; afterwards as before."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _is_small(value: Any) -> bool:
    return _num_elements(value) <= MAX_ELEMENTS


def _num_elements(value: Any) -> float:
    if isinstance(value, Tensor):
        return value.numel()
    if not isinstance(value, CONTAINERS):
        return 1
    if len(value) > MAX_ELEMENTS:
        return inf
    return sum(map(_num_elements, value.values() if isinstance(value, dict) else value))


def _restorer(value: Any) -> Callable[[], Any]:
    """Puts ``value`` back as it is now, and returns it."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return _tensor_restorer(value)
    if isinstance(value, dict):
        return _dict_restorer(value)
    return _collection_restorer(value) if isinstance(value, CONTAINERS) else lambda: value


def _tensor_restorer(tensor: Tensor) -> Callable[[], Tensor]:
    version, kept = tensor._version, tensor.detach().clone()

    @torch.no_grad()
    def restore() -> Tensor:
        if tensor._version != version:
            tensor.copy_(kept)
        return tensor

    return restore


def _dict_restorer(entries: dict[Any, Any]) -> Callable[[], Any]:
    restorers = {key: _restorer(entry) for key, entry in entries.items()}

    def restore() -> Any:
        put_back = {key: restore() for key, restore in restorers.items()}
        entries.clear()
        entries.update(put_back)
        return entries

    return restore


def _collection_restorer(items: Any) -> Callable[[], Any]:
    restorers = [_restorer(item) for item in items]

    def restore() -> Any:
        put_back = [restore() for restore in restorers]
        items.clear()
        (items.update if isinstance(items, set) else items.extend)(put_back)
        return items

    return restore
