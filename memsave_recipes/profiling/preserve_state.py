"""A model as it will train, whatever mode it was left in.

Run steps of a model for what can be learned from them, and leave no trace.

The state of a model and of the random numbers, kept on the host and put back exactly.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Inside, all of a model that is in evaluation mode trains; afterwards every module is in its own mode again.

    ``from_pretrained`` returns models in evaluation mode, whose dropout keeps nothing for a backward. A model that is
    itself in training mode stays as it is: what of it evaluates (a frozen BatchNorm, say) will do so in training.
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
def preserve_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Random numbers (torch's, Python's, numpy's), buffers, modes of modules and gradients are put back at the end.

    Inside the model trains, there are no gradients, and what others do with gradients (step an optimizer, say) is left
    undone.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    hooks = [hooks for parameter in model.parameters() if (hooks := parameter._post_accumulate_grad_hooks)]
    waiting = [dict(of_one) for of_one in hooks]
    gradients = [parameter.grad for parameter in model.parameters()]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    devices = [] if device.type == "cpu" else [device]
    generators = torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")
    with generators, training_mode(model):
        try:
            for of_one in hooks:
                of_one.clear()
            clear_gradients(model)
            yield
        finally:
            with torch.no_grad():
                for buffer, before in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            for of_one, kept in zip(hooks, waiting, strict=True):
                of_one.update(kept)
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def clear_gradients(model: nn.Module) -> None:
    """As before the first backward of a step."""
    for parameter in model.parameters():
        parameter.grad = None


@contextmanager
def without_layerdrop(model: nn.Module) -> Iterator[None]:
    """Inside, no layer is left out at random (LayerDrop, Fan et al. 2019, https://arxiv.org/abs/1909.11556).

    Models of transformers read its rate from an attribute, of a module or of its configuration.
    """
    holders = {id(holder): holder for module in model.modules() for holder in (module, getattr(module, "config", None))}
    rates = [
        (holder, name, rate)
        for holder in holders.values()
        for name, rate in getattr(holder, "__dict__", {}).items()
        if "layerdrop" in name and isinstance(rate, float)
    ]
    for holder, name, _ in rates:
        setattr(holder, name, 0.0)
    try:
        yield
    finally:
        for holder, name, rate in rates:
            setattr(holder, name, rate)


def running_blocks(
    model: nn.Module, stacks: Sequence[Sequence[str]], forward: Callable[[], Any], device: torch.device
) -> set[str]:
    """The names of the blocks in ``stacks`` that ``forward``, one of ``model``'s, runs.

    A block that runs a few modules (``0..2``) goes by the first of them.
    """
    ran: set[str] = set()
    names = [name for names in stacks for name in names]
    handles = [
        model.get_submodule(name.partition("..")[0]).register_forward_pre_hook(partial(_note, ran, name))
        for name in names
    ]
    try:
        with preserve_state(model, device), without_layerdrop(model), torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return ran


def _note(ran: set[str], name: str, module: nn.Module, inputs: object) -> None:
    ran.add(name)


class StateCopy:
    """The state now; ``put_back()`` makes it so again, as often as wanted.

    Kept are the parameters that train, buffers, gradients, the numbers that modules hold as attributes (training flags
    among them), and the RNG of torch, on the host and on the model's device, and of Python. From the beginning on the
    model has no gradients, and no hook acts on finished gradients, as an optimizer that steps in the backward would.
    """

    def __init__(self, model: nn.Module) -> None:
        modules, parameters = list(model.modules()), list(model.parameters())
        self.device = parameters[0].device if parameters else torch.device("cpu")
        self.parameters = {
            name: (parameter, _copy(parameter))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.buffers = [
            (module, name, buffer, _copy(buffer))
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.numbers = [(module, {k: v for k, v in vars(module).items() if _is_number(v)}) for module in modules]
        self.gradients = [(parameter, parameter.grad) for parameter in parameters]
        hooks = [parameter._post_accumulate_grad_hooks for parameter in parameters]
        self.hooks = [(of_one, dict(of_one)) for of_one in hooks if of_one]
        self.rng, self.python_rng = read_rng(self.device), random.getstate()
        self._clear_gradients()

    def restart(self) -> None:
        """The state for another run: all as it was, without gradients."""
        self._put_back_values()
        self._clear_gradients()

    def put_back(self) -> None:
        """All as it was, gradients and their hooks too."""
        self._put_back_values()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        for hooks, kept in self.hooks:
            hooks.update(kept)

    def changed_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Those that have moved, which no forward and backward should do."""
        for name, (parameter, kept) in self.parameters.items():
            if not _is_same(parameter, kept):
                yield name, parameter

    @torch.no_grad()
    def _put_back_values(self) -> None:
        for parameter, kept in self.parameters.values():
            _restore(parameter, kept)
        for module, name, buffer, kept in self.buffers:
            module._buffers[name] = buffer
            _restore(buffer, kept)
        for module, numbers in self.numbers:
            vars(module).update(numbers)
        random.setstate(self.python_rng)
        torch.set_rng_state(self.rng["cpu"])
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_rng_state(self.rng[str(self.device)], self.device)

    def _clear_gradients(self) -> None:
        for parameter, _ in self.gradients:
            parameter.grad = None
        for hooks, _ in self.hooks:
            hooks.clear()


@contextmanager
def swap_contents(module: nn.Module, attributes: dict[str, Any]) -> Iterator[None]:
    """``module`` with the inside of another one, for a while."""
    own = dict(vars(module))
    try:
        vars(module).clear()
        vars(module).update(attributes)
        yield
    finally:
        vars(module).clear()
        vars(module).update(own)


def read_rng(device: torch.device) -> dict[str, Tensor]:
    """The state of every generator that a forward may draw from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[str(device)] = torch.get_device_module(device).get_rng_state(device)
    return states | {"python": torch.tensor(random.getstate()[1])}


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _is_same(tensor: Tensor, kept: Tensor) -> bool:
    now = tensor.detach().cpu()
    return now.dtype == kept.dtype and torch.equal(_bytes(now), _bytes(kept))  # bytes, so that a NaN equals itself


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _restore(tensor: Tensor, kept: Tensor) -> None:
    """Where nothing has changed, nothing is written: a tensor's version counts writes."""
    if not _is_same(tensor, kept):
        tensor.copy_(kept)
