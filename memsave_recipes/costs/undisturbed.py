"""Run steps of a model for what can be learned from them, and leave no trace."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from memsave_recipes.measure.training_mode import training_mode


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
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
        with undisturbed(model, device), without_layerdrop(model), torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return ran


def _note(ran: set[str], name: str, module: nn.Module, inputs: object) -> None:
    ran.add(name)
