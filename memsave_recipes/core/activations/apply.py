"""Apply a plan to a model and remove it: ``handle = apply_plan(model, plan); ...; handle.remove()``.

Only the ``forward`` of single module *instances* is replaced, so parameters, buffers, hooks and state-dict keys stay as
they are. The replacements are in ``spans.py``.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from memsave_recipes.core.activations.blocks import (
    Block,
    CalledLayers,
    Layer,
    SequentialStack,
    Stack,
    begins_in_place,
    block_names,
    find_bottlenecks,
    find_parts,
    find_stacks,
    named_stack,
)
from memsave_recipes.core.activations.compiled import ALL, CompiledLayer, Region, check_compiler
from memsave_recipes.core.activations.micro_batches import joined_batchnorm
from memsave_recipes.core.activations.planned_forward import PlannedForward
from memsave_recipes.core.activations.recompute import BlockRuns, Modules, modules_that_share
from memsave_recipes.core.activations.spans import (
    JointLayers,
    LayerInSpan,
    NestedPart,
    SpannedBlocks,
    SpannedLayer,
    SpannedSequence,
    Watch,
)
from memsave_recipes.core.activations.streaming import check_not_offloaded, is_streamed, stream_of
from memsave_recipes.core.activations.sublayers import AttentionBlock, MlpBlock, NormLater, SubLayers, find_sublayers
from memsave_recipes.core.activations.tiles import Mlp, TiledForward, find_mlps, is_norm_of_a_token
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Action, Plan, Span, plan_for, read_plan
from memsave_recipes.core.plans.plan import as_they_run


def plan_blocks(model: nn.Module, strategy: str, running: Mapping[str, bool] | None = None) -> Plan:
    """The plan that ``strategy`` makes for ``model`` without measuring anything.

    Args:
        model: anything in which ``find_stacks`` finds blocks.
        strategy: ``none``, ``full``, ``every:K``, ``segments:K``, ``nested:K``, ``bottleneck`` (DenseNets), another of
            ``plan_for``, or the path of a ``plan.json``.
        running: if known, the names of the blocks that run, in order, and whether each has a backward. Stacks that do
            not run (the image tower of a model that gets only text) are left out. The others are taken in the order in
            which they run, and K counts no block without a backward.

    Raises:
        InputError: no such strategy or file, K out of range, or the model has no blocks for it.
    """
    if strategy.endswith(".json"):
        return read_plan(strategy)
    if strategy == "bottleneck":
        if not (bottlenecks := find_bottlenecks(model)):
            raise _without_blocks(model, strategy)
        full = plan_for("full", block_names(bottlenecks))
        return Plan(strategy=strategy, blocks=full.blocks, spans=full.spans)
    names: Sequence[Sequence[str]] = block_names(find_stacks(model))
    if running is not None:
        names = as_they_run(names, running)
    if not names and strategy != "none":
        raise _without_blocks(model, strategy)
    return plan_for(strategy, names, idle_of(running or {}))


def idle_of(running: Mapping[str, bool]) -> list[str]:
    """Of blocks that run, those to which no backward comes."""
    return [name for name, has_backward in running.items() if not has_backward]


def apply_plan(model: nn.Module, plan: Plan, *, watch: Watch | None = None) -> "PlanHandle":
    """Make the training forward of ``model`` follow ``plan`` until ``remove()`` is called on the result.

    Args:
        model: the module with the blocks, not a wrapper such as DDP's; not compiled yet.
        watch: is called in place of every span of a sequence and every layer, also those that keep everything.

    Raises:
        InputError: the plan was made for other blocks, a span reaches over the end of a stack, this model or
            machine cannot do an action, Accelerate offloads the model's weights, or it is under a plan.
    """
    check_not_offloaded(model)
    refuse_planned(model)
    options = _options_in_micro_batches(model, plan)
    stacks = _stacks_of(model, plan)
    blocks = [block for stack in stacks for block in stack.blocks]
    sharing = modules_that_share(model, [[block.modules for block in stack.blocks] for stack in stacks])
    handle = PlanHandle(plan, blocks, runs=BlockRuns(sharing), options=options)
    if plan.compiles:
        _compile_layers(model, stacks, handle)
    if plan.mlp_tile_tokens is not None:
        _tile_norms_around(model, plan, handle)
    first = 0
    for stack in stacks:
        last = first + len(stack.blocks)
        spans = [span for span in plan.spans if first <= span.start < last]
        if spans and spans[-1].stop > last:
            raise InputError(
                f"the plan joins {plan.blocks[last - 1]} and {plan.blocks[last]}, which are not neighbours"
            )
        if watch or any(span.action is not Action.KEEP for span in spans):
            parts = [(stack.blocks[s.start - first : s.stop - first], s.action) for s in _runs(spans)]
            _install(stack, parts, handle, watch)
        first = last
    return handle


def refuse_planned(model: nn.Module) -> None:
    """Raise ``InputError`` for a model under a plan: the one that is removed first would leave forwards behind."""
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), PlannedForward):
            raise InputError(f"model: a plan is applied to {name or 'it'} already: call its handle.remove() first")


@dataclass
class PlanHandle:
    """An applied plan. ``remove()`` sets the model back exactly; also a context manager."""

    plan: Plan
    blocks: Sequence[Block | Layer] = ()
    replaced: list[tuple[nn.Module, str, Any, Any]] = field(default_factory=list)
    runs: BlockRuns = field(default_factory=BlockRuns)
    options: dict[str, Any] = field(default_factory=dict)
    checked: bool = False

    def replace(self, module: nn.Module, attribute: str, value: Any) -> None:
        """Set an attribute of a module instance and remember its entry in ``__dict__``, if there is one."""
        self.replaced.append((module, attribute, module.__dict__.get(attribute, _ABSENT), value))
        setattr(module, attribute, value)

    def check_first_step(self, warn: Callable[[str], Any] = warnings.warn) -> None:
        """Call it after a step: warns once if the plan had little effect, because few of its blocks ran again."""
        if not self.checked and (objection := self.runs.objection(self.plan)):
            warn(objection)
        self.checked = True

    def remove(self) -> None:
        """Remove the plan; a second call does nothing. What others have put around its forwards stays."""
        while self.replaced:
            module, attribute, before, ours = self.replaced.pop()
            if isinstance(ours, PlannedForward):
                ours.removed = True
            if module.__dict__.get(attribute) is not ours:
                continue
            if before is _ABSENT:
                delattr(module, attribute)
            else:
                setattr(module, attribute, before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the model runs as if there were no plan."""
        replaced, self.replaced = self.replaced, list(self.replaced)
        applied = [(module, attribute, module.__dict__.get(attribute, _ABSENT)) for module, attribute, *_ in replaced]
        self.remove()
        try:
            yield
        finally:
            self.replaced = replaced
            for (module, attribute, value), (*_, ours) in zip(applied, replaced, strict=True):
                if isinstance(ours, PlannedForward):
                    ours.removed = False
                if value is not _ABSENT:
                    setattr(module, attribute, value)

    def __enter__(self) -> "PlanHandle":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


