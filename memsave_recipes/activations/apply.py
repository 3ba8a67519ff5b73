"""Make a model obey a plan, and take it back: ``handle = apply_plan(model, plan); ...; handle.remove()``.

Only the ``forward`` of single module *instances* is replaced, so parameters, buffers, hooks and state-dict keys stay as
they are. The replacements are objects that hold the modules they run, so that a deep copy of the model (an EMA, say)
runs the copy's own modules. Without gradients (evaluation, generation) the model runs as if there were no plan.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memsave_recipes.activations.blocks import (
    Block,
    Layer,
    Layers,
    Sequence,
    Stack,
    begins_in_place,
    block_names,
    find_bottlenecks,
    find_stacks,
)
from memsave_recipes.activations.recompute import recompute
from memsave_recipes.errors import InputError
from memsave_recipes.plans import Action, Plan, plan_for, read_plan

OBEYED = {Action.KEEP, Action.RECOMPUTE}


def make_plan(model: nn.Module, strategy: str) -> Plan:
    """The plan that ``strategy`` makes for ``model``.

    Args:
        model: anything in which ``find_stacks`` finds blocks.
        strategy: ``none``, ``full``, ``every:K``, ``segments:K``, ``bottleneck`` (DenseNets), or the path of a
            ``plan.json``.

    Raises:
        InputError: no such strategy or file, K out of range, or the model has no blocks for it.
    """
    if strategy.endswith(".json"):
        return read_plan(strategy)
    if strategy == "bottleneck":
        full = plan_for("full", block_names(_required(find_bottlenecks(model), model, strategy)))
        return Plan(strategy=strategy, blocks=full.blocks, spans=full.spans)
    stacks = find_stacks(model)
    return plan_for(strategy, block_names(stacks if strategy == "none" else _required(stacks, model, strategy)))


def apply_plan(model: nn.Module, plan: Plan) -> "PlanHandle":
    """Make the training forward of ``model`` follow ``plan`` until ``remove()`` is called on the result.

    Apply it before the model is wrapped or compiled.

    Raises:
        InputError: the plan was made for other blocks, a span reaches over the end of a stack, or an action is one that
            only a later version can do.
    """
    if unknown := {span.action for span in plan.spans} - OBEYED:
        words = ", ".join(sorted(action.value for action in unknown))
        raise InputError(
            f"the plan {plan.strategy} asks for {words}, which cannot be done yet: keep or recompute instead"
        )
    handle = PlanHandle(plan)
    first = 0
    for stack in _stacks_of(model, plan):
        last = first + len(stack.blocks)
        spans = [span for span in plan.spans if first <= span.start < last]
        if spans and spans[-1].stop > last:
            raise InputError(
                f"the plan joins {plan.blocks[last - 1]} and {plan.blocks[last]}, which are not neighbours"
            )
        parts = [(stack.blocks[s.start - first : s.stop - first], s.action) for s in spans]
        if any(action is not Action.KEEP for _, action in parts):
            _install(stack, parts, handle)
        first = last
    return handle


@dataclass
class PlanHandle:
    """A plan in force. ``remove()`` sets the model back exactly; also a context manager."""

    plan: Plan
    replaced: list[tuple[nn.Module, str, Any]] = field(default_factory=list)

    def replace(self, module: nn.Module, attribute: str, value: Any) -> None:
        """Set an attribute of a module instance and remember what stood in its ``__dict__``, if anything."""
        self.replaced.append((module, attribute, module.__dict__.get(attribute, _ABSENT)))
        setattr(module, attribute, value)

    def remove(self) -> None:
        """Take the plan off; a second call does nothing."""
        while self.replaced:
            module, attribute, before = self.replaced.pop()
            if before is _ABSENT:
                delattr(module, attribute)
            else:
                setattr(module, attribute, before)

    def __enter__(self) -> "PlanHandle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


_ABSENT = object()


def _required(stacks: list[Stack], model: nn.Module, strategy: str) -> list[Stack]:
    if not stacks:
        raise InputError(
            f"--activation_checkpointing {strategy}: {type(model).__name__} has no blocks for it; use none"
        )
    return stacks


def _stacks_of(model: nn.Module, plan: Plan) -> list[Stack]:
    for stacks in (find_stacks(model), find_bottlenecks(model)):
        if tuple(name for names in block_names(stacks) for name in names) == plan.blocks:
            return stacks
    raise InputError(
        f"the plan {plan.strategy} was made for other blocks than those of this {type(model).__name__}: make it again"
    )


def _install(stack: Stack, parts: list[tuple[tuple[Any, ...], Action]], handle: PlanHandle) -> None:
    if isinstance(stack, Layers):
        for layers, action in parts:
            if action is Action.RECOMPUTE:
                _join_layers(layers, handle)
        return
    for blocks, action in parts:
        # A span that begins in place would overwrite the very input it has to start from again.
        if action is Action.RECOMPUTE and begins_in_place(blocks[0].modules[0]):
            handle.replace(blocks[0].modules[0], "inplace", False)
    handle.replace(stack.root, "forward", SpannedSequence(stack, [SpannedBlocks(b, a) for b, a in parts]))


@dataclass
class SpannedBlocks:
    """The blocks of one span of a ``Sequence``, run together."""

    blocks: tuple[Block, ...]
    action: Action

    def __call__(self, *state: Tensor) -> tuple[Tensor, ...]:
        """State in, state out, keeping what the action keeps."""
        if self.action is Action.KEEP:
            return self.run(*state)
        return recompute(self.run, *state, modules=[module for block in self.blocks for module in block.modules])

    def run(self, *state: Tensor) -> tuple[Tensor, ...]:
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


def _join_layers(layers: tuple[Layer, ...], handle: PlanHandle) -> None:
    span = JoinedLayers(
        modules=[layer.module for layer in layers],
        methods=[getattr(layer.module, layer.method) for layer in layers],
    )
    for position, layer in enumerate(layers):
        handle.replace(layer.module, layer.method, LayerInSpan(span, position))


@dataclass
class JoinedLayers:
    """Layers that the model calls one by one but that recompute together.

    All but the last only note their arguments and hand on what they got; the last one runs them all. That is right as
    long as the model hands each layer exactly what the layer before returned, which is checked. Known limit: whoever
    records what single layers return (``output_hidden_states=True`` while training) sees the noted inputs instead.
    """

    modules: list[nn.Module]
    methods: list[Callable[..., Any]]
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
        is_list = isinstance(hidden, list)
        run = _CallAll(self.methods, calls, is_list)
        return recompute(run, *(hidden if is_list else [hidden]), modules=self.modules)


@dataclass
class _CallAll:
    """Each method on what the one before returned, with the arguments that the model gave it."""

    methods: list[Callable[..., Any]]
    calls: list[tuple[Any, dict[str, Any]]]
    takes_list: bool

    def __call__(self, *state: Any) -> Any:
        hidden: Any = list(state) if self.takes_list else state[0]
        for method, (args, kwargs) in zip(self.methods, self.calls, strict=True):
            hidden = method(hidden, *args, **kwargs)
        return hidden


@dataclass
class LayerInSpan:
    """The forward of one layer of a ``JoinedLayers``."""

    span: JoinedLayers
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
