"""Run steps of a model for measurement or verification, and leave its state as it was."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from math import inf
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from memsave_recipes.core.activations.block_state import ABSENT, CONTAINERS, replaced
from memsave_recipes.core.activations.micro_batches import tensors_in
from memsave_recipes.core.activations.streaming import stream_of
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.sharding.tensors import is_sharded, local


@contextmanager
def preserve_state(
    model: nn.Module,
    device: torch.device | None = None,
    *,
    everything: bool = False,
    idle: Collection[nn.Module] = (),
) -> Iterator["SavedState"]:
    """Put the model into training mode without gradients; afterwards its state is as before.

    Put back are buffers, gradients, what modules hold as attributes, and the random number generators of torch (on the
    host and on ``device``), Python and numpy. What a first forward installs is taken away: hooks, modules, parameters,
    classes. No hook acts on accumulated gradients meanwhile, as an optimizer that steps in the backward would, and
    those of streamed weights go to their parameters.

    Args:
        device: of the model; by default that of its parameters.
        everything: also the large parameters that train, which no forward and backward should change.
        idle: modules that do not run, so that nothing of them needs to be kept.

    Yields:
        The state, from which a run can begin again.

    Raises:
        InputError: a lazy module has not run, so that its weights would stay.
    """
    lazy = next((name for name, one in _tensors(model) if is_lazy(one)), None)
    if lazy is not None:
        raise InputError(f"model: {lazy} of a lazy module has no size before its first forward: run one forward first")
    with training_mode(model):
        state = SavedState(model, device or device_of(model), everything=everything, idle=idle)
        try:
            yield state
        finally:
            state.put_back()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _parameters_of(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters(recurse=False)}


def device_of(model: nn.Module) -> torch.device:
    """Return the device of its first parameter; the CPU without any."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


class SavedState:
    """The state that ``preserve_state`` puts back: tensors as copies on the host, gradients as they are."""

    def __init__(
        self, model: nn.Module, device: torch.device, *, everything: bool, idle: Collection[nn.Module]
    ) -> None:
        modules = [module for module in model.modules() if module not in idle]
        resting = _parameters_of(idle) - _parameters_of(modules) if idle else set()
        parameters = [parameter for parameter in model.parameters() if parameter not in resting]
        self.device = device
        self._parameters = {
            name: (local(p.detach()), _copy(local(p)))
            for name, p in model.named_parameters()
            if p.requires_grad and p not in resting and (everything or p.numel() <= MAX_ELEMENTS)
        }
        self._buffers = [
            (buffer, _copy(buffer)) for module in modules for buffer in module._buffers.values() if buffer is not None
        ]
        whole = [] if is_sharded(model) else parameters  # FSDP2 replaces parameters around a forward
        by_name = [module._buffers for module in modules] + [module._parameters for module in modules if whole]
        self._by_name: list[tuple[Any, dict[str, Any]]] = [
            (tensors, dict(tensors))
            for tensors in by_name
            if isinstance(tensors, dict)  # TorchScript has others
        ]
        self._kinds = [(module, type(module)) for module in modules]
        kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__ if not _is_of(kind, BUILT_IN))
        self._attributes = _Attributes([*modules, *whole, *kinds], left_out=KEPT)
        self._gradients = [(parameter, parameter.grad, parameter.requires_grad) for parameter in parameters]
        self._hooks = [
            (p, dict(p._post_accumulate_grad_hooks or {}), dict(p._backward_hooks or {})) for p in parameters
        ]
        self._stream = stream_of(model)
        self._leave = None if self._stream is None else self._stream.leave
        self._generators = _read_generators(device)
        self._python_rng, self._numpy_rng = random.getstate(), np.random.get_state()
        self._clear_gradients()

    def restart(self) -> None:
        """Put back the state for another run, without gradients. The plan that is on the model or off it stays so."""
        self._put_back_values(but=FORWARD)
        self._clear_gradients()

    def put_back(self) -> None:
        """Put back all as it was, gradients and the hooks of parameters too."""
        self._put_back_values()
        for parameter, gradient, trains in self._gradients:
            parameter.requires_grad_(trains).grad = gradient
        for parameter, of_sums, of_gradients in self._hooks:
            _refill(parameter._post_accumulate_grad_hooks, of_sums)
            _refill(parameter._backward_hooks, of_gradients)
        if self._stream is not None:
            self._stream.leave = self._leave

    def changed_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters that were saved and now differ."""
        for name, (parameter, kept) in self._parameters.items():
            if not _is_same(parameter, kept):
                yield name, parameter

    @torch.no_grad()
    def _put_back_values(self, but: Collection[str] = ()) -> None:
        for module, kind in self._kinds:
            if type(module) is not kind:
                module.__class__ = kind
        self._attributes.put_back(but)
        for tensors, before in self._by_name:
            _refill(tensors, before)
        for tensor, kept in (*self._parameters.values(), *self._buffers):
            _restore(tensor, kept)
        random.setstate(self._python_rng)
        np.random.set_state(self._numpy_rng)
        torch.set_rng_state(self._generators["cpu"])
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_rng_state(self._generators[str(self.device)], self.device)

    def _clear_gradients(self) -> None:
        for parameter, _, _ in self._gradients:
            parameter.grad = None
        for parameter, _, of_gradients in self._hooks:
            _refill(parameter._post_accumulate_grad_hooks, {})
            _refill(parameter._backward_hooks, of_gradients)
        if self._stream is not None:
            self._stream.leave = None


def read_rng(device: torch.device) -> dict[str, Tensor]:
    """Return the state of every generator that a forward may draw from, but numpy's."""
    return _read_generators(device) | {"python": torch.tensor(random.getstate()[1])}