_ABSENT = object()


def _without_blocks(model: nn.Module, strategy: str) -> InputError:
    return InputError(f"strategy {strategy}: {type(model).__name__} has no blocks for it; use none")


def _stacks_of(model: nn.Module, plan: Plan) -> list[Stack]:
    """The stacks of the plan's blocks. A plan may leave stacks out, and has them in the order in which they run."""
    for found in (find_stacks(model), find_bottlenecks(model)):
        by_first = {stack.blocks[0].name: stack for stack in found}
        stacks = [by_first[name] for name in plan.blocks if name in by_first]
        if tuple(name for names in block_names(stacks) for name in names) == plan.blocks:
            return stacks
    try:
        return [named_stack(model, plan.blocks)]
    except AttributeError:
        raise InputError(
            f"the plan {plan.strategy} was made for other blocks than those of this {type(model).__name__}: "
            "make it again"
        ) from None


def _compile_layers(model: nn.Module, stacks: list[Stack], handle: PlanHandle) -> None:
    """Compile the forwards of layers; what the plan does with a layer is then around that."""
    plan = handle.plan
    of_blocks = {name: span for span in plan.spans for name in plan.blocks[span.start : span.stop]}
    spans = {name: span for name, span in of_blocks.items() if plan.compiled or span.action is Action.COMPILE}
    if eager := [span.action.kind.label for span in spans.values() if span.action.kind.is_eager]:
        raise InputError(f"strategy {plan.strategy}: compiled layers cannot {eager[0]}")
    if any(block.name in spans for stack in stacks if isinstance(stack, SequentialStack) for block in stack.blocks):
        raise InputError(
            f"strategy {handle.plan.strategy}: {type(model).__name__} has no layer that repeats, and "
            "only such layers are compiled; use budget, selective or segments:K"
        )
    if stream_of(model) is not None:
        raise InputError(
            f"strategy {handle.plan.strategy}: layers whose frozen weights are streamed cannot be compiled"
        )
    check_compiler(model)
    regions = {ratio: Region(ratio, required=plan.asks_to_compile) for ratio in {ALL, *plan.ratios}}
    for layer in (block for stack in stacks if isinstance(stack, CalledLayers) for block in stack.blocks):
        if span := spans.get(layer.name):
            method, region = getattr(layer.module, layer.method), regions[ALL if span.ratio is None else span.ratio]
            runs_again = span.action.kind.runs_twice
            handle.replace(layer.module, layer.method, CompiledLayer(method, layer.module, region, runs_again))
    for module in model.modules():
        if "compiles_loss" in vars(module):  # CausalLMLoss put it there
            handle.replace(module, "compiles_loss", True)


