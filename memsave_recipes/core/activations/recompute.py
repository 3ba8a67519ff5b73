"""Recompute in the backward: a function from its inputs, or what is cheap in it from the outputs of the rest.

``recompute`` is a checkpoint by hooks of saved tensors, as torch's is where it is not reentrant (the reentrant form
leaves parameters without a gradient when the input needs none, and breaks DDP). It restores the random numbers and
counts BatchNorm once. Gradients are bit for bit those of the baseline, a run without checkpointing.

Notes: ``docs/design/activations.md``.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import chain
from threading import RLock
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import checkpoint as _torchs_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointError, get_device_states, set_device_states

from memsave_recipes.core.activations.block_state import FORWARDS_OF_TORCH, on_copies_of_buffers
from memsave_recipes.core.activations.micro_batches import on_inner_tensors
from memsave_recipes.core.activations.side_effects import SideEffects
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Action, Plan
from memsave_recipes.core.plans.chain import CPU


def recompute(function: Callable[..., Any], *inputs: Any, modules: Iterable[nn.Module]) -> Any:
    """``function(*inputs)``, of which only the inputs are saved for backward.

    Args:
        function: runs once now and once in the backward; must do the same both times.
        inputs: tensors among them are saved for backward; pass them here rather than by closure so that they count as
            saved tensors.
        modules: run by ``function``; their BatchNorm layers record nothing the second time.

    Raises:
        torch.utils.checkpoint.CheckpointError: in the backward, if the second run saves other tensors than the first.
    """
    function, inner = on_inner_tensors(function, inputs)
    with Checkpoint(function, inner, statistics_once(modules)).hooks():
        return function(*inner)


class Checkpoint:
    """Saves places in line, for which a second run makes the tensors in the backward: NOTE [ places in line ].

    Args:
        function: the second run; the first one is whatever runs under ``hooks()``.
        inputs: of ``function``; tensors among them are saved for backward.
        around: the second run.
    """

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[Any], around: AbstractContextManager[Any]
    ) -> None:
        self.function, self.around = function, around
        self.others = [None if isinstance(one, Tensor) else one for one in inputs]
        self.saved: Any = _Saved.apply(_ROOT, *inputs)  # type: ignore[no-untyped-call]
        self.random = RandomState.now(*inputs)
        self.settings = Settings.now(*inputs)
        self.early_stop = _torchs_checkpoint._enable_checkpoint_early_stop is not False
        self.places: list[weakref.ref[_Place]] = []
        self.forms: list[Any] = []  # shape, type and device of each, one after the other
        self.next = 0  # of the places, in the second run
        self.to_the_end = False

    def hooks(self) -> saved_tensors_hooks:
        """Around the first run."""
        return saved_tensors_hooks(self._place, self.unpack_hook)

    def _place(self, tensor: Tensor) -> "_Place":
        place = _Place()
        self.places.append(weakref.ref(place))
        self.forms += tensor.shape, tensor.dtype, tensor.device
        return place

    @contextmanager
    def whole_or_nothing(self) -> Iterator[None]:
        """Around a part of the first run: where it raises, its places are not in line."""
        before = len(self.places)
        try:
            yield
        except BaseException:
            del self.places[before:], self.forms[before * 3 :]
            raise

    def unpack_hook(self, place: "_Place") -> Tensor:
        """The tensor of a place, which holds it no longer."""
        if place.tensor is None:
            self._run_again(to_the_end=not self.early_stop or self._may_be_filled_late(place))
        tensor, place.tensor = place.tensor, None
        return cast(Tensor, tensor)

    def _may_be_filled_late(self, place: "_Place") -> bool:
        """Whether the operator that asks for it fills a tensor after saving it: rule 4 of NOTE [ places in line ]."""
        is_last = any(one() is place for one in self.places[-2:])
        node = torch._C._current_autograd_node() if is_last else None
        return node is not None and node.name().startswith("RreluWithNoise")

    def _run_again(self, to_the_end: bool) -> None:
        pairs = zip(self.others, self.saved.grad_fn.saved_tensors, strict=True)
        inputs = [other if tensor is None else tensor for other, tensor in pairs]
        outer, self.next = (self.next, self.to_the_end), 0
        self.to_the_end = to_the_end
        now = RandomState.now(*inputs)
        try:
            self.random.restore()
            hooks = saved_tensors_hooks(self._fill, _as_it_is)
            with hooks, torch.enable_grad(), self.settings.as_then(), self.around:
                self.function(*inputs)
            if self.next < len(self.places):
                raise _other_tensors(f"{self.next} tensors, the first one {len(self.places)}")
        except _AllSaved:
            pass
        finally:
            now.restore()
            self.next, self.to_the_end = outer

    def _fill(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if self.next < len(self.places):
            place = self.places[self.next]()
            if place is not None:  # the graph still needs it
                form = self.forms[self.next * 3 : self.next * 3 + 3]
                now: list[Any] = [tensor.shape, tensor.dtype, tensor.device]
                if now != form:
                    texts = [f"{dtype} {tuple(shape)} on {device}" for shape, dtype, device in (now, form)]
                    raise _other_tensors("{}, the first one {}".format(*texts))
                place.tensor = tensor
        self.next += 1
        if self.to_the_end:
            return tensor
        if self.next >= len(self.places):
            raise _AllSaved
        return tensor


class _Place:
    """Of a tensor in line, saved in its place."""

    tensor: Tensor | None = None


class _AllSaved(Exception):
    """Ends a second run, all that it is for being there: again and again, where a block catches it."""


def _other_tensors(what: str) -> CheckpointError:
    return CheckpointError(
        f"the second run of a block saves other tensors than its first: this one {what}. A block under a plan must do "
        "the same both times; keep this one"
    )


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _Saved(torch.autograd.Function):
    """Saves tensors as any node of the graph does: hooks of saved tensors see them, and a write on them raises."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, *inputs: Any) -> Tensor:
        """An output whose node holds ``inputs``: in torch 2.11 for no longer than somebody holds the output."""
        ctx.save_for_backward(*(one if isinstance(one, Tensor) else None for one in inputs))
        return torch.empty(0, device="cpu")


