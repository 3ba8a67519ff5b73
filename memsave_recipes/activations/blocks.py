"""Find the blocks of a model: the smallest parts that a plan decides about, in stacks (``stacks.py``).

Nothing here changes a model; ``memsave_recipes.activations.apply`` does.
"""

import inspect
from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import Tensor, nn

from memsave_recipes.activations.containers import sequence_of, stacks_of_containers
from memsave_recipes.activations.stacks import Layer, Layers, Stack


def find_stacks(model: nn.Module) -> list[Stack]:
    """The stacks of ``model``, in the order in which its modules are registered.

    Looks, in this order, for the ``nn.Sequential`` modules that the model names in a class attribute
    ``activation_stacks``, for the ``GradientCheckpointingLayer`` modules of transformers, and for every outermost
    ``nn.Sequential`` and ``nn.ModuleList`` of layers alike, with the stems before them. A model with none of them has
    no stacks.
    """
    if declared := getattr(model, "activation_stacks", None):
        return [sequence_of(name, model.get_submodule(name)) for name in declared]
    return _transformer_layers(model) or stacks_of_containers(model)


def named_stack(model: nn.Module, names: Sequence[str]) -> Layers:
    """Modules of ``model`` as one stack of blocks, in the order in which the model calls them.

    Raises:
        AttributeError: it has no module of such a name.
    """
    return Layers(tuple(Layer(name, model.get_submodule(name)) for name in names))


def find_bottlenecks(model: nn.Module) -> list[Stack]:
    """The ``bottleneck`` functions of a DenseNet's layers, each a stack of its own.

    Recomputing just them is what torchvision calls ``memory_efficient=True`` (Pleiss et al. 2017,
    "Memory-Efficient Implementation of DenseNets", https://arxiv.org/abs/1707.06990).
    """
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "bottleneck")]
    return [Layers((Layer(f"{name}.bottleneck", module, "bottleneck"),)) for name, module in layers]


def block_names(stacks: list[Stack]) -> list[list[str]]:
    """The names of the blocks of every stack, as the strategies in ``memsave_recipes.plans`` take them."""
    return [[block.name for block in stack.blocks] for stack in stacks]


def _transformer_layers(model: nn.Module) -> list[Stack]:
    # A model that is no transformers model can hold transformers layers, so the class decides, not the model.
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [
        Layer(name, module)
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer)
        and not any(isinstance(child, GradientCheckpointingLayer) for child in module.modules() if child is not module)
    ]
    return [Layers(group) for _, siblings in groupby(layers, key=_parent_name) for group in _joinable(list(siblings))]


def _parent_name(layer: Layer) -> str:
    return layer.name.rpartition(".")[0]


def _joinable(siblings: list[Layer]) -> Iterator[tuple[Layer, ...]]:
    """Siblings that return a bare tensor can recompute together; the others stand alone."""
    if all(_returns_tensor(layer.module) for layer in siblings):
        yield tuple(siblings)
    else:
        yield from ((layer,) for layer in siblings)


def _returns_tensor(module: nn.Module) -> bool:
    return inspect.signature(module.forward).return_annotation in (Tensor, "torch.Tensor", "Tensor")