def _runs(spans: list[Span]) -> Iterator[Span]:
    """Spans that recompute as a whole; of all others, each block by itself."""
    for span in spans:
        step = span.stop - span.start if span.action.kind.is_joint else 1
        for start in range(span.start, span.stop, step):
            yield replace(span, start=start, stop=start + step)


def _install(
    stack: Stack, parts: list[tuple[tuple[Any, ...], Action]], handle: PlanHandle, watch: Watch | None
) -> None:
    if isinstance(stack, SequentialStack):
        _install_sequence(stack, parts, handle, watch)
    else:
        for layers, action in parts:
            if watch or action is not Action.KEEP:
                _install_layers(layers, action, handle, watch)


def _install_sequence(
    stack: SequentialStack, parts: list[tuple[tuple[Block, ...], Action]], handle: PlanHandle, watch: Watch | None
) -> None:
    for blocks, action in parts:
        if action.kind.is_tiled:
            _tile_mlps([module for block in blocks for module in block.modules], handle)
        # A span that begins in place would overwrite the very input it has to start from again.
        starting = blocks if action is Action.RECOMPUTE_NESTED else blocks[:1]
        for first in (block.modules[0] for block in starting):
            if action.kind.starts_again and begins_in_place(first):
                handle.replace(first, "inplace", False)
        if action is Action.RECOMPUTE_NESTED:
            _nest_parts([module for block in blocks for module in block.modules], handle)
        if action is Action.SELECT_OPS:
            _set_out_of_place([module for block in blocks for module in block.modules], handle)
    spans = [SpannedBlocks(blocks, action, handle.runs, watch, _options(handle, action)) for blocks, action in parts]
    handle.replace(stack.root, "forward", SpannedSequence(stack, spans, stack.root.forward))


def _install_layers(layers: tuple[Layer, ...], action: Action, handle: PlanHandle, watch: Watch | None) -> None:
    if action is Action.SELECT_OPS:
        _set_out_of_place([layer.module for layer in layers], handle)
    in_parts = action.kind.in_sublayers and not is_streamed(layers[0].module)  # whose weights the layer has as a whole
    parts = find_sublayers(layers[0].module) if in_parts else None
    if parts is not None:
        _install_sublayers(layers[0], parts, action, handle)
        action = Action.KEEP
    elif action.kind.is_tiled:
        _tile_mlps([layer.module for layer in layers], handle)
    elif action is Action.RECOMPUTE_NESTED and not handle.plan.compiled:
        _nest_parts([layer.module for layer in layers], handle)
    span = JointLayers(Modules(layer.module for layer in layers))
    for position, layer in enumerate(layers):
        method = getattr(layer.module, layer.method)
        if len(layers) > 1 and action.kind.is_joint:
            forward: Any = LayerInSpan(layer.name, layer.module, method, span, position, handle.runs, action, watch)
        else:
            options = _options(handle, action)
            forward = SpannedLayer(layer.name, action, layer.module, method, handle.runs, watch, options)
        handle.replace(layer.module, layer.method, forward)


