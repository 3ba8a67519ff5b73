"""Estimate a step on a target device: a model without weights, a batch without values, simulated copies to the host.

Fake tensors report the CPU as their device, whatever the target is, as a torch that was built without CUDA knows no
other; ``cuda_kernels`` puts CUDA's kernels in place of the CPU's: the tensors that they save for backward and allocate.
Offloading runs the engine of ``core/activations/offload.py``, with copies that only take time.

Notes: ``docs/design/costs.md``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.attention import SDPBackend, current_flash_attention_impl
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from memsave_recipes.core.activations import apply, tiles
from memsave_recipes.core.activations.block_state import replaced
from memsave_recipes.core.activations.compiled import check_compiler
from memsave_recipes.core.activations.offload import OffloadEngine
from memsave_recipes.core.activations.spans import RUN
from memsave_recipes.core.activations.streaming import WeightStream, stream_of, stream_weights
from memsave_recipes.core.activations.tiled_attention import without_flash
from memsave_recipes.core.costs.block_costs import Measurement, Workload, kinds_of, measure
from memsave_recipes.core.costs.fake_step import (
    FakeInstruments,
    KernelRun,
    KnownOperators,
    RMSNormKernel,
    SimulatedClock,
    Workspaces,
    rounded_up,
)
from memsave_recipes.core.costs.preserve_state import freeing_gradients
from memsave_recipes.core.costs.repeats import Irregular, Repeats, expanded, find_repeats, left_out
from memsave_recipes.core.costs.targets import Target
from memsave_recipes.core.costs.throughput import ModelFlops
from memsave_recipes.core.costs.trace_events import Meter
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Action, Plan
from memsave_recipes.core.plans.chain import CPU

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
HALF = (torch.bfloat16, torch.float16)
LARGEST_FLASH_HEAD = 256
MASK_ALIGNMENT = 16  # elements of a row of a mask
FLASH_BLOCK = 128  # rows that the backward of flash attention rounds up to
FLASH_3_HEADS = (64, 96, 128, 192, 256)  # sizes of heads that FlashAttention-3 rounds up to


def fake_model(build: Callable[[], M]) -> M:
    """Build a model with fake tensors for parameters and buffers; takes no memory and no time for weights.

    Tied weights stay tied, and each tensor keeps its dtype, layout and ``requires_grad``.

    Args:
        build: makes the model, without weights, on torch's default device, which is ``meta`` inside.
    """
    with torch.device("meta"):
        model = build()
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # constants of a loss, say
    mode.cache_enabled = False  # ``KnownOperators`` is in its place, and takes less time
    made: dict[int, Tensor] = {}
    for module in model.modules():
        places: list[dict[str, Any]] = [module._parameters, module._buffers, module.__dict__]
        for place in places:
            for name, tensor in place.items():
                if isinstance(tensor, Tensor):
                    place[name] = made.setdefault(id(tensor), _as_fake(tensor, mode))
    return model


def fake_batch(model: nn.Module, batch: Mapping[str, Any], *, keep_integers: bool = False) -> dict[str, Any]:
    """Make fake tensors like those of ``batch``, for a model that ``fake_model`` made; anything else stays as it is.

    Args:
        keep_integers: keep the values of integers and bools, as grids and masks of images say what runs.
    """
    mode = _fake_mode_of(model)

    def made(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return part.clone() if keep_integers and has_values(part) else _as_fake(part, mode)

    return {name: made(part) for name, part in batch.items()}


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor of a batch has integers to be read."""
    return not (tensor.is_floating_point() or tensor.is_meta or isinstance(tensor, FakeTensor))


