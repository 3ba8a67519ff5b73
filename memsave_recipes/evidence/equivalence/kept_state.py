"""The state of a model and of the random numbers, kept on the host and put back exactly."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class KeptState:
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
def lent(module: nn.Module, attributes: dict[str, Any]) -> Iterator[None]:
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
