"""The forwards that replace a model's own while a plan is applied.

They are objects that hold the modules they run, so that a deep copy of the model (an EMA, say) runs the copy's own
modules. When the model runs as if there were no plan is in ``planned_forward.py``.

Notes: ``docs/design/activations.md``.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_leaves
from torch.utils.checkpoint import checkpoint

from memsave_recipes.core.activations.arguments import split_call
from memsave_recipes.core.activations.blocks import Block, SequentialStack
from memsave_recipes.core.activations.micro_batches import on_inner_tensors
from memsave_recipes.core.activations.offload import offload
from memsave_recipes.core.activations.planned_forward import PlannedForward
from memsave_recipes.core.activations.recompute import (
    BlockRuns,
    Checkpoint,
    Modules,
    RandomState,
    Settings,
    recompute,
    select_ops,
    statistics_once,
)
from memsave_recipes.core.activations.side_effects import SideEffects
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Action


@dataclass
class JointLayers:
    """The layers of one span. ``last`` is the span that the next call may join."""

    modules: Modules
    last: "weakref.ref[_Calls] | None" = None

    def run(self, position: int, call: Callable[..., Any], *state: Any) -> Any:
        """The call of the layer at ``position``, by the NOTE."""
        if len(state) != 1 or not isinstance(state[0], Tensor):
            return recompute(call, *state, modules=[self.modules[position]])
        calls = self.last() if self.last else None
        checkpoint = calls.checkpoint_for(position, *state) if calls else None
        if calls is None or checkpoint is None:
            calls = _Calls(len(self.modules))
            checkpoint = Checkpoint(*on_inner_tensors(calls, state), statistics_once(self.modules))
            calls.checkpoint = weakref.ref(checkpoint)
        self.last = weakref.ref(calls)
        return calls.run(checkpoint, position, call, *state)

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: its calls are its own."""
        return {**self.__dict__, "last": None}


@dataclass(eq=False)
class _Calls:
    """The calls of a span so far, in order."""

    num_layers: int
    calls: list[tuple[Callable[..., Any], RandomState | None, Settings]] = field(default_factory=list)
    position: int = -1  # of the last one
    checkpoint: weakref.ref[Checkpoint] | None = None  # which holds this object
    returned: "weakref.ref[Tensor] | None" = None
    version: int = 0  # of the returned tensor
    random_state: RandomState | None = None  # after the last one, if another one may follow

    def __call__(self, *state: Any) -> None:
        """The second run: all calls."""
        for call, random_state, settings in self.calls:
            if random_state is not None:
                random_state.restore()
            with settings.as_then():
                state = (call(*state),)

    def checkpoint_for(self, position: int, state: Tensor) -> Checkpoint | None:
        """The checkpoint, if a call of the layer at ``position`` with ``state`` can join: rule 3 of the NOTE."""
        follows = position > self.position and self.returned is not None and self.returned() is state
        return self.checkpoint() if follows and state._version == self.version and self.checkpoint else None

    def run(self, checkpoint: Checkpoint, position: int, call: Callable[..., Any], state: Tensor) -> Any:
        """Run the layer at ``position``, and record it for the second run."""
        began, settings = RandomState.now(state), Settings.now(state)
        moved = self.random_state is not None and not began.equals(self.random_state)
        self.calls.append((call, began if moved else None, settings))
        try:
            with checkpoint.hooks(), checkpoint.whole_or_nothing():
                returned = call(state)
        except BaseException:
            self.calls.pop()
            raise
        self.position = position
        self.random_state = RandomState.now(state) if position + 1 < self.num_layers else None
        if isinstance(returned, Tensor):
            self.returned, self.version = weakref.ref(returned), returned._version
        else:
            self.returned = None
        return returned


Watch = Callable[[str, Callable[..., Any], tuple[Any, ...], Any], Any]
"""``watch(name, run, inputs, others)`` is called in place of ``run(*inputs)`` for every span of a sequence and every
layer; ``others`` are the arguments besides the state."""


def keep(function: Callable[..., Any], *inputs: Any, modules: list[nn.Module]) -> Any:
    """``function(*inputs)``, as it is."""
    return function(*inputs)


def with_inputs_offloaded(
    run: Callable[..., Any], function: Callable[..., Any], *inputs: Any, modules: list[nn.Module], **options: Any
) -> Any:
    """``run``, whose saved inputs ``offload`` moves to the host, and back before ``function`` runs again."""
    return RUN[Action.OFFLOAD](partial(run, function, modules=modules, **options), *inputs, modules=modules)


