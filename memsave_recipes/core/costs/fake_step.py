"""Read a step without running it: bytes and seconds from the operators that fake tensors go through.

Every operator takes the longer of its FLOPs at the device's rate and its bytes at the device's bandwidth (Williams,
Waterman and Patterson 2009, "Roofline", https://doi.org/10.1145/1498765.1498785), and no less than any kernel does. By
the rates of a data sheet the time is a bound; by calibrated ones it is what to expect of a device that need not wait.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.function import BackwardCFunction, Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from memsave_recipes.core.activations.block_state import replaced
from memsave_recipes.core.costs.throughput import CONVOLUTIONS, FORMULAS_OF_ALL_THAT_RUNS
from memsave_recipes.core.costs.trace_events import DeviceInstruments, Meter, Reading
from memsave_recipes.core.plans.chain import CPU, allocated_bytes

aten = torch.ops.aten

NO_KERNEL = {
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided),
    *(aten.set_, aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.unsafe_chunk),
    aten.lift_fresh,
}
"""Operators that compute nothing, besides those tagged as views: empty memory, and views without the tag."""

UNREAD = {
    **dict.fromkeys((aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like), 0),
    **dict.fromkeys((aten.new_zeros, aten.new_ones, aten.new_full, aten.copy_, aten.fill_, aten.zero_), 0),
    aten.nll_loss_backward: 1,
}
"""The argument of which only the shape is read, or that takes the result."""

PICKS = {aten.index, aten.gather, aten.index_select, aten.embedding, aten.nll_loss_forward}
"""Operators that read as much of their first argument as they return."""

PUTS = {aten.index_put_, aten.scatter_, aten.scatter_add_, aten.index_add_, aten.index_copy_}
"""Operators that change as many elements of their first argument as the largest of the others has."""


def is_view(func: Any) -> bool:
    """Return whether an operator only looks at memory in another way, or asks about it (``prim.device``)."""
    return getattr(func, "is_view", False) or getattr(func, "namespace", None) == "prim"


def bytes_moved(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes that the kernel of ``func`` reads and writes in the call whose result is ``out``."""
    operation = getattr(func, "_overloadpacket", None)
    written = _tensors(out)
    if operation in PICKS:
        return _bytes(_tensors((args[1:], kwargs))) + 2 * _bytes(written)
    if operation in PUTS:
        others = _tensors((args[1:], kwargs))
        target: Tensor = args[0]
        return _bytes(others) + 2 * target.itemsize * max(tensor.numel() for tensor in others)
    unread = UNREAD.get(operation) if operation else None
    read = _tensors(([arg for position, arg in enumerate(args) if position != unread], {**kwargs, "out": None}))
    return _bytes(read) + _bytes(written)


def extent_of(operation: Any, factors: Sequence[Tensor], flops: float) -> float:
    """Return what the rate of a kernel depends on: the smallest side of its product, or the length of its rows.

    Attention in ``flops``: two products of (T, D) and (D, T) a head, five in the backward.

    Args:
        factors: (..., M, K) and (..., K, N); of a convolution its input and weight; of attention queries and keys.
            Those of a backward of the latter two come after the gradient.
    """
    if not flops:
        return 0.0
    name = str(operation)
    first = 1 if name.endswith("backward") else 0
    if "att" in name:
        return flops / ((10 if first else 4) * factors[first].numel())
    if operation in CONVOLUTIONS:
        num_out, *others = factors[first + 1].shape
        return float(min(num_out, prod(others)))
    return float(min(*factors[0].shape[-2:], *factors[1].shape[-2:]))


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _bytes(tensors: list[Tensor]) -> int:
    """Add up the bytes in memory: what an expanded tensor repeats, and where windows overlap, counts once."""
    return sum(tensor.itemsize * _num_places(tensor.shape, tensor.stride()) for tensor in tensors)


