"""Read a step without running it: bytes and seconds from the operators that fake tensors go through.

For a device that is not there, or a model that does not fit. Every operator takes the longer of its FLOPs at the
device's rate and its bytes at the device's bandwidth (Williams, Waterman and Patterson 2009, "Roofline",
https://doi.org/10.1145/1498765.1498785), and no less than any kernel does. Time is ideal: the ratios of blocks and
plans mean something, seconds of a real run do not. What kernels take for themselves is only as well known as the
``workspaces`` that are given.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from memsave_recipes.costs.meters import Meter, Reading
from memsave_recipes.costs.traffic import bytes_moved, has_kernel, is_view
from memsave_recipes.costs.workspaces import KernelRun
from memsave_recipes.measure.flops import CONVOLUTIONS, FORMULAS

aten = torch.ops.aten
TAKES_STORAGE = (aten.set_.source_Storage, aten.set_.source_Storage_storage_offset)
FLOPS = FORMULAS | flop_registry | {aten.addmm: FORMULAS[aten.addmm]}
"""Of what runs, the scores that a fused attention computes a second time included."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device does in a second.

    Args:
        flops_per_s: in any precision that is not in ``by_precision``.
        bytes_per_s: that its memory gives or takes.
        by_precision: FLOP/s by dtype; ``tf32`` is that of float32 convolutions.
        kernel_s: what any operator takes at least.
    """

    flops_per_s: float
    bytes_per_s: float
    by_precision: Mapping[str, float] = field(default_factory=dict)
    kernel_s: float = 0.0

    def seconds(self, operation: Any, dtype: torch.dtype, flops: float, num_bytes: int) -> float:
        """What an operator takes, by the roofline."""
        precision = str(dtype).removeprefix("torch.")
        if operation in CONVOLUTIONS and dtype == torch.float32 and "tf32" in self.by_precision:
            precision = "tf32"
        flops_per_s = self.by_precision.get(precision, self.flops_per_s)
        return max(flops / flops_per_s, num_bytes / self.bytes_per_s, self.kernel_s)


class KernelWorkspaces(Protocol):
    """What knows what the kernels of a device do besides what fake tensors show."""

    def of(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> KernelRun | None:
        """What the kernel of ``func`` does with such tensors; ``None`` where it is what fake tensors show."""


@dataclass
class PaperClock:
    """The time on paper, in seconds since the reading began; who waits for something may set it forward."""

    now: float = 0.0


@dataclass(frozen=True)
class PaperInstruments:
    """Readings of steps on fake tensors: the same every time, bytes and seconds in one run.

    Args:
        workspaces: of the kernels; without them none has any.
        allocation_bytes: every allocation is a multiple of these.
        clock: runs while a step is read.
    """

    rates: Rates
    workspaces: KernelWorkspaces | None = None
    allocation_bytes: int = 1
    clock: PaperClock = field(default_factory=PaperClock)
    repetitions: int = 0

    def read_memory(self, step: Callable[[Meter], None]) -> list[Reading]:
        """Bytes of the tensors that are alive, above those at the first boundary, and seconds by the roofline."""
        with _Operators(self) as operators:
            step(operators)
        return operators.readings

    def read_clock(self, step: Callable[[Meter], None]) -> list[float]:
        """The seconds of ``read_memory``."""
        return [reading.seconds or 0.0 for reading in self.read_memory(step)[1:]]


class _Operators(TorchDispatchMode):
    """Adds up what the operators make, release and take."""

    def __init__(self, paper: PaperInstruments) -> None:
        super().__init__()
        self.paper = paper
        self.live_bytes = 0
        self.peak_bytes = 0
        self.readings: list[Reading] = []
        self._last_s = paper.clock.now
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._seconds_of: dict[Any, float] = {}

    def note(self) -> None:
        """A boundary is here."""
        now = self.paper.clock.now
        self.readings.append(Reading(self.live_bytes, self.peak_bytes, now - self._last_s))
        self.peak_bytes, self._last_s = self.live_bytes, now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.add.Tensor and _engine_owns(args[0]):
            func = aten.add_.Tensor
        with _no_cache(args[0]) if func in TAKES_STORAGE else nullcontext():
            out = func(*args, **kwargs)
        if is_view(func):
            return out
        leaves = tree_leaves((args, kwargs))
        taken = {id(tensor.untyped_storage()) for tensor in leaves if isinstance(tensor, Tensor)}
        workspaces = self.paper.workspaces
        if workspaces and (run := workspaces.of(func, args, kwargs)):
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + run.peak_bytes)
            out = _as_the_kernel_does(out, run, taken) if run.results else out
        for storage in _storages(out):
            if id(storage) not in taken and storage not in self._known:
                self._add(storage)
        self.paper.clock.now += self._seconds(func, args, kwargs, leaves, out)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        num_bytes = rounded_up(storage.nbytes(), self.paper.allocation_bytes)
        self._known.add(storage)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, num_bytes)

    def _release(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes

    def _seconds(self, func: Any, args: Any, kwargs: dict[str, Any], leaves: list[Any], out: Any) -> float:
        key = (func, tuple(map(_shape, leaves)))
        if key not in self._seconds_of:
            self._seconds_of[key] = self._by_the_roofline(func, args, kwargs, leaves, out)
        return self._seconds_of[key]

    def _by_the_roofline(self, func: Any, args: Any, kwargs: dict[str, Any], leaves: list[Any], out: Any) -> float:
        operation = getattr(func, "_overloadpacket", None)
        tensors = [leaf for leaf in (*leaves, *tree_leaves(out)) if isinstance(leaf, Tensor)]
        if not tensors or not has_kernel(func):
            return 0.0
        count = FLOPS.get(operation)
        flops = count(*args, **kwargs, out_val=out) if count else 0
        factor = tensors[1] if operation is aten.addmm else tensors[0]  # the first of addmm is what is added
        return self.paper.rates.seconds(operation, factor.dtype, flops, bytes_moved(func, args, kwargs, out))


def _engine_owns(total: Any) -> bool:
    """Whether autograd's engine sums the gradients of a tensor that was used twice, and ``total`` is no one else's.

    It then adds in place, to real tensors outside of modes; here it asks for a new one (``can_accumulate_inplace`` in
    torch/csrc/autograd/input_buffer.cpp), while the node that made the second gradient still counts as running. A node
    that Python wrote may add for itself.
    """
    node = torch._C._current_autograd_node()
    if node is None or isinstance(node, BackwardCFunction) or torch.is_grad_enabled() or not isinstance(total, Tensor):
        return False
    return torch._C._storage_Use_Count(total.untyped_storage()._cdata) == 2  # by the tensor and by what asks


@contextmanager
def _no_cache(fake: FakeTensor) -> Iterator[None]:
    """Fake tensors remember what operators did by their arguments, and would keep a storage among these alive."""
    before = fake.fake_mode.cache_enabled
    fake.fake_mode.cache_enabled = False
    try:
        yield
    finally:
        fake.fake_mode.cache_enabled = before


def rounded_up(num_bytes: int, multiple: int) -> int:
    """The least multiple that is no less."""
    return -(-num_bytes // multiple) * multiple


def _as_the_kernel_does(out: Any, run: KernelRun, taken: set[int]) -> Any:
    """``out`` in the layouts and types of the kernel's own results, where those are not what the fake one promised."""
    leaves, form = tree_flatten(out)
    for position, (leaf, real) in enumerate(zip(leaves, run.results, strict=True)):
        if isinstance(leaf, Tensor) and _form(leaf) != _form(real) and id(leaf.untyped_storage()) not in taken:
            leaves[position] = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=leaf.device)
    return tree_unflatten(leaves, form)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return leaf if isinstance(leaf, int | float | str | bool | None) else str(leaf)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