def in_micro_batches(
    function: Callable[..., Any], *inputs: Any, modules: list[nn.Module], runner: Callable[..., Any], **options: Any
) -> Any:
    """``function(*inputs)`` a micro-batch at a time, as ``runner`` does it: that of the model's BatchNorm layers."""
    return runner(function, *inputs, modules=modules, **options)


def _run_of(action: Action) -> Callable[..., Any]:
    kind = action.kind
    if not kind.starts_again:
        return {Action.SELECT_OPS: select_ops, Action.OFFLOAD: offload}.get(action, keep)
    run = in_micro_batches if kind.micro_batches_of else recompute
    return partial(with_inputs_offloaded, run) if kind.on_host else run


RUN = {action: _run_of(action) for action in Action}
"""How each action runs a function: ``RUN[action](function, *inputs, modules=..., **options)``, with the options of the
plan: ``micro_batch_size`` and ``runner`` for those in micro-batches. ``COMPILE`` compiled it before, actions with tiles
gave its MLPs other forwards, and ``RECOMPUTE_NESTED`` its parts."""


def need_gradients(values: Iterable[Any], modules: Iterable[nn.Module]) -> bool:
    """Whether a backward of ``modules``, run on ``values``, has anything to do: nothing has that is frozen so far."""
    if any(isinstance(value, Tensor) and value.requires_grad for value in values):
        return True  # without a look into containers, which takes longer
    tensors = (leaf for leaf in tree_iter(values) if isinstance(leaf, Tensor))
    parameters = (parameter for module in modules for parameter in module.parameters())
    return any(tensor.requires_grad for tensor in chain(tensors, parameters))


def runner_of(action: Action, values: Iterable[Any], modules: Iterable[nn.Module]) -> Callable[..., Any]:
    """Return ``RUN[action]``, for frozen ``modules`` ``keep``: a checkpoint would hold the state of the generator."""
    checkpoints = action.kind.starts_again and not action.kind.micro_batches_of
    return keep if checkpoints and not need_gradients(values, modules) else RUN[action]


@dataclass
class SpannedBlocks:
    """The blocks of one span of a ``SequentialStack``, run together."""

    blocks: tuple[Block, ...]
    action: Action
    runs: BlockRuns
    watch: Watch | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *state: Tensor) -> tuple[Tensor, ...]:
        """State in, state out, under the action."""
        if self.watch is None:
            return self.run(*state)
        state = self.watch(self.blocks[0].name, self.run, state, ())
        return state

    def run(self, *state: Tensor) -> tuple[Tensor, ...]:
        """The same without the watch."""
        first = 0
        while first + 1 < len(self.blocks) and not need_gradients(state, self.blocks[first].modules):
            state = self.blocks[first].run(*state)
            first += 1
        modules = self.modules[first]
        names = (block.name for block in self.blocks[first:])
        forward = self.runs.recorded(partial(self.forward, first), *names, action=self.action, modules=modules)
        state = runner_of(self.action, state, modules)(forward, *state, modules=modules, **self.options)
        return state

    def forward(self, first: int, *state: Tensor) -> tuple[Tensor, ...]:
        """The blocks from ``first`` on, one after the other."""
        nests = self.action is Action.RECOMPUTE_NESTED and len(self.blocks) > 1
        for number, block in enumerate(self.blocks[first:], start=first):
            run = self.effects[number].once(block.run) if nests else None
            state = recompute(run, *state, modules=block.modules) if run else block.run(*state)
        return state

    def compiled(self, *state: Any) -> Any:
        """State in, state out, for a compiler that reads this code."""
        for block in self.blocks:
            keeps = RUN[self.action] in (keep, offload)
            state = block.run(*state) if keeps else checkpoint(block.run, *state, use_reentrant=False)
        return state

    @cached_property
    def modules(self) -> list[Modules]:
        """From each block on."""
        of_blocks = [block.modules for block in self.blocks]
        return [Modules(chain.from_iterable(of_blocks[first:])) for first in range(len(of_blocks))]

    @cached_property
    def effects(self) -> list[SideEffects]:
        """Of the runs of each block."""
        return [SideEffects(block.modules) for block in self.blocks]


