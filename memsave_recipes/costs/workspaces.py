"""What the kernels of this CPU allocate for themselves, measured on each operator alone.

oneDNN brings images and weights into layouts of its own, products in bfloat16 pack their operands, sums of two dtypes
cast first: none of that is seen in the tensors that go in and come out. So each operator runs once for every shape that
it is given, on zeros, under torch's profiler.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from memsave_recipes.measure.allocations import Allocation, record_allocations

LARGEST_BYTES = 2**30  # of an operator's tensors: a larger one is not run for its workspace


@dataclass(frozen=True)
class KernelRun:
    """What an operator's kernel did: the most that it allocated, results included, and the results as meta tensors.

    Without ``results`` these are what fake tensors promise.
    """

    peak_bytes: int
    results: tuple[Any, ...]


class Workspaces:
    """Runs of operators' kernels; each is run once for every shape."""

    def __init__(self) -> None:
        self._measured: dict[Any, KernelRun | None] = {}

    def of(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> KernelRun | None:
        """What ``func`` does with tensors like these; ``None`` for one that is too large to try.

        Args:
            args, kwargs: as fake tensors.
        """
        leaves, form = tree_flatten((args, kwargs))
        key = (func, str(form), tuple(_shape(leaf) for leaf in leaves))
        if key not in self._measured:
            self._measured[key] = self._measure(func, leaves, form)
        return self._measured[key]

    def _measure(self, func: Callable[..., Any], leaves: list[Any], form: Any) -> KernelRun | None:
        if sum(leaf.untyped_storage().nbytes() for leaf in leaves if isinstance(leaf, Tensor)) > LARGEST_BYTES:
            return None
        with unset_fake_temporarily(), torch.random.fork_rng([]):
            args, kwargs = tree_unflatten(tree_map_only(Tensor, _zeros, leaves), form)
            out, events = record_allocations(lambda: func(*args, **kwargs))
            results = tuple(tree_map_only(Tensor, _on_meta, tree_leaves(out)))
        live_bytes = peak_bytes = 0
        for event in events:
            if isinstance(event, Allocation):
                live_bytes += event.num_bytes
                peak_bytes = max(peak_bytes, live_bytes)
        return KernelRun(peak_bytes, results)


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype)
    return leaf if isinstance(leaf, int | float | str | bool | None) else str(leaf)


def _zeros(like: Tensor) -> Tensor:
    storage = torch.zeros(like.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=like.dtype).set_(storage, like.storage_offset(), like.shape, like.stride())


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
