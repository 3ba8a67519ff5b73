"""Which weights are gathered together: the units of a model under a plan.

NOTE [ units ]
1. A block of the plan is a unit; blocks of a span that recompute together, in layers that the model calls, are one. The
   first of them to run again runs all of them, so their weights have to be there until the last has.
2. Embeddings are a unit of their own. The output layer of a language model is one with the norm before it, and with the
   embedding where both have one weight: torch refuses a weight in two units. It is needed again as soon as it has run,
   so it stays until its backward.
3. All else belongs to the root, the module that is trained, whose weights stay from the first forward to the end of the
   backward: class tokens, a pooler, the head of a classifier.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from memsave_recipes.activations import find_stacks
from memsave_recipes.activations.blocks import Block, CalledLayers, Layer, Stack
from memsave_recipes.activations.tiles import is_norm_of_a_token
from memsave_recipes.errors import InputError
from memsave_recipes.plans import Plan
from memsave_recipes.plans.plan import JOINT, TILED

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
        InputError: there are too few, a weight belongs to two of them, or as ``check_plan``.
    """
    check_plan(plan, flag)
    stacks = find_stacks(model)
    units = [Unit(modules) for modules in map(_with_weights, _groups(stacks, plan)) if modules]
    if len(units) < LEAST:
        raise InputError(
            f"--shard {flag}: {type(model).__name__} has {len(units)} blocks with weights, so whole weights would be "
            "on every rank for the whole step: leave it out, or take a model of layers"
        )
    inside = {module for unit in units for part in unit.modules for module in part.modules()}
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding) and module not in inside]
    tail = _tail(model, stacks, inside)
    tied = [embedding for embedding in embeddings if _share([embedding], tail)]
    own = tuple(embedding for embedding in embeddings if embedding not in tied)
    units += [Unit(own)] if own else []
    units += [Unit((*tied, *tail), stays=True)] if tail else []
    _check_no_weight_is_in_two(model, units, flag)
    return units


def check_plan(plan: Plan, flag: str) -> None:
    """Refuse actions that go with whole weights alone.

    Raises:
        InputError: the plan has some.
    """
    reasons = {
        "moves gathered weights to the host, too": bool(plan.offloads),
        "tries MLPs before their weights are gathered": any(map(plan.blocks_under, TILED)),
    }
    for reason, holds in reasons.items():
        if holds:
            raise InputError(f"--shard {flag}: plan {plan.strategy} {reason}: take full, or selective")


def joint_blocks(plan: Plan) -> list[tuple[str, ...]]:
    """The blocks of each span of several that recompute together."""
    joint = [span for span in plan.spans if span.action in JOINT and span.stop - span.start > 1]
    return [plan.blocks[span.start : span.stop] for span in joint]


def _groups(stacks: list[Stack], plan: Plan) -> Iterator[list[nn.Module]]:
    """The modules of each unit that is made of blocks, by rule 1."""
    first_of = {name: names[0] for names in joint_blocks(plan) for name in names}
    for stack in stacks:
        groups: dict[str, list[nn.Module]] = {}
        for block in stack.blocks:
            name = first_of.get(block.name, block.name) if isinstance(stack, CalledLayers) else block.name
            groups.setdefault(name, []).extend(_modules(block))
        yield from groups.values()


def _modules(block: Block | Layer) -> tuple[nn.Module, ...]:
    return block.modules if isinstance(block, Block) else (block.module,)


def _with_weights(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    return tuple(module for module in dict.fromkeys(modules) if any(True for _ in module.parameters()))


def _tail(model: nn.Module, stacks: list[Stack], inside: set[nn.Module]) -> list[nn.Module]:
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
                f"--shard {flag}: {first} and {second} are one weight, and would be gathered at different times: leave "
                "it out for this model"
            )
