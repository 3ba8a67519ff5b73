"""Recompute a function in the backward from its inputs, with its random numbers restored and BatchNorm counted once.

A thin layer over ``torch.utils.checkpoint.checkpoint``, always non-reentrant (the reentrant form leaves parameters
without a gradient when the input needs none, and breaks DDP). Gradients are bit for bit those of the baseline, a run
without checkpointing.

NOTE [ statistics once ]
1. A training forward of BatchNorm moves ``running_mean``, ``running_var`` and ``num_batches_tracked``. Under activation
   checkpointing the forward runs twice, so the statistics move twice: gradients are right, evaluation is not, and no
   loss curve shows it (https://github.com/pytorch/pytorch/issues/96136).
2. While recomputing, momentum 0 makes the update ``running = 1 * running + 0 * batch``, and without
   ``num_batches_tracked`` nothing is counted; SyncBatchNorm, which insists on a counter, counts in another one. Both
   are set back afterwards, also when the recomputation raises (it does so by design: torch stops it early once the last
   tensor it needs is there).
3. ``track_running_stats = False`` is no way out: BatchNorm then saves fewer tensors, and the checkpoint raises.
4. Other modules that write on a buffer in their forward (spectral norm, the ranges of quantized activations) compute
   with it as well, so a second run would compute something else. They are refused in the first run.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint, noop_context_fn

from memsave_recipes.errors import InputError
from memsave_recipes.plans import Action, Plan
from memsave_recipes.plans.chain import TWICE


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
    layers = batchnorm_layers(modules)
    context_fn = partial(_contexts, layers) if layers else noop_context_fn
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=context_fn)


def check_buffers(function: Callable[..., Any], modules: Iterable[nn.Module]) -> Callable[..., Any]:
    """``function``, whose run leaves all buffers of ``modules`` but BatchNorm's as they are.

    Raises:
        InputError: by ``function``, if it writes on one: rule 4 of the NOTE.
    """
    buffers = [
        (layer, name, buffer, buffer._version)
        for module in modules
        for layer in module.modules()
        for name, buffer in layer._buffers.items()
        if buffer is not None and not isinstance(layer, _BatchNorm)
    ]

    def run(*inputs: Any) -> Any:
        outputs = function(*inputs)
        for layer, name, buffer, version in buffers:
            if layer._buffers[name] is not buffer or buffer._version != version:
                raise InputError(
                    f"strategy: {type(layer).__name__} writes on its buffer {name} in every forward, so no plan can "
                    "run it a second time: use none"
                )
        return outputs

    return run if buffers else function


def _contexts(layers: Iterable[nn.Module]) -> tuple[nullcontext[None], "FrozenStatistics"]:
    return nullcontext(), FrozenStatistics(layers)


class FrozenStatistics:
    """A context in which the BatchNorm layers below ``modules`` normalise by batch but record nothing.

    Can be entered again after it was left, as a second backward through a retained graph does.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers = [layer for layer in batchnorm_layers(modules) if layer.track_running_stats]
        self.saved: list[tuple[float | None, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        self.saved = [(layer.momentum, layer.num_batches_tracked) for layer in self.layers]
        for layer in self.layers:
            layer.momentum, layer.num_batches_tracked = 0.0, _nothing_counted(layer)

    def __exit__(self, *exception: object) -> None:
        for layer, (momentum, num_batches_tracked) in zip(self.layers, self.saved, strict=True):
            layer.momentum, layer.num_batches_tracked = momentum, num_batches_tracked


def _nothing_counted(layer: _BatchNorm) -> torch.Tensor | None:
    counter = layer.num_batches_tracked
    return torch.zeros_like(counter) if isinstance(layer, nn.SyncBatchNorm) and counter is not None else None


def batchnorm_layers(modules: Iterable[nn.Module]) -> list[_BatchNorm]:
    """All BatchNorm layers (SyncBatchNorm too) among ``modules`` and below them, each once."""
    found = {layer: None for module in modules for layer in module.modules() if isinstance(layer, _BatchNorm)}
    return list(found)


@dataclass
class BlockRuns:
    """The names of the blocks that ran since a plan was applied. Recording them changes no result."""

    first: set[str] = field(default_factory=set)
    again: set[str] = field(default_factory=set)

    def recorded(
        self, function: Callable[..., Any], *names: str, action: Action, modules: Iterable[nn.Module]
    ) -> Callable[..., Any]:
        """``function``, which runs the blocks ``names``; a run after the first is one in the backward.

        Raises:
            InputError: by the first run, if ``action`` cannot run these ``modules`` again: NOTE [ statistics once ].
        """
        runs, next_run = self.first, check_buffers(function, modules) if action in TWICE else function

        def run(*state: Any) -> Any:
            nonlocal runs, next_run
            runs.update(names)
            this_run, runs, next_run = next_run, self.again, function
            return this_run(*state)

        return run

    def objection(self, plan: Plan) -> str | None:
        """The objection to a plan of which fewer than half of the blocks ran again; ``None`` without one."""
        planned = [name for action in TWICE for name in plan.blocks_under(action)]
        idle = [name for name in planned if name not in self.again]
        if 2 * len(idle) <= len(planned):
            return None
        never = [name for name in idle if name not in self.first]
        why = f"{_listed(never)} never ran" if never else f"nothing before or in {_listed(idle)} trains"
        return (
            f"plan {plan.strategy}: {len(planned) - len(idle)} of {len(planned)} blocks ran "
            f"again in the backward, so it saves less memory than it says ({why})"
        )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
