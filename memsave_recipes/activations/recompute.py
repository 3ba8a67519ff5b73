"""Run a function now, keep only its inputs, and run it again in the backward.

A thin layer over ``torch.utils.checkpoint.checkpoint``, always non-reentrant (the reentrant form leaves parameters
without a gradient when the input needs none, and breaks DDP), with the RNG state restored for dropout and with
BatchNorm counted once. Gradients are those of the plain run, bit for bit.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from memsave_recipes.activations.batchnorm import FrozenStatistics, batchnorm_layers
from memsave_recipes.plans import Action, Plan

TWICE = (Action.RECOMPUTE, Action.SELECT_OPS)


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


@dataclass
class BlockRuns:
    """The names of the blocks that ran since a plan was applied. Noting them costs a step nothing that could round."""

    first: set[str] = field(default_factory=set)
    again: set[str] = field(default_factory=set)

    def noted(self, function: Callable[..., Any], *names: str) -> Callable[..., Any]:
        """``function``, which runs the blocks ``names``; a run after the first is one in the backward."""
        seen = self.first

        def run(*state: Any) -> Any:
            nonlocal seen
            seen.update(names)
            seen = self.again
            return function(*state)

        return run

    def objection(self, plan: Plan) -> str | None:
        """What is wrong with a plan of whose blocks fewer than half did what it says; ``None`` if nothing is."""
        planned = [name for action in TWICE for name in plan.blocks_under(action)]
        idle = [name for name in planned if name not in self.again]
        if 2 * len(idle) <= len(planned):
            return None
        never = [name for name in idle if name not in self.first]
        why = f"{_listed(never)} never ran" if never else f"nothing before or in {_listed(idle)} trains"
        return (
            f"--activation_checkpointing {plan.strategy}: {len(planned) - len(idle)} of {len(planned)} blocks ran "
            f"again in the backward, so it saves less memory than it says ({why})"
        )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