def _read_generators(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[str(device)] = torch.get_device_module(device).get_rng_state(device)
    return states


def _copy(tensor: Tensor) -> Tensor:
    """Copy to the host; a fake tensor, which has no values, stays itself."""
    return tensor if _has_no_values(tensor) else tensor.detach().to("cpu", copy=True)


def _restore(tensor: Tensor, kept: Tensor) -> None:
    """Write only where something has changed: a tensor's version counts writes."""
    if not _is_same(tensor, kept):
        tensor.copy_(kept)


def _is_same(tensor: Tensor, kept: Tensor) -> bool:
    if _has_no_values(tensor):
        return True
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    now = tensor.detach().cpu()
    return now.dtype == kept.dtype and torch.equal(_bytes(now), _bytes(kept))  # bytes, so that a NaN equals itself


def _has_no_values(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Put a model that is in evaluation mode into training mode; afterwards every module is in its own mode again.

    ``from_pretrained`` returns models in evaluation mode, whose dropout saves nothing for backward. A model that is
    itself in training mode stays as it is: a module of it that evaluates (a frozen BatchNorm, say) does so in training.
    """
    modes = [(module, module.training) for module in model.modules()]
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end. ``handles`` may register them as they are asked for."""
    with ExitStack() as hooks:
        for handle in handles:
            hooks.enter_context(handle)
        yield


def freeing_gradients(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """Inside, free each gradient of ``parameters`` as soon as it is made."""

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    return hooked(one.register_post_accumulate_grad_hook(free) for one in parameters if one.requires_grad)


@contextmanager
def without_layerdrop(model: nn.Module) -> Iterator[None]:
    """Let no layer be left out at random (LayerDrop, Fan et al. 2019, https://arxiv.org/abs/1909.11556).

    Models of transformers read its rate from an attribute, of a module or of its configuration.
    """
    holders = {id(holder): holder for module in model.modules() for holder in (module, getattr(module, "config", None))}
    with ExitStack() as stack:
        for holder in holders.values():
            for name, rate in [*getattr(holder, "__dict__", {}).items()]:
                if "layerdrop" in name and isinstance(rate, float):
                    stack.enter_context(replaced(holder, name, 0.0))
        yield


def running_blocks(
    model: nn.Module, stacks: Sequence[Sequence[str]], forward: Callable[[], Any], device: torch.device
) -> dict[str, bool]:
    """Return the names of the blocks in ``stacks`` that ``forward``, one of ``model``'s, runs, in order.

    Each with whether a backward comes to it. That is looked for where weights are frozen and not in shards, which a
    forward without its backward would leave gathered. Nothing is saved for it. A block that runs a few modules
    (``0..2``) goes by the first of them. One that runs several times is there once.
    """
    looks = not (is_sharded(model) or all(parameter.requires_grad for parameter in model.parameters()))
    ran: dict[str, bool] = {}

    def recorded(name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ran.setdefault(name, not looks)
        output = method(*args, **kwargs)
        ran[name] |= any(tensor.requires_grad for tensor in tensors_in(output))
        return output

    def note(module: nn.Module, args: Any) -> None:
        ran.setdefault(scripted.get(module, ""), True)

    scripted: dict[nn.Module, str] = {}
    with ExitStack() as recording:
        for name in (name for names in stacks for name in names):
            module = model.get_submodule(name.partition("..")[0])
            if isinstance(module, torch.jit.ScriptModule):  # whose forward cannot be replaced
                scripted[module] = name
                continue
            recording.enter_context(replaced(module, "forward", partial(recorded, name, module.forward)))
        if scripted:
            recording.enter_context(register_module_forward_pre_hook(note))
        saves_nothing = saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)
        with preserve_state(model, device), without_layerdrop(model), torch.set_grad_enabled(looks), saves_nothing:
            forward()
    ran.pop("", None)
    return ran


MAX_ELEMENTS = 100_000
"""Of what is put back in place. Larger ones are data and weights, which no forward changes."""
HOLDERS = (tuple, *CONTAINERS)
COPIED = (Tensor, *HOLDERS)
OPAQUE = (Tensor, nn.Module, type, ModuleType)
"""Of which no attributes are put back where others hold them."""
BUILT_IN = ("torch", "builtins", "abc", "typing")
"""Packages with classes of which no forward changes the attributes."""
OURS = (*BUILT_IN, "memsave_recipes")
"""Packages with objects that are left alone."""
FORWARD = ("forward",)
KEPT = ("_parameters", "_buffers", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
"""Attributes of modules: names of tensors (``SavedState``), and hooks that FSDP2 registers once, in a first forward."""


@contextmanager
def preserve_attributes(owners: Iterable[Any]) -> Iterator[None]:
    """Put the attributes of ``owners`` back, and of the objects that they hold: numbers, texts, tensors, containers.

    What these objects hold is put back where it was, and not changed itself.
    """
    attributes = _Attributes(owners)
    try:
        yield
    finally:
        attributes.put_back()


class _Attributes:
    """The attributes of ``owners`` and of the objects that they hold now, without those ``left_out``."""

    def __init__(self, owners: Iterable[Any], *, left_out: Collection[str] = ()) -> None:
        self._left_out = frozenset(left_out)
        found = {id(owner): owner for owner in owners}
        held = [one for owner in found.values() for value in vars(owner).values() for one in _objects_in(value)]
        found |= {id(one): one for one in held if id(one) not in found}
        self._kept = [(owner, dict(self._own(owner))) for owner in found.values()]
        self._restorers = _restorers([value for _, kept in self._kept for value in kept.values()])

    def _own(self, owner: Any) -> list[tuple[str, Any]]:
        is_class = isinstance(owner, type)
        return [
            (name, value)
            for name, value in vars(owner).items()
            if name not in self._left_out and not (is_class and name.startswith("__"))
        ]

    def put_back(self, but: Collection[str] = ()) -> None:
        """Set them again, but for those named, and take away those that are new."""
        for restore in self._restorers:
            restore()
        for owner, kept in self._kept:
            for name, _ in self._own(owner):
                if name not in kept and name not in but:
                    delattr(owner, name) if isinstance(owner, type) else vars(owner).pop(name)
            for name, value in kept.items():
                if name not in but and vars(owner).get(name, ABSENT) is not value:
                    setattr(owner, name, value) if isinstance(owner, type) else vars(owner).update({name: value})


def _is_of(kind: type, packages: Collection[str]) -> bool:
    return kind.__module__.partition(".")[0] in packages


def _objects_in(value: Any) -> Iterator[Any]:
    """Yield the objects with attributes in an attribute, and in its containers."""
    if isinstance(value, HOLDERS):
        if _num_elements(value) <= MAX_ELEMENTS:
            for one in value.values() if isinstance(value, dict) else value:
                yield from _objects_in(one)
    elif not (isinstance(value, OPAQUE) or _is_of(type(value), OURS)) and hasattr(value, "__dict__"):
        yield value


def _num_elements(value: Any) -> float:
    if isinstance(value, Tensor):
        return value.numel()
    if not isinstance(value, HOLDERS):
        return 1
    if len(value) > MAX_ELEMENTS:
        return inf
    return sum(map(_num_elements, value.values() if isinstance(value, dict) else value))


def _restorers(values: Iterable[Any]) -> list[Callable[[], object]]:
    """Make functions that let the tensors and containers among ``values``, if they are small, hold what they hold."""
    copied = [value for value in values if isinstance(value, COPIED) and _num_elements(value) <= MAX_ELEMENTS]
    return [
        _tensor_restorer(value) if isinstance(value, Tensor) else _container_restorer(value)
        for value in copied
        if not isinstance(value, nn.Parameter)
    ]


def _tensor_restorer(tensor: Tensor) -> Callable[[], object]:
    kept = _copy(tensor)
    return torch.no_grad()(lambda: _restore(tensor, kept))


def _container_restorer(container: Any) -> Callable[[], object]:
    entries = _entries(container)
    restorers = _restorers(entries.values()) if entries else ()

    def restore() -> None:
        for restore_entry in restorers:
            restore_entry()
        _refill(container, entries)

    return restore


def _entries(container: Any) -> dict[Any, Any]:
    return dict(container.items() if isinstance(container, dict) else enumerate(container))


def _refill(container: Any, entries: dict[Any, Any]) -> None:
    """Let a container, if there is one, hold ``entries`` again; it is written on only where it holds others."""
    now = {} if container is None else _entries(container)
    if list(now) == list(entries) and all(now[key] is entry for key, entry in entries.items()):
        return
    container.clear()
    add = container.update if hasattr(container, "update") else container.extend
    add(entries if isinstance(container, dict) else entries.values())