def _tile_norms_around(model: nn.Module, plan: Plan, handle: PlanHandle) -> None:
    """The norms beside a list of layers, of which some have tiles, run in tiles too: the last one takes all tokens."""
    names = [name for action in Action if action.kind.is_tiled for name in plan.blocks_under(action)]
    parents = dict.fromkeys(name.rpartition(".")[0].rpartition(".")[0] for name in names)
    for norm in (child for parent in parents for child in model.get_submodule(parent).children()):
        if is_norm_of_a_token(norm):
            handle.replace(norm, "forward", TiledForward(Mlp(norm, None), norm.forward, plan.mlp_tile_tokens or 1))


def _install_sublayers(layer: Layer, parts: SubLayers, action: Action, handle: PlanHandle) -> None:
    """Blocks of their own for attention and MLP, in a layer that keeps the rest."""
    tile, attention, mlp = handle.plan.mlp_tile_tokens or 1, parts.attention, parts.mlp
    for norm in parts.norms:
        handle.replace(norm, "forward", NormLater(norm, norm.forward))
    block = AttentionBlock(layer.name, attention, attention.forward, handle.runs, action, tile)
    handle.replace(attention, "forward", block)
    handle.replace(mlp, "forward", MlpBlock(mlp, mlp.forward, tile))


def _nest_parts(blocks: list[nn.Module], handle: PlanHandle) -> None:
    """Give the parts of blocks forwards that recompute by themselves."""
    for part in (part for block in blocks for part in find_parts(block)):
        handle.replace(part.module, part.method, NestedPart(part.module, getattr(part.module, part.method)))


def _tile_mlps(layers: list[nn.Module], handle: PlanHandle) -> None:
    """Give the MLPs of a block forwards that run in tiles.

    Raises:
        InputError: there is none.
    """
    mlps = [mlp for layer in layers for mlp in find_mlps(layer)]
    if not mlps:
        raise InputError(
            f"strategy {handle.plan.strategy}: {type(layers[0]).__name__} has no MLP of its own that computes each "
            "token by itself, so none can run in tiles: use full"
        )
    for mlp in mlps:
        forward = TiledForward(mlp, mlp.module.forward, handle.plan.mlp_tile_tokens or 1)
        handle.replace(mlp.module, "forward", forward)
        if mlp.dropout is not None:
            handle.replace(mlp.dropout, "forward", nn.Identity().forward)


def _options(handle: PlanHandle, action: Action) -> dict[str, Any]:
    """The settings of the plan for ``action``."""
    return handle.options if action.kind.micro_batches_of else {}


def _options_in_micro_batches(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """The settings of ``plan`` for blocks that run in micro-batches, where it has any.

    Raises:
        InputError: the BatchNorm layers of ``model`` do not join them, or there are none.
    """
    if plan.micro_batch_size is None:
        return {}
    joined = joined_batchnorm(model)
    if joined is None:
        raise InputError(
            f"strategy {plan.strategy} runs blocks in micro-batches, which takes batchnorm global: call "
            "global_batchnorm(model) first"
        )
    return {"micro_batch_size": plan.micro_batch_size, "runner": joined.in_micro_batches}


def _set_out_of_place(modules: list[nn.Module], handle: PlanHandle) -> None:
    """For blocks that keep the outputs of some operators, and so must not overwrite them."""
    below = dict.fromkeys(child for module in modules for child in module.modules())
    for module in filter(begins_in_place, below):
        handle.replace(module, "inplace", False)
