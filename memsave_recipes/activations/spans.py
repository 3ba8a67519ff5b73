"""What runs in place of a model's own forwards while a plan is in force.

These are objects that hold the modules they run, so that a deep copy of the model (an EMA, say) runs the copy's own
modules. Without gradients (evaluation, generation) the model runs as if there were no plan.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memsave_recipes.activations.offload import offload
from memsave_recipes.activations.recompute import recompute
from memsave_recipes.activations.selective import select_ops
from memsave_recipes.activations.stacks import Block, Sequence
from memsave_recipes.plans import Action

Watch = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]
"""``watch(name, run, inputs)`` is called in place of ``run(*inputs)`` for every span: for what measures them."""


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
    watch: Watch | None = None

    def __call__(self, *state: Tensor) -> tuple[Tensor, ...]:
        """State in, state out, keeping what the action keeps."""
        return self.run(*state) if self.watch is None else self.watch(self.blocks[0].name, self.run, state)

    def run(self, *state: Tensor) -> tuple[Tensor, ...]:
        """The same without anyone watching."""
        return RUN[self.action](self.forward, *state, modules=[m for block in self.blocks for m in block.modules])

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
class SpannedLayers:
    """Layers that the model calls one by one, under one action; those that recompute do so together.

    All but the last only note their arguments and hand on what they got; the last one runs them all. That is right as
    long as the model hands each layer exactly what the layer before returned, which is checked. Known limit: whoever
    records what single layers return (``output_hidden_states=True`` while training) sees the noted inputs instead.
    """

    name: str
    action: Action
    modules: list[nn.Module]
    methods: list[Callable[..., Any]]
    watch: Watch | None = None
    waiting: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    handed_on: Any = None

    def call(self, position: int, hidden: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call of the layer at ``position``: note it, or run all that were noted."""
        if position == 0:
            self.waiting = []
        elif hidden is not self.handed_on:
            raise RuntimeError(
                f"{type(self.modules[position]).__name__} does not get what the layer before returned, so these layers "
                "cannot recompute together: use --activation_checkpointing full or every:K"
            )
        self.waiting.append((args, kwargs))
        if position < len(self.modules) - 1:
            self.handed_on = hidden
            return hidden
        calls, self.waiting, self.handed_on = self.waiting, [], None
        return self.run(_CallAll(self.methods, calls, isinstance(hidden, list)), hidden)

    def run(self, call_all: "_CallAll", hidden: Any) -> Any:
        """All layers on ``hidden``: a tensor, or a list of them as a dense layer takes it."""

        def under_action(*state: Any) -> Any:
            return RUN[self.action](call_all, *state, modules=self.modules)

        state = tuple(hidden) if call_all.takes_list else (hidden,)
        return under_action(*state) if self.watch is None else self.watch(self.name, under_action, state)


@dataclass
class _CallAll:
    """Each method on what the one before returned, with the arguments that the model gave it."""

    methods: list[Callable[..., Any]]
    calls: list[tuple[Any, dict[str, Any]]]
    takes_list: bool

    def __call__(self, *state: Any) -> Any:
        hidden: Any = list(state) if self.takes_list else state[0]
        for method, (args, kwargs) in zip(self.methods, self.calls, strict=True):
            hidden = method(hidden, *map(_own_cache, args), **kwargs)
        return hidden


@dataclass
class LayerInSpan:
    """The forward of one layer of a ``SpannedLayers``."""

    span: SpannedLayers
    position: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer's own forward gives, or its input while the span waits for its last layer."""
        if not torch.is_grad_enabled():
            return self.span.methods[self.position](*args, **kwargs)
        if not args:
            args = (kwargs.pop("hidden_states"),)
        return self.span.call(self.position, args[0], args[1:], _without_cache(kwargs))


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drop a key-value cache, which a second run of the layer would fill a second time."""
    without = {"past_key_values": None, "layer_past": None, "use_cache": False}
    return {name: without.get(name, value) for name, value in kwargs.items()}


def _own_cache(arg: Any) -> Any:
    """A key-value cache that GPT-2 hands by position: every run of a layer fills a copy, and so finds it as it was."""
    if not hasattr(arg, "get_seq_length"):
        return arg
    own = copy.copy(arg)
    own.layers = [copy.copy(layer) for layer in arg.layers]
    return own