def _num_places(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many different elements of a storage a view of it has, at most."""
    if 0 in shape:
        return 0
    steps = [(size, stride) for size, stride in zip(shape, strides, strict=True) if stride]
    return min(prod(size for size, _ in steps), 1 + sum((size - 1) * stride for size, stride in steps))


LARGEST_BYTES = 2**30  # of an operator's tensors: a larger one is not run for its workspace


@dataclass(frozen=True)
class KernelRun:
    """A run of an operator's kernel: its peak of allocated bytes, results included, and the results as meta tensors.

    No ``results`` mean those of the fake tensors.
    """

    peak_bytes: int
    results: tuple[Any, ...]


class Workspaces:
    """Runs of operators' kernels on this CPU, once for every shape, on zeros.

    Neither inputs nor results show the memory that kernels allocate for themselves: oneDNN's layouts, packed operands.
    """

    def __init__(self) -> None:
        self._measured: dict[Any, KernelRun | None] = {}

    def of(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> KernelRun | None:
        """Return the run of ``func`` with tensors like these fake ones; ``None`` if they are too large to try."""
        key = func, _key((args, kwargs))
        if key not in self._measured:
            self._measured[key] = self._measure(func, args, kwargs)
        return self._measured[key]

    def _measure(self, func: Callable[..., Any], *call: Any) -> KernelRun | None:
        leaves, form = tree_flatten(call)
        if sum(leaf.untyped_storage().nbytes() for leaf in leaves if isinstance(leaf, Tensor)) > LARGEST_BYTES:
            return None
        with unset_fake_temporarily(), _same_random_numbers_after():
            args, kwargs = tree_unflatten(tree_map_only(Tensor, _zeros, leaves), form)
            outs: list[Any] = []

            def run(meter: Meter) -> None:
                outs.append(func(*args, **kwargs))
                meter.mark()

            (reading,) = DeviceInstruments(CPU).read_memory(run)
            return KernelRun(reading.peak_bytes, tuple(tree_map_only(Tensor, _on_meta, tree_leaves(outs))))


@contextmanager
def _same_random_numbers_after() -> Iterator[None]:
    """Do as ``torch.random.fork_rng([])``, without the function that ``seeing_random_states`` counts."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def _zeros(like: Tensor) -> Tensor:
    storage = torch.zeros(like.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=like.dtype).set_(storage, like.storage_offset(), like.shape, like.stride())


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


SAVES_NUMBERS = (aten.mul.Tensor, aten.div.Tensor)
"""Operators whose second factor autograd saves; a number, too, as a tensor of its own, which passes no hook."""

NUMBER_BYTES = 8
"""Of such a number; counted to the end of the step."""

TAKES_STORAGE = (aten.set_.source_Storage, aten.set_.source_Storage_storage_offset)
NAMES_OFFSET = aten.as_strided.default
"""Its result does not begin where its argument does, but at the offset that is given."""

GROUPED_PRODUCT = aten._grouped_mm.default
MAKES_OF_NUMBERS = aten.lift_fresh.default
"""Of ``torch.tensor``: a view by its tag, of memory on the host that no operator has made."""
ASKS_DEVICE = torch.ops.prim.device.default
DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""Tags of operators whose result, or an argument after it, is not known by the forms of the arguments."""

HASHED = (int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


SecondsOf: TypeAlias = Callable[[Any, torch.dtype, float, int, float], float]
"""The time of an operator on a device: with factors of this dtype, so many FLOPs, bytes read or written, and the result
of ``extent_of``."""

WorkspaceOf: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], KernelRun | None]
"""The run of an operator's kernel on a device with such arguments; ``None`` where it has no workspace."""

Maker: TypeAlias = Callable[[tuple[Any, ...]], Any]
"""Makes the results of an operator again, from arguments of the same forms."""


@dataclass
class SimulatedClock:
    """Simulated time, in seconds since the reading began; waiting sets it forward."""

    now: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FakeInstruments(DeviceInstruments):
    """Readings of steps on fake tensors: the same every time, bytes and seconds in one run.

    On a CPU states of the generator that checkpoints keep count, and numbers that autograd saves: they are on no other
    device.

    Args:
        workspace_of: an operator's kernel; without it none has any.
        clock: runs while a step is read.
        known: operators of the model whose steps are read, which earlier readings may share.
    """

    seconds_of: SecondsOf
    workspace_of: WorkspaceOf | None = None
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    known: "KnownOperators" = field(default_factory=lambda: KnownOperators())
    repetitions: int = 0

    def read_memory(self, step: Callable[[Meter], None]) -> list[Reading]:
        """Read the bytes of the tensors that are alive, above those at the beginning, and seconds by the roofline."""
        operators = _Operators(self)
        with operators, operators.seeing_random_states() if self.device.type == "cpu" else nullcontext():
            step(operators)
        return operators.readings


class _Operators(TorchDispatchMode):
    """Adds up the bytes that operators allocate and release, and their time."""

    def __init__(self, instruments: FakeInstruments) -> None:
        TorchDispatchMode.__init__(self)
        self.instruments = instruments
        self.live_bytes = 0
        self.peak_bytes = 0
        self.readings: list[Reading] = []
        self._last_s = instruments.clock.now
        self._counted_storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def mark(self) -> None:
        """Read a boundary."""
        now = self.instruments.clock.now
        self.readings.append(Reading(self.live_bytes, self.peak_bytes, now - self._last_s))
        self.peak_bytes, self._last_s = self.live_bytes, now

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without torch's guard of code in modes against compilers, operators take less time."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Layers are compiled as without it (``compiled_layers.py``)."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ASKS_DEVICE:
            return getattr(args[0], "fake_device", args[0].device)
        kwargs = kwargs or {}
        if func is aten.add.Tensor and _engine_owns(args[0]):
            func = aten.add_.Tensor
        if func in TAKES_STORAGE:
            if not isinstance(args[0], FakeTensor):  # an integer, made with values
                args = aten.empty.memory_format([0], dtype=args[0].dtype, device="cpu"), *args[1:]
            # Below ``FakeTensorMode``, whose cache would keep that storage alive.
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                return args[0].set_(*args[1:])
        if self.instruments.known.runs_values and func in INDEXES:
            args = _with_places(args)
        key, out = self.instruments.known.results_of(func, args, kwargs)
        if is_view(func) and not (func is MAKES_OF_NUMBERS and self.instruments.device.type == "cpu"):
            return out
        with torch._C.DisableTorchFunction():
            return self._counted(func, args, kwargs, key, out)

    def _counted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable, out: Any) -> Any:
        """Add the bytes and seconds of ``out``, and return it in the form that the kernel gives it."""
        saves_number = func in SAVES_NUMBERS and torch.is_grad_enabled() and not isinstance(args[1], Tensor)
        if saves_number and self.instruments.device.type == "cpu":
            self.live_bytes += NUMBER_BYTES
        taken = {id(storage) for storage in _storages((args, kwargs))}
        workspace_of = None if _has_values(out) else self.instruments.workspace_of
        if workspace_of and (run := workspace_of(func, args, kwargs)):
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + run.peak_bytes)
            out = _as_the_kernel_does(out, run, taken) if run.results else out
        for storage in _storages(out):
            if id(storage) not in taken and storage not in self._counted_storages:
                self._add(storage)
        seconds_of = self.instruments.known.seconds
        if key not in seconds_of:
            seconds_of[key] = self._by_the_roofline(func, args, kwargs, out)
        self.instruments.clock.now += seconds_of[key]
        return out

    def seeing_random_states(self) -> AbstractContextManager[None]:
        """Count the states that torch's checkpoints read: they are no fake tensors and pass no mode."""
        read = torch.get_rng_state

        def seen() -> Tensor:
            state = read()
            self._add(state.untyped_storage())
            return state

        return replaced(torch, "get_rng_state", seen)

    def _add(self, storage: torch.UntypedStorage) -> None:
        num_bytes = allocated_bytes([storage.nbytes()], self.instruments.device)
        self._counted_storages.add(storage)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, num_bytes)

    def _release(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes

    def _by_the_roofline(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> float:
        operation = getattr(func, "_overloadpacket", None)
        tensors = _tensors((args, kwargs, out))
        if not tensors or operation in NO_KERNEL or torch.Tag.inplace_view in getattr(func, "tags", ()):
            return 0.0
        count = FORMULAS_OF_ALL_THAT_RUNS.get(operation)
        flops = count(*args, **kwargs, out_val=out) if count else 0
        factors = tensors[1:] if operation is aten.addmm else tensors  # the first of addmm is the summand
        num_bytes, extent = bytes_moved(func, args, kwargs, out), extent_of(operation, factors, flops)
        return self.instruments.seconds_of(operation, factors[0].dtype, flops, num_bytes, extent)


class KnownOperators:
    """Results of operators on the fake tensors of a model, made again from the forms of the first with such arguments.

    ``FakeTensorMode`` has a cache of the same kind, but to look into it takes most of the time of a step. Operators
    whose result follows from values, or which change the form of an argument, are left to it.

    Args:
        runs_values: whether operators on tensors that have values run: ``result_by_values``.
    """

    def __init__(self, *, runs_values: bool = False) -> None:
        self.runs_values = runs_values
        self.seconds: dict[Hashable, float] = {}  # by the keys of ``results_of``
        self._makers: dict[Hashable, Maker | None] = {}

    def results_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, Any]:
        """Return a key, equal for calls of an operator with arguments of the same forms, and the result."""
        with torch._C.DisableTorchFunction():
            key = func, _key((args, kwargs)), torch.get_default_dtype()
            make = self._makers.get(key)
            if make is not None:
                return key, make(args)
        if self.runs_values and (out := result_by_values(func, args, kwargs)) is not None:
            return key, out
        out = _grouped(*args, **kwargs) if func is GROUPED_PRODUCT else func(*args, **kwargs)
        if key not in self._makers:
            with torch._C.DisableTorchFunction():
                is_open = func is NAMES_OFFSET or DEPENDS_ON_VALUES & {*func.tags}
                self._makers[key] = None if is_open else _maker_of_all(args, kwargs, out)
        return key, out


MOST_VALUES = 2**24
"""Of a result: a larger one, as the mask of a long row, is not computed."""
MADE_BY_NUMBERS = (aten.arange, aten.linspace)
"""Operators without a tensor whose floats are computed; of others, integers are."""
INDEXES = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
COMPARES_ALL = aten.eq.Scalar


def result_by_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute what follows from values that are known: of ids, masks, grids, and of what is made of numbers.

    Pixels have none: no one of them equals a number that it is compared with.

    Returns:
        ``None`` where it has no values, or too many; else real tensors, or a number.
    """
    tensors = _tensors((args, kwargs))
    if func is COMPARES_ALL and isinstance(args[0], FakeTensor) and not args[0].requires_grad:
        with unset_fake_temporarily():
            return torch.zeros(args[0].shape, dtype=torch.bool)
    if torch.Tag.nondeterministic_seeded in func.tags or not all(map(_is_known, tensors)):
        return None
    if not (DEPENDS_ON_VALUES & {*func.tags}):
        forms = _tensors(func(*args, **kwargs))
        is_number = getattr(func, "_overloadpacket", None) in MADE_BY_NUMBERS
        may_be_float = bool(tensors) or is_number
        if any(one.numel() > MOST_VALUES or not (may_be_float or _is_integer(one)) for one in forms):
            return None
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _is_known(tensor: Tensor) -> bool:
    return not (isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.requires_grad)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _has_values(out: Any) -> bool:
    return not any(isinstance(one, FakeTensor) for one in _tensors(out))


def _with_places(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Put the places that a mask names in place of the mask."""
    places: list[Tensor | None] = []
    for one in args[1]:
        is_mask = one is not None and one.dtype == torch.bool and not isinstance(one, FakeTensor)
        with unset_fake_temporarily():
            places += one.nonzero(as_tuple=True) if is_mask else [one]
    return args[0], places, *args[2:]


def _grouped(factor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Multiply groups of matrices; without values torch takes bfloat16 alone, and kernels float32 too."""
    others, named = tree_map_only(
        Tensor, lambda one: one.bfloat16() if one.is_floating_point() else one, (args, kwargs)
    )
    out: Tensor = GROUPED_PRODUCT(factor.bfloat16(), *others, **named)
    return out.to(factor.dtype)


def _maker_of_all(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Maker | None:
    """Return what makes the results of a call, in their container; ``None`` where their forms do not tell all."""
    container = type(out) if type(out) in (tuple, list) and len(out) > 0 else None
    outs = (out,) if container is None else out
    if not all(map(_is_plain, (*_tensors((args, kwargs)), *outs))):
        return None
    makers = [_maker_of(args, one) for one in outs]
    again = [make(args) for make in makers]
    given = {id(storage) for storage in _storages((args, kwargs))}
    own = [id(one.untyped_storage()) for one in outs if _sharing(args, one) is None]
    is_all = len({*own} - given) == len(own) and all(
        one.untyped_storage().nbytes() == other.untyped_storage().nbytes() and one.requires_grad == other.requires_grad
        for one, other in zip(outs, again, strict=True)
    )
    if not is_all or container is None:
        return makers[0] if is_all else None
    return lambda args: container(make(args) for make in makers)


def _maker_of(args: tuple[Any, ...], out: FakeTensor) -> Maker:
    """Return what makes one result: it knows the form of ``out``, which it must not keep alive."""
    position, shape, stride, dtype = _sharing(args, out), out.shape, out.stride(), out.dtype
    mode, device = out.fake_mode, out.fake_device
    if position is not None and args[position] is out:
        return itemgetter(position)
    offset = int(out.storage_offset()) - (0 if position is None else int(args[position].storage_offset()))

    def make(args: tuple[Any, ...]) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            if position is None:
                meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                source = args[position]
                begin = source.storage_offset() + offset
                meta = torch.empty(0, dtype=dtype, device="meta").set_(source.untyped_storage(), begin, shape, stride)
        return FakeTensor(mode, meta, device)

    return make


def _sharing(args: tuple[Any, ...], out: FakeTensor) -> int | None:
    """Return the position of the argument whose storage ``out`` has; ``None`` for a storage of its own."""
    sharing = (isinstance(arg, Tensor) and arg.untyped_storage() is out.untyped_storage() for arg in args)
    return next((position for position, shares in enumerate(sharing) if shares), None)


def _is_plain(value: Any) -> bool:
    """Return whether ``value`` is a fake tensor of which its form tells all."""
    is_known = type(value) is FakeTensor and value.constant is None
    return is_known and value.layout == torch.strided and not (value.is_conj() or value.is_neg())


def _key(value: Any) -> Hashable:
    """Make a key that is equal for arguments of the same forms."""
    if isinstance(value, Tensor):
        is_known = type(value) is FakeTensor and value.constant is None
        return value.shape, value.stride(), value.dtype, is_known
    if isinstance(value, list | tuple):
        return tuple([_key(one) for one in value])
    if isinstance(value, dict):
        return tuple([(name, _key(one)) for name, one in value.items()])
    return type(value), value if isinstance(value, HASHED) else str(value)


class RMSNormKernel(Function):
    """The RMSNorm of CUDA as one operator, with its backward: a CPU's torch makes it of others before any mode."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Tensor:
        """Return ``hidden`` normalised over its last dimensions, which have this ``shape``."""
        with torch._C._AutoDispatchBelowAutograd():
            normed, deviations = aten._fused_rms_norm(hidden, shape, weight, eps)
        ctx.save_for_backward(hidden, deviations, weight)
        ctx.shape = shape
        result: Tensor = normed
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that are asked for."""
        hidden, deviations, weight = ctx.saved_tensors
        asked = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            of_hidden, of_weight = aten._fused_rms_norm_backward(gradient, hidden, ctx.shape, deviations, weight, asked)
        return of_hidden, None, of_weight, None


def _engine_owns(total: Any) -> bool:
    """Return whether autograd's engine sums the gradients of a tensor that was used twice, and owns ``total``.

    It then adds in place, to real tensors outside of modes; here it asks for a new one (``can_accumulate_inplace`` in
    torch/csrc/autograd/input_buffer.cpp), while the node that made the second gradient still counts as running. A node
    that Python wrote may add for itself, but for that of a kernel.
    """
    node = torch._C._current_autograd_node()
    is_of_python = isinstance(node, BackwardCFunction) and not node.name().startswith(RMSNormKernel.__name__)
    if node is None or is_of_python or torch.is_grad_enabled() or not isinstance(total, Tensor):
        return False
    return torch._C._storage_Use_Count(total.untyped_storage()._cdata) == 2  # by the tensor and by the caller


def rounded_up(num_bytes: int, multiple: int) -> int:
    """Return the least multiple that is no less."""
    return -(-num_bytes // multiple) * multiple


def _as_the_kernel_does(out: Any, run: KernelRun, taken: set[int]) -> Any:
    """Return ``out`` in the layouts and dtypes of the kernel's own results, where the fake ones differ."""
    leaves, form = tree_flatten(out)
    for position, (leaf, real) in enumerate(zip(leaves, run.results, strict=True)):
        if not isinstance(leaf, Tensor) or real is None:  # a gradient that was not asked for
            continue
        is_same = (leaf.shape, leaf.stride(), leaf.dtype) == (real.shape, real.stride(), real.dtype)
        if not is_same and id(leaf.untyped_storage()) not in taken:
            leaves[position] = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=leaf.device)
    return tree_unflatten(leaves, form)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(values, Tensor):
        yield values.untyped_storage()
    elif isinstance(values, list | tuple | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _storages(value)
