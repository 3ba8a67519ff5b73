"""Read a step without running it: bytes and seconds from the operators that fake tensors go through.

For a device that is not there, or a model that does not fit. Every operator takes the longer of its FLOPs at the
device's rate and its bytes at the device's bandwidth (Williams, Waterman and Patterson 2009, "Roofline",
https://doi.org/10.1145/1498765.1498785). Workspaces inside kernels are not seen, and time is ideal: the ratios of
blocks and plans mean something, seconds of a real run do not.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from memsave_recipes.costs.meters import Meter, Reading


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device does in a second, in the precision of the run."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class PaperInstruments:
    """Readings of steps on fake tensors; the same every time, so one is enough."""

    rates: Rates
    repetitions: int = 1

    def read_memory(self, step: Callable[[Meter], None]) -> list[Reading]:
        """Bytes of the tensors that are alive, above those at the first boundary."""
        with _Operators(self.rates) as operators:
            step(operators)
        return [Reading(live, peak) for live, peak, _ in operators.boundaries]

    def read_clock(self, step: Callable[[Meter], None]) -> list[float]:
        """Seconds between the boundaries, by the roofline."""
        with _Operators(self.rates) as operators:
            step(operators)
        return [later - earlier for (_, _, earlier), (_, _, later) in pairwise(operators.boundaries)]


class _Operators(TorchDispatchMode):
    """Adds up what the operators make, release and take."""

    def __init__(self, rates: Rates) -> None:
        super().__init__()
        self.rates = rates
        self.live_bytes = self.peak_bytes = 0
        self.seconds = 0.0
        self.boundaries: list[tuple[int, int, float]] = []  # live bytes, peak bytes, seconds
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def note(self) -> None:
        """A boundary is here."""
        self.boundaries.append((self.live_bytes, self.peak_bytes, self.seconds))
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        taken = {id(storage) for storage in _storages((args, kwargs))}
        out = func(*args, **kwargs)
        for storage in _storages(out):
            if id(storage) not in taken and storage not in self._known:
                self._add(storage)
        self.seconds += self._seconds(func, args, kwargs, out)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        self._known.add(storage)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, num_bytes)

    def _release(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes

    def _seconds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
        if getattr(func, "is_view", False):
            return 0.0
        count = flop_registry.get(getattr(func, "_overloadpacket", None))
        flops = count(*args, **kwargs, out_val=out) if count else 0
        num_bytes = sum(tensor.nbytes for tensor in _tensors((args, kwargs, out)))
        return max(flops / self.rates.flops_per_s, num_bytes / self.rates.bytes_per_s)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    return (tensor.untyped_storage() for tensor in _tensors(values))
