"""The memory of an optimizer's state, from the optimizer itself: its class, its options and its parameters.

State that is there already is counted. That of an optimizer which has not stepped yet is made on torch's ``meta``
device, where tensors have no memory: a copy of the optimizer steps a parameter of each shape.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

ASSUMED_COPIES = 2
"""Of a parameter, in the state of an optimizer that cannot step on the ``meta`` device: those of AdamW."""
PLAIN = {"fused": False, "foreach": False, "capturable": False}
"""Options of torch's optimizers that choose a kernel for a device, and change no state but a few bytes of counters."""


def torch_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer inside the wrappers of Accelerate, Lightning and Fabric."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    found: Optimizer = optimizer
    return found


def state_bytes_of(optimizer: Optimizer) -> int:
    """The bytes of the state after a step; leaves the optimizer as it is."""
    there = sum(_bytes(state) for state in optimizer.state.values())
    return there or sum(_bytes_to_come(optimizer, group, shape) for group, shape in _parameters(optimizer))


def update_bytes_of(optimizer: Optimizer) -> int:
    """Temporaries of a step: a copy of all parameters where the device's update is neither fused nor by parameter.

    That is what torch's documentation of ``foreach`` states, which is the default of its optimizers on CUDA.
    """
    return sum(
        parameter.nbytes
        for group, parameter in _parameters(optimizer)
        if parameter.is_cuda and not group.get("fused") and group.get("foreach", False) is not False
    )


def _parameters(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    return ((group, p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad)


def _bytes_to_come(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> int:
    alone = torch.nn.Parameter(torch.empty_like(parameter, device="meta"))
    alone.grad = torch.empty_like(alone)
    options = {name: PLAIN.get(name, value) for name, value in group.items()}
    twin = copy.copy(optimizer)
    vars(twin).update(
        state=defaultdict(dict),
        param_groups=[{**options, "params": [alone]}],
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    stepped = False
    with suppress(Exception):  # a kernel of the device, after the state has been made
        type(optimizer).step(twin)  # not the instance's, which a schedule may have bound to the optimizer itself
        stepped = True
    return _bytes(twin.state[alone]) if stepped or twin.state[alone] else ASSUMED_COPIES * parameter.nbytes


def _bytes(state: dict[str, Any]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
