"""Weights that wait on the host, and are on the device for as long as their layer needs them.

Frozen ones only travel one way; of those that train, gradients leave for the host (``core/host/step.py``). A layer at a
time on the device is the idea of Pudipeddi et al. 2020, https://arxiv.org/abs/2002.05645.

Notes: ``docs/design/activations.md``.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from memsave_recipes.core.activations.block_state import replaced
from memsave_recipes.core.activations.blocks import CalledLayers, Layer, find_stacks
from memsave_recipes.core.activations.offload import Copies, SideStream
from memsave_recipes.core.activations.tiles import Caller
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans.chain import allocated_bytes

STREAMED = "_streamed"
"""Attribute of a layer whose weights are streamed; a plan on top replaces its forward, and leaves this."""
NONE, FROZEN, ALL = "none", "frozen", "all"
"""Which weights are streamed, if any."""
LEFT_TO_HOST = 0.25
"""Of the memory that a host has available, not pinned."""


@dataclass(eq=False)
class _Copied:
    """The copies of a layer's frozen weights; ``event`` until somebody has waited for them."""

    layer: "StreamedLayer"
    weights: dict[str, Tensor]
    event: Any


@dataclass(eq=False)
class WeightStream:
    """Copies the weights of one layer after the other to ``device``. See NOTE [ streamed weights ].

    Attributes:
        leave: takes the gradient of a parameter, on the device.
    """

    device: torch.device
    copies: Copies
    looks_ahead: bool = True
    leave: Callable[[nn.Parameter, Tensor], None] | None = None
    _last: tuple[Any, Any] = (None, None)
    _followed_by: dict[tuple[Any, Any], "StreamedLayer"] = field(default_factory=dict)
    _ahead: _Copied | None = None

    def fetch(self, layer: "StreamedLayer") -> dict[str, Tensor]:
        """The weights of ``layer``, by name; begins to copy those of the next one."""
        copied, self._ahead = self._ahead, None
        if copied is None or copied.layer is not layer:
            self._wait(copied)  # its memory may only be used again once it has been written
            copied = self._copy(layer)
        self._wait(copied)
        self._followed_by[self._last] = layer
        self._last = (self._last[1], layer)
        following = self._followed_by.get(self._last)
        if self.looks_ahead and following is not None:
            self._ahead = copied if following is layer else self._copy(following)
        return copied.weights

    def forget(self) -> None:
        """Let go of what was copied ahead."""
        copied, self._ahead = self._ahead, None
        self._wait(copied)

    def settle(self) -> None:
        """Wait until no copy reads the weights on the host, and let go of what was copied ahead."""
        if self._ahead is not None and self._ahead.event is not None:
            self._ahead.event.synchronize()
        self.forget()

    def _copy(self, layer: "StreamedLayer") -> _Copied:
        sources = {name: layer.module.get_parameter(name).data for name in layer.names}
        # Selective checkpointing counts operators; whether copies are among those of a run depends on the run before.
        is_fake = any(isinstance(source, FakeTensor) for source in sources.values())
        with nullcontext() if is_fake else _disable_current_modes():
            weights = {name: torch.empty_like(source, device=self.device) for name, source in sources.items()}
            event = self.copies.start([(weights[name], source) for name, source in sources.items()])
        return _Copied(layer, weights, event)

    def _wait(self, copied: _Copied | None) -> None:
        if copied is not None and copied.event is not None:
            with _disable_current_modes():
                self.copies.wait(copied.event)
            copied.event = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightStream":
        """The layers of a copied model share it."""
        return self


@dataclass(eq=False)
class StreamedLayer:
    """The forward of a layer whose weights are streamed.

    Args:
        names: of these weights, in the layer.
    """

    module: nn.Module
    method: Callable[..., Any]
    names: tuple[str, ...]
    stream: WeightStream

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the layer's own forward."""
        copies = self.stream.fetch(self)
        weights = {f"module.{name}": self._trained(name, copy) for name, copy in copies.items()}
        return functional_call(Caller(self.module, self.method), weights, args, kwargs)

    def _trained(self, name: str, copy: Tensor) -> Tensor:
        """``copy`` as autograd is to see it."""
        parameter = self.module.get_parameter(name)
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return copy
        function: Any = _CopyOf  # which torch has not typed
        trained: Tensor = function.apply(parameter, copy, self.stream)
        return trained


