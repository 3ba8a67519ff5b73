"""What runs in place of a model's own forwards while a plan is in force.

These are objects that hold the modules they run, so that a deep copy of the model (an EMA, say) runs the copy's own
modules. Without gradients (evaluation, generation) the model runs as if there were no plan.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memsave_recipes.activations.joint import JointLayers
from memsave_recipes.activations.layer_calls import taken_apart
from memsave_recipes.activations.offload import offload
from memsave_recipes.activations.recompute import BlockRuns, recompute
from memsave_recipes.activations.selective import select_ops
from memsave_recipes.activations.stacks import Block, Sequence
from memsave_recipes.plans import Action

Watch = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]
"""``watch(name, run, inputs)`` is called in place of ``run(*inputs)`` for every span of a sequence and every layer."""


def keep(function: Callable[..., Any], *inputs: Any, modules: list[nn.Module]) -> Any:
    """``function(*inputs)``, as it is."""
    return function(*inputs)


RUN: dict[Action, Callable[..., Any]] = {
    Action.KEEP: keep,
    Action.RECOMPUTE: recompute,
    Action.SELECT_OPS: select_ops,
    Action.OFFLOAD: offload,
    Action.COMPILE: keep,
}
"""How each action runs a function: ``RUN[action](function, *inputs, modules=...)``. What is compiled is so already."""


@dataclass
class SpannedBlocks:
    """The blocks of one span of a ``Sequence``, run together."""

    blocks: tuple[Block, ...]
    action: Action
    runs: BlockRuns
    watch: Watch | None = None

    def __call__(self, *state: Tensor) -> tuple[Tensor, ...]:
        """State in, state out, keeping what the action keeps."""
        return self.run(*state) if self.watch is None else self.watch(self.blocks[0].name, self.run, state)

    def run(self, *state: Tensor) -> tuple[Tensor, ...]:
        """The same without anyone watching."""
        forward = self.runs.noted(self.forward, *(block.name for block in self.blocks))
        return RUN[self.action](forward, *state, modules=[m for block in self.blocks for m in block.modules])

    def forward(self, *state: Tensor) -> tuple[Tensor, ...]:
        """The blocks, one after the other."""
        for block in self.blocks:
            state = block.run(*state)
        return state


@dataclass
class SpannedSequence:
    """The forward of a ``Sequence``'s root under a plan."""

    sequence: Sequence
    spans: list[SpannedBlocks]

    def __call__(self, x: Tensor) -> Tensor:
        """What the root's own forward gives."""
        if not torch.is_grad_enabled():
            return type(self.sequence.root).forward(self.sequence.root, x)
        state: tuple[Tensor, ...] = (x,)
        for span in self.spans:
            state = span(*state)
        return state[0]


@dataclass
class SpannedLayer:
    """The forward of a layer that the model calls, by itself under one action."""

    name: str
    action: Action
    module: nn.Module
    method: Callable[..., Any]
    runs: BlockRuns
    watch: Watch | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer's own forward gives."""
        if not torch.is_grad_enabled():
            return self.method(*args, **kwargs)
        call, state = taken_apart(self.module, self.method, args, kwargs)
        run = partial(RUN[self.action], self.runs.noted(call, self.name), modules=[self.module])
        return run(*state) if self.watch is None else self.watch(self.name, run, state)


@dataclass
class LayerInSpan:
    """The forward of a layer that the model calls, and that recomputes together with its neighbours."""

    name: str
    module: nn.Module
    method: Callable[..., Any]
    span: JointLayers
    position: int
    runs: BlockRuns
    watch: Watch | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer's own forward gives."""
        if not torch.is_grad_enabled():
            return self.method(*args, **kwargs)
        call, state = taken_apart(self.module, self.method, args, kwargs)
        run = partial(self.span.run, self.position, self.runs.noted(call, self.name))
        return run(*state) if self.watch is None else self.watch(self.name, run, state)
