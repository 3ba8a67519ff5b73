"""Which weights are gathered together: the units of a model under a plan.

Notes: ``docs/design/sharding.md``.
"""

from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

import torch
from torch import Tensor, nn

from memsave_recipes.core.activations import find_stacks
from memsave_recipes.core.activations.blocks import CalledLayers, Stack
from memsave_recipes.core.activations.tiles import is_norm_of_a_token
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Plan
from memsave_recipes.core.plans.chain import allocated_bytes
from memsave_recipes.core.plans.shards import ShardedUnit

LEAST = 2
"""Units, besides the root: one alone would be gathered for the whole step."""


@dataclass(frozen=True)
class Unit:
    """Modules whose weights are gathered together; ``stays`` until their backward where that follows at once."""

    modules: tuple[nn.Module, ...]
    stays: bool = False


def units_of(model: nn.Module, plan: Plan, flag: str) -> list[Unit]:
    """The units of ``model``, without the root: NOTE [ units ]. Find them before any weight is cut up.

    Args:
        flag: the value of ``--shard``, for errors.

    Raises:
        InputError: there are too few, or a weight belongs to two of them.
    """
    stacks = find_stacks(model)
    units = [Unit(modules) for modules in map(_with_weights, _groups(stacks, plan)) if modules]
    if len(units) < LEAST:
        raise InputError(
            f"shard {flag}: {type(model).__name__} has {len(units)} blocks with weights, so whole weights would be "
            "on every rank for the whole step: leave it out, or take a model of layers"
        )
    units += _units_outside(model, stacks, units)
    _check_no_weight_is_in_two(model, units, flag)
    return units


def modules_outside_blocks(model: nn.Module) -> list[str]:
    """The names of modules that are units, or parts of one, and no blocks: rule 2 of NOTE [ units ]."""
    stacks = find_stacks(model)
    blocks = [Unit(block.modules) for stack in stacks for block in stack.blocks]
    names = _names_of(model)
    return [names[module] for unit in _units_outside(model, stacks, blocks) for module in unit.modules]


def sharded_units(
    model: nn.Module,
    plan: Plan,
    num_ranks: int,
    flag: str,
    device: torch.device,
    *,
    with_masters: bool = False,
) -> tuple[ShardedUnit, ...]:
    """The bytes of ``units_of`` and of the root, in the order in which ``model`` registers them, the root first.

    Args:
        num_ranks: that hold the weights together.
        flag: the value of ``--shard``, for errors.
        device: of the ranks; a CPU copies gradients that they do not divide before it reduces them, and of another
            dtype one by one.
        with_masters: whether shards, and the gradients that are reduced, are float32, whatever ``model`` is.

    Raises:
        InputError: as ``units_of``, or a parameter cannot be cut up.
    """
    check_parameters(model, flag)
    order = {module: number for number, module in enumerate(model.modules())}
    units = sorted(units_of(model, plan, flag), key=lambda unit: min(order[module] for module in unit.modules))
    names, blocks = _names_of(model), _blocks_of(model)
    own = {weight for unit in units for weight in _weights(unit.modules)}
    root = [weight for weight in model.parameters() if weight not in own]
    in_bytes = partial(_in_bytes, num_ranks=num_ranks, device=device, with_masters=with_masters)
    found = [in_bytes(root)] if root else []
    for unit in units:
        parts = {blocks.get(module, names[module]) for module in unit.modules}
        has_embedding = any(isinstance(module, nn.Embedding) for module in unit.modules)
        of_unit = in_bytes(_weights(unit.modules), parts=parts, stays=unit.stays)
        found.append(replace(of_unit, takes_gradient=not has_embedding))
    return tuple(found)


def _in_bytes(
    weights: Iterable[nn.Parameter],
    *,
    num_ranks: int,
    parts: Iterable[str] = (),
    stays: bool = False,
    device: torch.device,
    with_masters: bool,
) -> ShardedUnit:
    weights = list(weights)
    trained = [weight for weight in weights if weight.requires_grad]
    uneven = [weight for weight in trained if weight.shape[0] % num_ranks]
    copied = [*uneven, *(sorted(trained, key=Tensor.numel)[-1:] if with_masters else [])]
    sizes = [num_ranks * shard.nbytes for shard in largest_shards(weights, num_ranks)]
    return ShardedUnit(
        parts=frozenset(parts),
        gathered_bytes=sum(sizes),
        rounding_bytes=allocated_bytes(sizes, device) - sum(sizes),
        reduced_bytes=num_ranks * shards_bytes(map(wide, trained) if with_masters else trained, num_ranks),
        cast_bytes=shards_bytes(trained, num_ranks) if with_masters else 0,
        copied_bytes=num_ranks * shards_bytes(copied, num_ranks) if device.type == "cpu" else 0,
        frees_last=torch.__version__ >= "2.15",
        stays=stays,
    )


