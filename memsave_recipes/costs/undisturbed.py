"""Run steps of a model for what can be learned from them, and leave no trace."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from memsave_recipes.activations.training_mode import training_mode


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