class Estimator:
    """``measure`` by simulation, for several micro-batches of one model; results for operators are shared.

    Args:
        model: from ``fake_model``; it does not change.
        autocast_dtype: of mixed precision (``torch.bfloat16`` for ``bf16``); ``None`` for none.
        bytes_per_s_between: that a rank sends to others, where they share rows.
    """

    def __init__(
        self,
        model: nn.Module,
        target: Target,
        autocast_dtype: torch.dtype | None = None,
        bytes_per_s_between: float = inf,
    ) -> None:
        self.target = target
        self.bytes_per_s_between = bytes_per_s_between
        self.autocast_dtype = autocast_dtype
        workspace_of = Workspaces().of if target.device.type == "cpu" else cuda_workspace
        self._instruments = FakeInstruments(target.device, seconds_of=target.seconds, workspace_of=workspace_of)
        self._kinds = cache(partial(kinds_of, model))
        from memsave_recipes.core.costs.compiled_layers import CompilerOfTarget  # loads torch's compiler

        self._compiler = CompilerOfTarget(target, partial(cuda_kernels, target))

    def estimate(self, workload: Workload, plans: Sequence[Plan]) -> Measurement:
        """Run once under each plan, which gives its bytes and its seconds at once.

        Args:
            workload: with a batch from ``fake_batch``, and no autocast of its own.

        Raises:
            InputError: the model decides by values; and as ``measure`` raises it.

        Returns:
            A measurement whose workload is on the target's device, so that its chains are those of the target.
        """
        instruments = self._instruments_for(workload, clock := SimulatedClock())
        on_cpu = replace(workload, forward=partial(self._forward, workload), device=CPU)
        with self._simulating(workload.model, clock), replaced(tiles, "in_turn", partial(some_tiles, clock)):
            measured = _measure(on_cpu, plans, instruments, find_repeats(workload, plans, self._kinds))
        return replace(measured, workload=replace(workload, device=self.target.device))

    def model_flops(self, workload: Workload) -> Mapping[str, int]:
        """Count what ``ModelFlops`` counts of a forward and backward without a plan; as ``estimate``."""
        counted = ModelFlops(for_cuda=self.target.device.type == "cuda")

        def step(_: Meter) -> None:
            with counted:
                self._forward(workload).backward()

        model, clock = workload.model, SimulatedClock()
        with self._simulating(model, clock), freeing_gradients(model.parameters()):
            self._instruments_for(workload, clock).read_memory(step)
        return counted.by_precision

    def _instruments_for(self, workload: Workload, clock: SimulatedClock) -> FakeInstruments:
        """Return those of a step; where integers have values, no results of other batches are known."""
        instruments = replace(self._instruments, clock=clock)
        if any(map(has_values, workload.batch)):
            return replace(instruments, known=KnownOperators(runs_values=True))
        return instruments

    def _forward(self, workload: Workload) -> Tensor:
        """All fake tensors are the CPU's, whatever the target. No cache of weights, as in a run."""
        dtype = self.autocast_dtype
        try:
            with torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False):
                return workload.forward()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            name = type(workload.model).__name__
            raise InputError(
                f"a step of {name} cannot be estimated (it runs what the values of a tensor say): launch its "
                "recipe with budget_gib, which measures"
            ) from error

    @contextmanager
    def _simulating(self, model: nn.Module, clock: SimulatedClock) -> Iterator[None]:
        """Put the target's kernels, copies and exchanges in place of this CPU's."""
        check = check_compiler if self.target.device.type == "cpu" else lambda model: None
        if (stream := stream_of(model)) is not None:
            stream.copies = SimulatedStream(clock, self.target.host_bytes_per_s)
        with (
            _fake_mode_of(model),
            cuda_kernels(self.target),
            simulated_offloading(self.target, clock),
            simulated_exchanges(clock, self.bytes_per_s_between),
            self._compiler.compiling(clock),
            replaced(apply, "check_compiler", check),
        ):
            yield