class _CopyOf(torch.autograd.Function):
    """A parameter on the host, by its copy on the device."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, copy: Tensor, stream: WeightStream) -> Tensor:
        ctx.parameter, ctx.stream = parameter, stream
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        if ctx.stream.leave is None:
            return gradients[0].to(ctx.parameter.device), None, None
        ctx.stream.leave(ctx.parameter, gradients[0])
        return None, None, None


def place(model: nn.Module, device: torch.device, *, streamed: str = NONE) -> None:
    """Move ``model`` to ``device``, without the weights of its layers that are ``streamed``.

    On a CPU nothing can be streamed, and a warning says so.

    Args:
        streamed: ``none``, the ``frozen`` ones, or ``all``.

    Raises:
        InputError: as ``stream_weights``, or weights in float64, which Apple's GPUs lack.
    """
    if device.type == "mps" and any(tensor.dtype == torch.float64 for tensor in model.parameters()):
        raise InputError("dtype float64 does not work on an Apple GPU (mps): take float32, or launch with cpu.yaml")
    if streamed != NONE and device.type == "cpu":
        warnings.warn("stream_weights: the model runs on a CPU, so its weights stay where they are", stacklevel=2)
    if streamed == NONE or device.type == "cpu":
        model.to("cpu" if device.type == "cpu" else device)  # torch copies what is there already to a "cpu:0"
        return
    stream_weights(model, WeightStream(device, SideStream(device)), trained=streamed == ALL)
    if host_bytes(model) <= (1 - LEFT_TO_HOST) * psutil.virtual_memory().available:
        for parameter in streamed_parameters(model):
            parameter.data = parameter.data.pin_memory()
    for tensor in resident_tensors(model):
        tensor.data = tensor.data.to(device)


def stream_weights(model: nn.Module, stream: WeightStream, *, trained: bool = False) -> None:
    """From now on the layers of ``model`` take their frozen weights from ``stream``, or those that train as well.

    Raises:
        InputError: it has no layers with such weights.
    """
    found = _streamable(model, trained=trained)
    if not found:
        kind = "" if trained else "frozen "
        raise InputError(
            f"stream_weights host: {type(model).__name__} has no layers with {kind}weights of their own: leave it out"
        )
    for layer, names in found:
        streamed = StreamedLayer(layer.module, getattr(layer.module, layer.method), names, stream)
        setattr(layer.module, layer.method, streamed)
        setattr(layer.module, STREAMED, streamed)


def _streamable(model: nn.Module, *, trained: bool = False) -> list[tuple[Layer, tuple[str, ...]]]:
    """The layers with weights of their own that can be streamed, and the names of these in the layer."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    blocks = (layer for stack in find_stacks(model) if isinstance(stack, CalledLayers) for layer in stack.blocks)
    found = []
    for layer in {id(layer.module): layer for layer in blocks}.values():
        own = [*layer.module.named_parameters(remove_duplicate=False)]
        here = Counter(id(parameter) for _, parameter in own)
        wanted = [(name, one) for name, one in own if trained or not one.requires_grad]
        names = tuple(name for name, one in wanted if here[id(one)] == uses[id(one)])
        if names:
            found.append((layer, names))
    return found


def is_streamed(module: nn.Module) -> bool:
    """Whether weights of a layer wait on the host."""
    return STREAMED in vars(module)


def _streamed_layers(model: nn.Module) -> list[StreamedLayer]:
    return [vars(module)[STREAMED] for module in model.modules() if is_streamed(module)]


def stream_of(model: nn.Module) -> WeightStream | None:
    """The one that the layers of ``model`` take their frozen weights from, if any do."""
    return next((layer.stream for layer in _streamed_layers(model)), None)


def streamed_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that wait on the host, each once."""
    found = [layer.module.get_parameter(name) for layer in _streamed_layers(model) for name in layer.names]
    return list(dict.fromkeys(found))


def resident_tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers that are on the device all the time."""
    on_host = {id(parameter) for parameter in streamed_parameters(model)}
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in on_host]


def ahead_bytes(model: nn.Module, device: torch.device) -> int:
    """Of the weights that are copied ahead, at most, as the device counts them; 0 where none are streamed."""
    copies = [[layer.module.get_parameter(name).nbytes for name in layer.names] for layer in _streamed_layers(model)]
    return max((allocated_bytes(sizes, device) for sizes in copies), default=0)


def host_bytes(model: nn.Module) -> int:
    """Pinned memory that the weights on the host take: powers of two."""
    return sum(1 << (parameter.nbytes - 1).bit_length() for parameter in streamed_parameters(model))


def leave_to_this_rank(trained: nn.Module, others: Iterable[str] = ()) -> None:
    """Let DDP pass over the weights on the host, which it neither reduces nor could send from there.

    Args:
        trained: the module that DDP will wrap.
        others: the names of other weights that it is to pass over.
    """
    streamed = {id(parameter) for parameter in streamed_parameters(trained)}
    names = [name for name, parameter in trained.named_parameters() if id(parameter) in streamed]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(trained, [*names, *others])


def check_not_offloaded(model: nn.Module) -> None:
    """Refuse a model whose weights Accelerate moves between the host and the device.

    Raises:
        InputError: it does; in training no parameter would get a gradient
            (https://github.com/huggingface/accelerate/issues/3770).
    """
    hooks = [getattr(module, "_hf_hook", None) for module in model.modules()]
    if any(getattr(one, "offload", False) for hook in hooks for one in getattr(hook, "hooks", (hook,))):
        raise InputError(
            "accelerate's cpu_offload, disk_offload and device_map: no parameter of an offloaded model gets a "
            "gradient, so nothing would train: load it without, and keep weights on the host by stream_weights host"
        )


@contextmanager
def nothing_ahead(model: nn.Module) -> Iterator[None]:
    """Inside, each layer's weights are copied when it runs, so that its memory is its own."""
    stream = stream_of(model)
    if stream is None:
        yield
        return
    with replaced(stream, "looks_ahead", False):
        stream.forget()
        yield