_ROOT = torch.empty(0, requires_grad=True)


class RandomState(NamedTuple):
    """Of the generators that a block may draw from: the CPU's, and those of its inputs' devices."""

    device_type: str
    on_cpu: Tensor
    devices: Sequence[int]
    on_devices: Sequence[Tensor]

    @classmethod
    def now(cls, *inputs: Any) -> "RandomState":
        """As it is for ``inputs``."""
        if all(one.is_cpu for one in inputs if isinstance(one, Tensor)):
            return cls("cuda", torch.get_rng_state(), (), ())
        kind = _device_type(inputs)
        is_used = getattr(getattr(torch, kind), "is_initialized", bool)
        devices, states = get_device_states(*inputs) if is_used() else ((), ())
        return cls(kind, torch.get_rng_state(), devices, states)

    def restore(self) -> None:
        """Set it back."""
        torch.set_rng_state(self.on_cpu)
        if self.devices:
            set_device_states(self.devices, self.on_devices, device_type=self.device_type)

    def equals(self, other: "RandomState") -> bool:
        """Outside of dispatch modes: these are no tensors of the model, nor fake where it is."""
        with _disable_current_modes():
            ours, theirs = [self.on_cpu, *self.on_devices], [other.on_cpu, *other.on_devices]
            return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


class Settings(NamedTuple):
    """The default device, and of each kind of device what autocast does: on, to which type, and whether it keeps."""

    kinds: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def now(cls, *inputs: Any) -> "Settings":
        """As they are for ``inputs``."""
        kinds = _kinds_of_autocast(_device_type(inputs))
        return cls(kinds, _values_of(kinds))

    def as_then(self) -> AbstractContextManager[Any]:
        """Inside they are as they were."""
        now = _values_of(self.kinds)
        return NOTHING if now == self.values else _set(set(self.values) - set(now))


def _values_of(kinds: tuple[str, ...]) -> tuple[Any, ...]:
    caches = torch.is_autocast_cache_enabled()
    casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), caches) for kind in kinds]
    return _default_device(), *casts