def _measure(workload: Workload, plans: Sequence[Plan], instruments: FakeInstruments, repeats: Repeats) -> Measurement:
    """Run ``measure``, with layers that are alike traced once where that is possible."""
    if repeats.periods:
        shortened = {repeats.shorten_plan(plan): plan for plan in plans}
        stacks = [repeats.shorten(names) for names in workload.stacks]
        with suppress(Irregular), left_out(workload.model, repeats) as arguments:
            some = measure(
                replace(workload, stacks=stacks),
                list(shortened),
                instruments=instruments,
                on_run=arguments.end_run,
                idle=arguments.unused,
            )
            runs = zip(some.traces, arguments.of_runs, strict=True)
            traces = [(shortened[plan], expanded(trace, repeats, shared)) for (plan, trace), shared in runs]
            return Measurement(workload, traces)
    return measure(workload, plans, instruments=instruments)


@contextmanager
def simulated_offloading(target: Target, clock: SimulatedClock) -> Iterator[None]:
    """Simulate copies of blocks under ``OFFLOAD`` to the host of a CUDA target; on a CPU they keep everything."""
    if target.device.type == "cpu":
        yield
        return
    before = RUN[Action.OFFLOAD]
    RUN[Action.OFFLOAD] = OffloadEngine(CPU, SimulatedCopies(clock, target.host_bytes_per_s)).run
    try:
        yield
    finally:
        RUN[Action.OFFLOAD] = before


def simulated_exchanges(clock: SimulatedClock, bytes_per_s: float) -> AbstractContextManager[None]:
    """Simulate what ranks that share rows exchange: each keeps a part and sends the others, which nothing hides."""

    def exchange(taken: Tensor, parts: Tensor, group: object) -> None:
        clock.now += parts[1:].nbytes / bytes_per_s

    return replaced(dist, "all_to_all_single", exchange)


def some_tiles(clock: SimulatedClock, all_tiles: Iterable[T]) -> Iterator[T]:
    """Yield the first two tiles and the last; those between are as the second, whose time they take."""
    first, *between = all_tiles
    yield first
    if between:
        began = clock.now
        yield between[0]
        clock.now += (clock.now - began) * len(between[1:-1])
        yield from between[1:][-1:]


@dataclass
class SimulatedCopies:
    """``Copies`` one after the other that take the time of the link; their event is the second at which they end."""

    clock: SimulatedClock
    bytes_per_s: float
    busy_until: float = 0.0

    def empty_on_host(self, num_bytes: int) -> Any:
        """Return host memory, which is not counted: only its length is read."""
        return range(num_bytes)

    def start(self, pairs: list[tuple[Tensor, Tensor]]) -> float:
        """Begin after the copies before them, and the computation so far."""
        num_bytes = sum(len(target) for target, _ in pairs)
        self.busy_until = max(self.busy_until, self.clock.now) + num_bytes / self.bytes_per_s
        return self.busy_until

    def wait(self, event: float) -> None:
        """Set the clock forward to the end of the copies."""
        self.clock.now = max(self.clock.now, event)


class SimulatedStream(SimulatedCopies):
    """Copies of a layer's weights, of which each began when the one before was needed: they are copied ahead."""

    began: float = 0.0

    def start(self, pairs: list[tuple[Tensor, Tensor]]) -> float:
        """Begin during the computation of the layer before."""
        num_bytes = sum(target.nbytes for target, _ in pairs)
        self.busy_until = max(self.busy_until, self.began) + num_bytes / self.bytes_per_s
        return self.busy_until

    def wait(self, event: float) -> None:
        """Set the clock forward to the end of the copies, and begin the next ones."""
        super().wait(event)
        self.began = self.clock.now


def stream_on_target(model: nn.Module, *, trained: bool = False) -> None:
    """Let a model of fake tensors stream the weights of its layers as ``stream_weights`` does, on a CUDA target."""
    stream = WeightStream(CPU, SimulatedStream(SimulatedClock(), inf), looks_ahead=False)
    stream_weights(model, stream, trained=trained)


