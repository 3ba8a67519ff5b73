"""What an operator moves through the memory of a device: the bytes that its kernel, if it has one, reads and writes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

NO_KERNEL = {
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided),
    *(aten.set_, aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.unsafe_chunk),
}
"""Operators that compute nothing, besides those that say so: memory without values, and views in disguise."""

UNREAD = {
    **dict.fromkeys((aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like), 0),
    **dict.fromkeys((aten.new_zeros, aten.new_ones, aten.new_full, aten.copy_, aten.fill_, aten.zero_), 0),
    aten.nll_loss_backward: 1,
}
"""The argument that gives no more than its shape, or the place for the result."""

PICKS = {aten.index, aten.gather, aten.index_select, aten.embedding, aten.nll_loss_forward}
"""Operators that read of their first argument as much as they return."""

PUTS = {aten.index_put_, aten.scatter_, aten.scatter_add_, aten.index_add_, aten.index_copy_}
"""Operators that change as many elements of their first argument as the largest of the others has."""


def is_view(func: Any) -> bool:
    """Whether an operator only looks at memory in another way, or asks about it (``prim.device``)."""
    return getattr(func, "is_view", False) or getattr(func, "namespace", None) == "prim"


def has_kernel(func: Any) -> bool:
    """Whether an operator gives the device anything to do."""
    in_place_view = torch.Tag.inplace_view in getattr(func, "tags", ())
    return not (is_view(func) or in_place_view or getattr(func, "_overloadpacket", None) in NO_KERNEL)


def bytes_moved(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """What the kernel of ``func`` reads and writes.

    Args:
        args, kwargs: of the call.
        out: its result.
    """
    operation = getattr(func, "_overloadpacket", None)
    written = _tensors(out)
    if operation in PICKS:
        return _bytes(_tensors((args[1:], kwargs))) + 2 * _bytes(written)
    if operation in PUTS:
        others = _tensors((args[1:], kwargs))
        return _bytes(others) + 2 * args[0].itemsize * max(tensor.numel() for tensor in others)
    unread = UNREAD.get(operation) if operation else None
    read = _tensors(([arg for position, arg in enumerate(args) if position != unread], {**kwargs, "out": None}))
    return _bytes(read) + _bytes(written)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _bytes(tensors: list[Tensor]) -> int:
    """Of an expanded tensor what there is of it in memory."""
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)