def wide(weight: Tensor) -> Tensor:
    """Return a tensor like the float32 master of a weight, without memory."""
    return torch.empty(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device="meta")


def shards_bytes(weights: Iterable[Tensor], num_ranks: int) -> int:
    """Of the largest shards of ``weights``, those of the first rank."""
    return sum(shard.nbytes for shard in largest_shards(weights, num_ranks))


def largest_shards(weights: Iterable[Tensor], num_ranks: int) -> list[Tensor]:
    """Tensors of the shapes of the first rank's shards, without their memory."""
    return [
        torch.empty((ceil(weight.shape[0] / num_ranks), *weight.shape[1:]), dtype=weight.dtype, device="meta")
        for weight in weights
    ]


def check_parameters(trained: nn.Module, flag: str, unread: Container[nn.Parameter] = ()) -> None:
    """Refuse parameters that torch does not cut up.

    Args:
        unread: those that stand for tensors that are not there yet.

    Raises:
        InputError: there is one.
    """
    for name, parameter in trained.named_parameters():
        if parameter.ndim == 0 or not (parameter.is_contiguous() or parameter in unread):
            what = "a single number" if parameter.ndim == 0 else "not contiguous"
            raise InputError(f"shard {flag}: {name} is {what}, which torch does not cut up: leave it out")


def joint_blocks(plan: Plan) -> list[tuple[str, ...]]:
    """The blocks of each span of several that recompute together."""
    joint = [span for span in plan.spans if span.action.kind.is_joint and span.stop - span.start > 1]
    return [plan.blocks[span.start : span.stop] for span in joint]


def _groups(stacks: list[Stack], plan: Plan) -> Iterator[list[nn.Module]]:
    """The modules of each unit that is made of blocks, by rule 1."""
    first_of = {name: names[0] for names in joint_blocks(plan) for name in names}
    for stack in stacks:
        groups: dict[str, list[nn.Module]] = {}
        for block in stack.blocks:
            name = first_of.get(block.name, block.name) if isinstance(stack, CalledLayers) else block.name
            groups.setdefault(name, []).extend(block.modules)
        yield from groups.values()


def _with_weights(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    return tuple(module for module in dict.fromkeys(modules) if any(True for _ in module.parameters()))


def _units_outside(model: nn.Module, stacks: list[Stack], units: Iterable[Unit]) -> list[Unit]:
    """Rule 2, beside the ``units`` that are made of blocks."""
    inside = {module for unit in units for part in unit.modules for module in part.modules()}
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding) and module not in inside]
    tail = _tail(model, stacks, inside)
    tied = [embedding for embedding in embeddings if _share([embedding], tail)]
    own = tuple(embedding for embedding in embeddings if embedding not in tied)
    return [*([Unit(own)] if own else []), *([Unit((*tied, *tail), stays=True)] if tail else [])]


def _names_of(model: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in model.named_modules()}


def _blocks_of(model: nn.Module) -> dict[nn.Module, str]:
    """The name of the block that a module is, or is a part of."""
    return {module: block.name for stack in find_stacks(model) for block in stack.blocks for module in block.modules}


def _tail(model: nn.Module, stacks: list[Stack], inside: Collection[nn.Module]) -> list[nn.Module]:
    """The output layer of a language model, and the norm before it; nothing for other models."""
    find_output = getattr(model, "get_output_embeddings", None)
    head = find_output() if find_output is not None else None
    if head is None or head in inside or not _with_weights([head]):
        return []
    return [*_norms_behind_layers(model, stacks), head]


def _norms_behind_layers(model: nn.Module, stacks: list[Stack]) -> Iterator[nn.Module]:
    """Those that stand beside the last list of layers, and are registered after it."""
    layers, _, _ = stacks[-1].blocks[-1].name.rpartition(".")
    parent, _, name = layers.rpartition(".")
    is_behind = False
    for child_name, child in model.get_submodule(parent).named_children():
        if is_behind and is_norm_of_a_token(child):
            yield child
        is_behind = is_behind or child_name == name


def _share(some: Iterable[nn.Module], others: Iterable[nn.Module]) -> bool:
    return bool(_weights(some) & _weights(others))


def _weights(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters()}


def _check_no_weight_is_in_two(model: nn.Module, units: list[Unit], flag: str) -> None:
    """Also none in a unit that a module outside of it has, too."""
    owner: dict[nn.Module, int] = {}
    for number, unit in enumerate(units):
        owner |= {part: number for module in unit.modules for part in module.modules()}
    holders: dict[nn.Parameter, dict[int, str]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(prefix=module_name, recurse=False):
            holders.setdefault(parameter, {})[owner.get(module, -1)] = name
    for names in holders.values():
        if len(names) > 1:
            first, second, *_ = names.values()
            raise InputError(
                f"shard {flag}: {first} and {second} are one weight, and would be gathered at different times: leave "
                "it out for this model"
            )
