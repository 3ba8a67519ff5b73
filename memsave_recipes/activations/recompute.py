"""Run a function now, keep only its inputs, and run it again in the backward.

A thin layer over ``torch.utils.checkpoint.checkpoint``, always non-reentrant (the reentrant form leaves parameters
without a gradient when the input needs none, and breaks DDP), with the RNG state restored for dropout and with
BatchNorm counted once. Gradients are those of the plain run, bit for bit.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from memsave_recipes.activations.batchnorm import FrozenStatistics, batchnorm_layers


def recompute(function: Callable[..., Any], *inputs: Any, modules: Iterable[nn.Module]) -> Any:
    """``function(*inputs)`` without keeping what happens inside.

    Args:
        function: runs once now and once in the backward; must do the same both times.
        inputs: tensors among them are kept for the backward; pass them here rather than by closure so that they count
            as saved tensors.
        modules: what ``function`` runs; their BatchNorm layers record nothing the second time.

    Raises:
        torch.utils.checkpoint.CheckpointError: in the backward, if the second run saves other tensors than the first.
    """
    layers = batchnorm_layers(modules)
    context_fn = partial(_contexts, layers) if layers else noop_context_fn
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=context_fn)


def _contexts(layers: Iterable[nn.Module]) -> tuple[nullcontext[None], FrozenStatistics]:
    return nullcontext(), FrozenStatistics(layers)