@dataclass
class SpannedSequence(PlannedForward):
    """The forward of a ``SequentialStack``'s root under a plan.

    A ``method`` that somebody has put on the instance, as Accelerate does for autocast, runs around the spans: it finds
    them where ``nn.Sequential`` looks for its children.
    """

    sequence: SequentialStack
    spans: list[SpannedBlocks]
    method: Callable[..., Any]

    def planned(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the root's own forward, which has one parameter."""
        if self._is_own_forward():
            (input,) = (*args, *kwargs.values())
            return self.run_spans(input)
        root = self.sequence.root
        children = root._modules

        def run_spans(input: Tensor) -> Tensor:
            root._modules = children
            return self.run_spans(input)

        root._modules = {"": run_spans}  # type: ignore[dict-item]
        try:
            return self.method(*args, **kwargs)
        finally:
            root._modules = children

    def _is_own_forward(self) -> bool:
        return getattr(self.method, "__func__", None) is nn.Sequential.forward

    def run_spans(self, input: Tensor) -> Tensor:
        """The output of the last one."""
        state: tuple[Tensor, ...] = (input,)
        for span in self.spans:
            state = span(*state)
        return state[0]

    def compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Each block that does not keep everything under torch's own checkpoint."""
        if not self._is_own_forward():
            return self.method(*args, **kwargs)
        state = (*args, *kwargs.values())
        for span in self.spans:
            state = span.compiled(*state)
        return state[0]


@dataclass
class NestedPart(PlannedForward):
    """A method of a part of a block, which recomputes by itself when the block does."""

    module: nn.Module
    method: Callable[..., Any]

    def planned(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the part's own method."""
        call, state = split_call(self.module, self.method, args, kwargs)
        return recompute(self.effects.once(call), *state, modules=self.modules)

    @cached_property
    def modules(self) -> Modules:
        """The part."""
        return Modules([self.module])

    @cached_property
    def effects(self) -> SideEffects:
        """Of the part's runs."""
        return SideEffects([self.module])


@dataclass
class SpannedLayer(PlannedForward):
    """The forward of a layer that the model calls, by itself under one action."""

    name: str
    action: Action
    module: nn.Module
    method: Callable[..., Any]
    runs: BlockRuns
    watch: Watch | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def modules(self) -> Modules:
        """The layer."""
        return Modules([self.module])

    def planned(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the layer's own forward.

        Raises:
            InputError: it is to run in micro-batches, and takes tensors besides the one that flows from layer to layer.
        """
        call, state = split_call(self.module, self.method, args, kwargs)
        if self.action.kind.micro_batches_of and _has_tensors(call.given):
            raise InputError(
                f"strategy: {self.name} takes tensors beside its input, so it cannot run in micro-batches: use none"
            )
        recorded = self.runs.recorded(call, self.name, action=self.action, modules=self.modules)
        runner = runner_of(self.action, (*state, call.given), self.modules)
        if self.watch is None:
            return runner(recorded, *state, modules=self.modules, **self.options)
        run = partial(runner, recorded, modules=self.modules, **self.options)
        return self.watch(self.name, run, state, call.given)

    def compiled(self, *args: Any, **kwargs: Any) -> Any:
        """As that of all, but for actions that run nothing again."""
        keeps = RUN[self.action] in (keep, offload)
        return self.method(*args, **kwargs) if keeps else PlannedForward.compiled(self, *args, **kwargs)


def _has_tensors(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(values))


@dataclass
class LayerInSpan(PlannedForward):
    """The forward of a layer that the model calls, and that recomputes together with its neighbours."""

    name: str
    module: nn.Module
    method: Callable[..., Any]
    span: JointLayers
    position: int
    runs: BlockRuns
    action: Action
    watch: Watch | None = None

    @cached_property
    def modules(self) -> Modules:
        """The layer."""
        return Modules([self.module])

    def planned(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the layer's own forward."""
        call, state = split_call(self.module, self.method, args, kwargs)
        run = recorded = self.runs.recorded(call, self.name, action=self.action, modules=self.modules)
        if need_gradients((*state, call.given), self.modules):
            if self.action is Action.RECOMPUTE_NESTED:
                recorded = partial(recompute, recorded, modules=self.modules)
            run = partial(self.span.run, self.position, recorded)
        if self.watch is None:
            return run(*state)
        return self.watch(self.name, run, state, (call.args, call.kwargs))