def _default_device() -> torch.device:
    """As ``torch.get_default_device``, which takes longer to find that there is no mode and so none is set."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else CPU


@cache
def _kinds_of_autocast(device_type: str) -> tuple[str, ...]:
    return tuple(filter(torch.amp.is_autocast_available, dict.fromkeys((device_type, "cpu"))))


def _device_type(inputs: Iterable[Any]) -> str:
    """That of the first tensor which is not on the CPU; without one that of most accelerators."""
    types = (one.device.type for one in inputs if isinstance(one, Tensor))
    return next((kind for kind in types if kind != "cpu"), "cuda")


@contextmanager
def _set(settings: set[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in settings:
            stack.enter_context(torch.autocast(*one) if isinstance(one, tuple) else one)
        yield


def statistics_once(modules: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """Around a second run: NOTE [ statistics once ]."""
    layers = batchnorm_layers(modules)
    return FrozenStatistics(layers) if layers else NOTHING


NOTHING = nullcontext()


class FrozenStatistics:
    """A context in which the BatchNorm layers below ``modules`` normalise by batch but record nothing.

    Can be entered again after it was left, as a second backward through a retained graph does.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        layers = [layer for layer in batchnorm_layers(modules) if layer.track_running_stats]
        self.layers = [layer for layer in layers if type(layer).forward in FORWARDS_OF_TORCH]
        self.others = [layer for layer in layers if type(layer).forward not in FORWARDS_OF_TORCH]
        self.saved: list[tuple[float | None, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        _ONE_AT_A_TIME.acquire()
        self.saved = [(layer.momentum, layer.num_batches_tracked) for layer in self.layers]
        for layer in self.layers:
            layer.momentum, layer.num_batches_tracked = 0.0, _nothing_counted(layer)
        self.copies = on_copies_of_buffers(self.others)
        self.copies.__enter__()

    def __exit__(self, *exception: object) -> None:
        for layer, (momentum, num_batches_tracked) in zip(self.layers, self.saved, strict=True):
            layer.momentum, layer.num_batches_tracked = momentum, num_batches_tracked
        self.copies.__exit__(None, None, None)
        _ONE_AT_A_TIME.release()


_ONE_AT_A_TIME = RLock()
"""Two threads may run backwards of one model."""


def _nothing_counted(layer: _BatchNorm) -> torch.Tensor | None:
    counter = layer.num_batches_tracked
    return torch.zeros_like(counter) if isinstance(layer, nn.SyncBatchNorm) and counter is not None else None


def batchnorm_layers(modules: Iterable[nn.Module]) -> list[_BatchNorm]:
    """All BatchNorm layers (SyncBatchNorm too) among ``modules`` and below them, each once."""
    if isinstance(modules, Modules):
        return modules.batchnorm_layers
    found = {layer: None for module in modules for layer in module.modules() if isinstance(layer, _BatchNorm)}
    return list(found)


class Modules(tuple[nn.Module, ...]):
    """Those of a block, which are looked through once and not in each forward."""

    @cached_property
    def batchnorm_layers(self) -> list[_BatchNorm]:
        """Among them and below them."""
        return batchnorm_layers(list(self))


def modules_that_share(model: nn.Module, stacks: Iterable[Collection[Collection[nn.Module]]]) -> frozenset[nn.Module]:
    """Modules of blocks that leave autocast's cache alone: rule 2 of NOTE [ casts of weights ].

    Args:
        stacks: of each stack and block, the modules. A stack of one block may be a loop that runs it again and again.
    """
    holders = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    blocks = [(modules, len(blocks) == 1) for blocks in stacks for modules in blocks]
    everything = frozenset(module for modules, _ in blocks for module in modules)
    if any(holders[id(weight)] > 1 for module in everything for weight in module.parameters()):
        return everything
    return frozenset(module for modules, is_alone in blocks if is_alone for module in modules)


KEEPS_CASTS = (Action.KEEP, Action.COMPILE)


@dataclass
class BlockRuns:
    """The names of the blocks that ran since a plan was applied. Recording them changes no result."""

    shared: frozenset[nn.Module] = frozenset()
    """Of ``modules_that_share``."""

    first: set[str] = field(default_factory=set)
    again: set[str] = field(default_factory=set)
    effects: dict[tuple[str, ...], SideEffects] = field(default_factory=dict)

    def recorded(
        self, function: Callable[..., Any], *names: str, action: Action, modules: Iterable[nn.Module]
    ) -> Callable[..., Any]:
        """``function``, which runs the blocks ``names``; a run after the first is one in the backward.

        What autocast cast in it is forgotten at its end: NOTE [ casts of weights ].

        Raises:
            InputError: by the first run, if ``action`` cannot run these ``modules`` again: NOTE [ side effects ].
        """
        runs, next_run, later = self.first, function, function
        if action.kind.runs_twice:
            if names not in self.effects:
                self.effects[names] = SideEffects(modules)
            next_run, later = self.effects[names].around(function)
        forgets_casts = action not in KEEPS_CASTS and self.shared.isdisjoint(modules)

        def run(*state: Any) -> Any:
            nonlocal runs, next_run
            runs.update(names)
            this_run, runs, next_run = next_run, self.again, later
            try:
                return this_run(*state)
            finally:
                if forgets_casts:
                    torch.clear_autocast_cache()

        return run

    def objection(self, plan: Plan) -> str | None:
        """The objection to a plan of which fewer than half of the blocks ran again, unless the others are frozen."""
        planned = [name for action in Action if action.kind.runs_twice for name in plan.blocks_under(action)]
        idle = [name for name in planned if name not in self.again]
        never = [name for name in idle if name not in self.first]
        only_frozen = len(idle) < len(planned) and not never  # which save nothing under any plan
        if 2 * len(idle) <= len(planned) or only_frozen:
            return None
        why = f"{_listed(never)} never ran" if never else f"nothing before or in {_listed(idle)} trains"
        return (
            f"plan {plan.strategy}: {len(planned) - len(idle)} of {len(planned)} blocks ran "
            f"again in the backward, so it saves less memory than it says ({why})"
        )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


KEPT_OPERATORS = frozenset(
    {
        # Matrix products: nearly all FLOPs of a transformer.
        "aten::mm",  # linear layers without a bias
        "aten::addmm",  # linear layers with one
        "aten::bmm",  # attention that is written out: its scores are kept, its softmax is not
        "aten::baddbmm",  # the same with a bias on the scores
        "aten::addbmm",  # the same, summed over the batch
        "aten::mv",  # reads a whole matrix for one vector
        "aten::addmv",  # the same with a bias
        "aten::linear",  # where a backend has it as one operator; elsewhere it is addmm or mm by now
        "aten::_addmm_activation",  # a product with its activation fused in
        "aten::_int_mm",  # 8-bit integers
        "aten::_scaled_mm",  # 8-bit floats
        "aten::_scaled_mm_v2",  # the same, newer
        "aten::_grouped_mm",  # the experts of a mixture, one call for all
        "aten::_scaled_grouped_mm",  # the same in 8-bit floats
        "aten::_scaled_grouped_mm_v2",  # the same, newer
        # Convolutions: nearly all FLOPs of a CNN.
        "aten::convolution",  # every kind: transposed, grouped and depthwise ones too
        "aten::conv_tbc",  # sequences first
        # Attention: quadratic time for a linear output. One name for every kernel.
        "aten::_scaled_dot_product_flash_attention",  # CUDA
        "aten::_scaled_dot_product_flash_attention_for_cpu",  # CPU
        "aten::_scaled_dot_product_efficient_attention",  # CUDA, any mask
        "aten::_scaled_dot_product_cudnn_attention",  # CUDA, Hopper and newer
        "aten::_scaled_dot_product_fused_attention_overrideable",  # XPU and devices outside torch
        "aten::_scaled_dot_product_attention_math_for_mps",  # Apple
        "aten::_triton_scaled_dot_attention",  # written in Triton
        "aten::_flash_attention_forward",  # CUDA, sequences of many lengths in one row
        "aten::_efficient_attention_forward",  # the same, any mask
        "aten::_cudnn_attention_forward",  # the same, cuDNN
        "torch_attn::_varlen_attn",  # the same, as torch.nn.attention.varlen calls it
        "flash_attn::_flash_attn_forward",  # the flash-attn package, as transformers calls it
        "flash_attn::_flash_attn_varlen_forward",  # the same, sequences of many lengths
        "flex_attention",  # eager; a compiled one is not seen, and runs again
        # Communication: slow, and all ranks have to meet for it. Operators that write in place are not among it.
        "_c10d_functional::all_gather_into_tensor",  # tensor and sequence parallel layers
        "_c10d_functional::all_reduce",  # tensor parallel layers
        "_c10d_functional::reduce_scatter_tensor",  # sequence parallel layers
        "_c10d_functional::all_to_all_single",  # tokens to experts and back
        "_c10d_functional::broadcast",  # rarely
        # Routing.
        "aten::topk",  # which experts take a token: small, slow to find, and ties must break the same way again
    }
)
"""The operators whose outputs ``select_ops`` keeps, in all overloads; names that this torch lacks match nothing.

Everything else runs again: it costs about one pass over memory, as reading a kept output would. That holds for the
embeddings, the casts of autocast and the unpacking of 4-bit weights too, whose outputs are large.
"""


def select_ops(function: Callable[..., Any], *inputs: Any, modules: Collection[nn.Module]) -> Any:
    """``function(*inputs)``, of which only the inputs and the outputs of ``KEPT_OPERATORS`` are saved for backward.

    One backward only: a second one through the same graph raises, also with ``retain_graph=True``.

    Args:
        function: runs once now and once, without those operators, in the backward; must do the same both times.
        inputs: tensors among them are saved for backward; pass them here rather than by closure so that they count as
            saved tensors.
        modules: run by ``function``; their BatchNorm layers record nothing the second time.

    Raises:
        InputError: an operator writes in place on an input; in the backward, if a kept output was written on after
            ``function`` ended, or if the second run uses other operators than the first. Under autocast it does where
            the first one found weights cast already, because another block has the same or ran twice: known limit.
        RuntimeError: in the backward, if it is the second one.
    """
    function, inner = on_inner_tensors(function, inputs)
    block = " + ".join(dict.fromkeys(type(module).__name__ for module in modules))
    outputs: Outputs = defaultdict(list)
    first_run = _FirstRun(outputs, block, tuple(inner))
    second_run = _SecondRun(outputs, block, FrozenStatistics(modules))
    with Checkpoint(function, inner, second_run).hooks(), first_run:
        return function(*inner)


@contextmanager
def kept_by_policy() -> Iterator[dict[int, int]]:
    """Collects the storages that every ``select_ops`` inside keeps: identity to bytes, each once.

    They do not pass through the hooks of saved tensors. Together with those that do (``SavedTensors.storages`` has the
    same form, and may hold some of the same storages) they are saved for backward. As there, leave the context
    before the backward, which frees them.
    """
    _WATCHING.append({})
    try:
        yield _WATCHING[-1]
    finally:
        _WATCHING.pop()


_WATCHING: list[dict[int, int]] = []


def draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of an operator takes random numbers. See NOTE [ random numbers ]."""
    known = _known_of(op)
    if known.dropout is None:
        return known.is_seeded
    position, default = known.dropout
    return bool((args[position] if position < len(args) else kwargs.get("dropout_p", default)) != 0)


class _Operator:
    """What is the same in all calls of an operator: read once, as a schema is slow to read."""

    def __init__(self, op: Any) -> None:
        self.op = op
        schema = getattr(op, "_schema", None)  # higher-order operators have none
        arguments = list(enumerate(schema.arguments)) if schema else []
        self.name = op.name().partition(".")[0] if hasattr(op, "name") else ""
        self.is_counted = op not in SAC_IGNORED_OPS
        self.is_mutable = schema is not None and bool(schema.is_mutable)
        self.may_be_kept = self.name in KEPT_OPERATORS and not self.is_mutable
        self.is_seeded = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
        dropouts = [(position, one.default_value) for position, one in arguments if one.name == "dropout_p"]
        self.dropout = dropouts[0] if dropouts else None
        aliases = [(position, one.name, one.alias_info) for position, one in arguments if self.is_mutable]
        self.written = [(position, name) for position, name, alias in aliases if alias and alias.is_write]

    def written_storages(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
        """The storages that this call writes on."""
        for position, name in self.written:
            yield from _storages(args[position] if position < len(args) else kwargs.get(name))


def _known_of(op: Any) -> _Operator:
    known = _KNOWN.get(id(op))  # torch computes the hash of an operator in Python
    if known is None:
        known = _KNOWN[id(op)] = _Operator(op)
    return known


_KNOWN: dict[int, _Operator] = {}
DETACH = torch.ops.aten.detach.default
"""Of each tensor that is saved: no operator of the block."""


class _Kept:
    """The output of an operator in the first run, which the second one takes."""

    def __init__(self, output: Any) -> None:
        self.set(_of_tensors(_detached, output))

    def set(self, output: Any) -> None:
        """Keep this one."""
        self.output = output
        self.versions = _versions(output)

    def take(self, block: str) -> Any:
        """Return the output, and hold it no longer."""
        output, self.output = self.output, _TAKEN
        if output is _TAKEN:
            raise _refusal(block, "one is only allowed to backward once through a graph: do not retain it")
        if self.versions != _versions(output):
            why = "a tensor that it keeps was written on in place after it ran: write it out of place"
            raise _refusal(block, why)
        return output


_TAKEN = object()
Outputs = defaultdict[_Operator, list[_Kept | None]]
"""By operator, what is kept of each of its calls; ``None`` of those that run again."""


def _detached(tensor: Tensor) -> Tensor:
    """A tensor without the graph that autograd is about to give it, but with its count of writes."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _of_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """``values`` with those of ``function`` in place of the tensors."""
    return function(values) if isinstance(values, Tensor) else tree_map_only(Tensor, function, values)


def _tensors(values: Any) -> list[Tensor]:
    """Those in ``values``, mostly one."""
    return [values] if isinstance(values, Tensor) else [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _versions(values: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(values)]


class _Run(TorchDispatchMode):
    """A run of a block, ``outputs`` being kept by the first for the second."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As torch's own modes for checkpoints do."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch's compiler out without the wrapper around the method below, a fifth of an operator's cost."""
        return False

    def __init__(self, outputs: Outputs, block: str) -> None:
        TorchDispatchMode.__init__(self)
        self.outputs = outputs
        self.block = block


class _FirstRun(_Run):
    """The run in the forward, and NOTE [ writing in place ]."""

    def __init__(self, outputs: Outputs, block: str, inputs: tuple[Any, ...]) -> None:
        _Run.__init__(self, outputs, block)
        self.inputs = _storages(inputs)
        self.kept: dict[int, int] = {}
        self.unlisted: list[_Kept] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DETACH:
            return args[0].detach()
        known, kwargs = _KNOWN.get(id(func)) or _known_of(func), kwargs or {}
        if known.written:
            self._allow_writes(known, args, kwargs)
        output = func(*args, **kwargs)
        if known.is_counted:
            kept = _Kept(output) if known.may_be_kept and not draws(func, args, kwargs) else None
            self.outputs[known].append(kept)
            if kept is not None:
                self.unlisted.append(kept)
                if _WATCHING:
                    self._list_kept()
        return output

    def _allow_writes(self, known: _Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._list_kept()
        for storage in known.written_storages(args, kwargs):
            if storage in self.inputs:
                why = f"{known.op.name()} writes in place on an input of the block: write it out of place"
                raise _refusal(self.block, why)
            if self.kept.pop(storage, None) is not None:
                for watching in _WATCHING:
                    watching.pop(storage, None)
                self._keep_copies(storage)

    def _keep_copies(self, storage: int) -> None:
        for kept in filter(None, chain.from_iterable(self.outputs.values())):
            if storage in _storages(kept.output):
                kept.set(_of_tensors(partial(_copy_of_what_is_in, storage), kept.output))
                self.unlisted.append(kept)
        self._list_kept()

    def _list_kept(self) -> None:
        for storages in (_storages(kept.output) for kept in self.unlisted):
            self.kept |= storages
            for watching in _WATCHING:
                watching |= storages
        self.unlisted.clear()


def _copy_of_what_is_in(storage: int, tensor: Tensor) -> Tensor:
    is_in = storage in _storages(tensor)
    return tensor.new_empty_strided(tensor.size(), tensor.stride()).copy_(tensor) if is_in else tensor


class _SecondRun(_Run):
    """The run in the backward: kept outputs in place of their operators, BatchNorm recording nothing."""

    def __init__(self, outputs: Outputs, block: str, frozen: FrozenStatistics) -> None:
        _Run.__init__(self, outputs, block)
        self.frozen = frozen

    def __enter__(self) -> "_SecondRun":
        self.calls = {op: iter(outputs) for op, outputs in self.outputs.items()}
        self.frozen.__enter__()
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        TorchDispatchMode.__exit__(self, kind, error, trace)
        self.frozen.__exit__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DETACH:
            return args[0].detach()
        known = _KNOWN.get(id(func)) or _known_of(func)
        kept: Any = next(self.calls.get(known, _NO_CALLS), _NO_CALLS) if known.is_counted else None
        if kept is _NO_CALLS:
            why = (
                "its second run uses other operators than its first: leave contexts and remove the plan after the "
                "backward, use no weight twice under one autocast"
            )
            raise _refusal(self.block, why)
        return func(*args, **(kwargs or {})) if kept is None else kept.take(self.block)


_NO_CALLS: Iterator[Any] = iter(())


def _refusal(block: str, reason_and_way_out: str) -> InputError:
    return InputError(
        f"strategy: {block} cannot run under selective, because {reason_and_way_out}, or keep or recompute this block"
    )


def _storages(values: Any) -> dict[int, int]:
    """Identity and bytes of the storages of all tensors in ``values``; fake ones have no address."""
    storages = [tensor.untyped_storage() for tensor in _tensors(values)]
    return {storage._cdata: storage.nbytes() for storage in storages if storage.nbytes()}
