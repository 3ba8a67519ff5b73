"""Find the blocks of a model: the smallest parts that a plan decides about.

Blocks that feed one another form a *stack*, and a plan's spans stay inside a stack. There are two kinds:

* ``Sequence``: an ``nn.Sequential``. We run its children ourselves, so any run of neighbours can recompute together.
  The dense blocks of a DenseNet are opened up into their layers.
* ``Layers``: modules that the model's own code calls one after the other, such as the layers of a transformers model,
  or the children of an ``nn.Sequential`` that its parent goes through in a loop.

Nothing here changes a model; ``memsave_recipes.activations.apply`` does.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

State = tuple[Tensor, ...]
"""What flows from block to block: one tensor, or the list of feature maps inside a dense block."""


@dataclass(frozen=True)
class Block:
    """A block of a ``Sequence``: ``run`` takes the state (see ``State``) and gives the next one."""

    name: str
    modules: tuple[nn.Module, ...]
    run: Callable[..., State]


@dataclass(frozen=True)
class Sequence:
    """Blocks that we run ourselves in place of ``root``'s forward."""

    root: nn.Module
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Layer:
    """A block that the model calls itself: the method ``method`` of ``module``."""

    name: str
    module: nn.Module
    method: str = "forward"


@dataclass(frozen=True)
class Layers:
    """Neighbouring blocks that the model calls itself, each with what the one before returned."""

    blocks: tuple[Layer, ...]


Stack = Sequence | Layers


def find_stacks(model: nn.Module) -> list[Stack]:
    """The stacks of ``model``, in the order in which its modules are registered.

    Looks, in this order, for the ``nn.Sequential`` modules that the model names in a class attribute
    ``activation_stacks``, for the ``GradientCheckpointingLayer`` modules of transformers, and for every outermost
    ``nn.Sequential``, with the stems before them. A model with none of them has no stacks.
    """
    if declared := getattr(model, "activation_stacks", None):
        return [_sequence(name, model.get_submodule(name)) for name in declared]
    return _transformer_layers(model) or _outermost_sequences(model)


def named_stack(model: nn.Module, names: SequenceOf[str]) -> Layers:
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


def begins_in_place(module: nn.Module) -> bool:
    """Whether ``module`` overwrites its input, as ``nn.ReLU(inplace=True)`` does."""
    return getattr(module, "inplace", False) is True


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


def _outermost_sequences(model: nn.Module) -> list[Stack]:
    sequences = _sequences(model)
    stacks: list[Stack] = []
    left = len(sequences)
    for name, module in model.named_modules():
        if name in sequences:
            left -= 1
            stacks.append(_children(name, module) if _is_looped_over(model, name) else _sequence(name, module))
        elif left and _is_stem(name, module, sequences):
            stacks.append(Layers((Layer(name, module),)))
    return stacks


def _sequences(model: nn.Module) -> set[str]:
    """The names of every ``nn.Sequential`` that is in no other one."""
    names: set[str] = set()
    covered: set[nn.Module] = set()
    for name, module in model.named_modules():
        # A subclass with a forward of its own need not run its children in order.
        if module not in covered and type(module).forward is nn.Sequential.forward and len(module):
            names.add(name)
            covered.update(module.modules())
    return names


def _is_stem(name: str, module: nn.Module, sequences: set[str]) -> bool:
    """Several layers beside a Sequential, such as the first convolution of a ResNet, its norm and its pooling.

    They often make the largest feature maps of all. A single layer has nothing inside to recompute.
    """
    parent = name.rpartition(".")[0]
    inside_or_above = any(_is_below(name, other) or _is_below(other, name) for other in sequences)
    beside = any(_is_below(other, parent) for other in sequences)
    return beside and not inside_or_above and any(module.children())


def _is_below(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _is_looped_over(model: nn.Module, name: str) -> bool:
    """Whether the parent of a module goes through its children in a loop of its own forward, as ResNet stages do.

    Replacing the forward of such a module would change nothing. Read from the source; without one, taken to be called.
    """
    parent_name, _, attribute = name.rpartition(".")
    try:
        source = inspect.getsource(type(model.get_submodule(parent_name)).forward)
    except (OSError, TypeError):
        return False
    loops = [node.iter for node in ast.walk(ast.parse(textwrap.dedent(source))) if isinstance(node, ast.For)]
    read = (node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Attribute))
    return bool(attribute) and any(node.attr == attribute for node in read)


def _children(name: str, root: nn.Module) -> Layers:
    return Layers(tuple(Layer(f"{name}.{child_name}", child) for child_name, child in root.named_children()))


def _sequence(name: str, root: nn.Module) -> Sequence:
    prefix = f"{name}." if name else ""
    blocks: list[Block] = []
    for child_name, child in root.named_children():
        if type(child).__name__ in ("DenseBlock", "_DenseBlock"):
            blocks += _dense_blocks(f"{prefix}{child_name}", child)
        elif blocks and isinstance(blocks[-1].run, _Run) and _belongs_to_the_block_before(child):
            modules = (*blocks[-1].modules, child)
            blocks[-1] = Block(f"{blocks[-1].name.partition('..')[0]}..{child_name}", modules, _Run(modules))
        else:
            blocks.append(Block(f"{prefix}{child_name}", (child,), _Run((child,))))
    return Sequence(root, tuple(blocks))


def _belongs_to_the_block_before(child: nn.Module) -> bool:
    """A convolution, its BatchNorm and its in-place ReLU are one block.

    Keeping what stands between the first two would save nothing, and writing in place is safe only inside a block.
    """
    return isinstance(child, _BatchNorm) or begins_in_place(child)


def _dense_blocks(name: str, dense_block: nn.Module) -> list[Block]:
    layers = list(dense_block.named_children())
    return [
        Block(f"{name}.{child_name}", (layer,), _RunDense(layer, is_last=index == len(layers) - 1))
        for index, (child_name, layer) in enumerate(layers)
    ]


@dataclass(frozen=True)
class _Run:
    """Modules one after the other, on one tensor."""

    modules: tuple[nn.Module, ...]

    def __call__(self, x: Tensor) -> State:
        for module in self.modules:
            x = module(x)
        return (x,)


@dataclass(frozen=True)
class _RunDense:
    """A dense layer adds its feature map to those before it; the last one of a dense block concatenates them all."""

    layer: nn.Module
    is_last: bool

    def __call__(self, *features: Tensor) -> State:
        features = (*features, self.layer(list(features)))
        return (torch.cat(features, dim=1),) if self.is_last else features