def _as_fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def _fake_mode_of(model: nn.Module) -> FakeTensorMode:
    parameter = next(model.parameters())
    assert isinstance(parameter, FakeTensor), "a model that fake_model made"
    return parameter.fake_mode


aten = torch.ops.aten

# fmt: off
FLOAT32_UNDER_AUTOCAST = frozenset({
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
    "sinh", "tan", "pow", "__pow__", "__rpow__", "softplus", "layer_norm", "native_layer_norm", "rms_norm",
    "group_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "cross_entropy",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "interpolate", "upsample",
})
"""Of AT_FORALL_FP32, by the names of the Python functions. Losses that are made of others are cast at once."""
# fmt: on

FLOAT32_RESULT_UNDER_AUTOCAST = frozenset({"prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum"})
"""Of AT_FORALL_FP32_SET_OPT_DTYPE: these cast by themselves when they are told the dtype of their result."""


@contextmanager
def cuda_kernels(target: Target) -> Iterator[None]:
    """Let the fake tensors of the CPU go through the kernels of a CUDA target; nothing changes for a CPU."""
    if target.device.type == "cpu":
        yield
    else:
        with _CudaKernels(target), nullcontext() if target.has_flash_attention else without_flash():
            yield


def cuda_workspace(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> KernelRun | None:
    """Return the workspace of fused attention's backward, by flash_api.cpp and attention_backward.cu, and its results.

    Of FlashAttention-3 by hopper/flash_api.cpp, where this process has taken it.

    ``None`` for other operators.
    """
    flash_bytes = _flash_3_backward_bytes if current_flash_attention_impl() == "FA3" else _flash_backward_bytes
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        batch, _, length, _ = args[1].shape
        return KernelRun(flash_bytes(args[1], args[2], rows=batch * rounded_up(length, FLASH_BLOCK)), ())
    if func is aten._flash_attention_backward.default:
        tokens, documents = len(args[1]), len(args[6]) - 1
        return KernelRun(flash_bytes(args[1], args[2], rows=tokens + FLASH_BLOCK * documents), ())
    if func is aten._scaled_dot_product_efficient_attention_backward.default:
        return KernelRun(_efficient_backward_bytes(*args[1:4]), ())
    return None


def _flash_backward_bytes(query: Tensor, key: Tensor, rows: int) -> int:
    """Add up gradients of query, key and value, sums for that of the query in float32, and one float32 a row; where
    heads share keys, gradients of keys and values for every head.

    Args:
        query, key: (B, H, T, D) or (tokens, H, D).
        rows: of a head, in whole blocks.
    """
    heads, head_size = query.shape[1], query.shape[-1]
    padded = rounded_up(head_size, 32 if head_size <= 128 else 64)
    in_float32 = 4 * heads * rows * (padded + 1)
    of_every_head = 2 * key.nbytes * heads // key.shape[1] if key.shape[1] != heads else 0
    return query.nbytes + 2 * key.nbytes + in_float32 + of_every_head


def _flash_3_backward_bytes(query: Tensor, key: Tensor, rows: int) -> int:
    """Add up as ``_flash_backward_bytes``: two float32 a row, and where heads share keys, sums for each of them."""
    heads, of_keys = query.shape[1], key.shape[1]
    padded = next(size for size in FLASH_3_HEADS if size >= query.shape[-1])
    sums = heads * (padded + 2) + (2 * of_keys * padded if of_keys != heads else 0)
    return query.nbytes + 2 * key.nbytes + 4 * rows * sums


def _efficient_backward_bytes(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Add up gradients of query, key and value, one float32 a row; in float32 the product that this is the sum of."""
    batch, heads, length, _ = query.shape
    rows = batch * heads * length
    product = 4 * rows * value.shape[-1] if query.dtype == torch.float32 else 0
    return query.nbytes + key.nbytes + value.nbytes + 4 * rows + product


class _CudaKernels(TorchFunctionMode):
    """See NOTE [ where CUDA differs ]."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return attention(*args, **kwargs, flash=self.target.has_flash_attention)
        if func is torch._fused_sdp_choice:
            return _choice(*args[:3], varlen=self.target.has_varlen_attention)
        if func is Tensor.backward:
            with self:  # a recomputation runs in the same way
                return _backward(args[0])
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.rms_norm:
            return _rms_norm(*args, **kwargs)
        if func == _IS_CUDA:
            return True
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = _under_autocast(getattr(func, "__name__", ""), args, kwargs)
        return func(*args, **kwargs)


_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]


def _backward(loss: Tensor) -> None:
    """Call the engine itself: ``loss.backward()`` would end up in the mode again."""
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _under_autocast(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if name in FLOAT32_UNDER_AUTOCAST:
        args, kwargs = tree_map_only(Tensor, lambda one: one.float() if one.dtype in HALF else one, (args, kwargs))
    elif name in FLOAT32_RESULT_UNDER_AUTOCAST and isinstance(args[0], Tensor) and args[0].dtype in HALF:
        kwargs = kwargs if kwargs.get("dtype") else {**kwargs, "dtype": torch.float32}
    return args, kwargs


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace or not training or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Normalise in one kernel, as CUDA does where input and weight have one dtype: rule 4."""
    if torch.is_autocast_enabled("cpu"):
        input, weight = tree_map_only(Tensor, lambda one: one.float() if one.dtype in HALF else one, (input, weight))
    if weight is not None and weight.dtype != input.dtype:
        return torch.rms_norm(input, normalized_shape, weight, eps)
    normed: Tensor = RMSNormKernel.apply(input, normalized_shape, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    flash: bool,
) -> Tensor:
    """Attend by the kernel that CUDA would take: rule 1 of NOTE [ where CUDA differs ].

    Args:
        query, key, value: (B, H, T, D).
        attn_mask: (..., T, S).
        flash: whether the device has the flash kernel.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        attn_mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.to(dtype)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    with torch.autocast("cpu", enabled=False):
        if flash and attn_mask is None and _flash_can(query, key, value):
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if _efficient_can(query, key, value):
            mask = None if attn_mask is None else _aligned(attn_mask, query, key)
            outputs = aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, query.requires_grad, dropout_p, is_causal, scale=scale
            )
        else:
            outputs = aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    attended: Tensor = outputs[0]
    return attended


def _choice(query: Tensor, key: Tensor, value: Tensor, *, varlen: bool) -> int:
    """Return CUDA's choice for attention by document, which alone asks: whether one call may take all documents."""
    choice = SDPBackend.FLASH_ATTENTION if varlen and _flash_can(query, key, value) else SDPBackend.MATH
    return int(choice.value)


def _flash_can(query: Tensor, key: Tensor, value: Tensor) -> bool:
    same_size = query.shape[-1] == key.shape[-1] == value.shape[-1]
    return query.dtype in HALF and query.ndim == 4 and same_size and query.shape[-1] <= LARGEST_FLASH_HEAD


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    head_size = query.shape[-1]
    scale = head_size**-0.5 if scale is None else scale
    if missing := -head_size % 8:
        query, key, value = (F.pad(tensor, (0, missing)) for tensor in (query, key, value))
    out: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return out[..., :head_size] if missing else out


def _efficient_can(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether heads are a multiple of 16 bytes and share no keys."""
    aligned = query.shape[-1] * query.element_size() % 16 == 0 and value.shape[-1] * value.element_size() % 16 == 0
    return query.ndim == 4 and aligned and query.dtype != torch.float64 and key.shape[1] == query.shape[1]


def _aligned(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Expand to (B, H, T, S), each row starting at a multiple of 16 elements."""
    length = mask.shape[-1]
    if missing := -length % MASK_ALIGNMENT:
        mask = F.pad(mask, (0, missing))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
