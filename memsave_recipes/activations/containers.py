"""The blocks of models whose layers stand in an ``nn.Sequential`` or in an ``nn.ModuleList``."""

import ast
import inspect
import textwrap
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from memsave_recipes.activations.stacks import Block, Layer, Layers, Sequence, Stack, State, begins_in_place


def stacks_of_containers(model: nn.Module) -> list[Stack]:
    """The stacks of the outermost containers of ``model``, and of the stems before them, as they are registered."""
    containers = _containers(model)
    stacks: list[Stack] = []
    left = len(containers)
    for name, module in model.named_modules():
        if name in containers:
            left -= 1
            stacks += _stacks_in(model, name, module)
        elif left and _is_stem(name, module, containers):
            stacks.append(Layers((Layer(name, module),)))
    return stacks


def _stacks_in(model: nn.Module, name: str, container: nn.Module) -> list[Stack]:
    """Layers of a ModuleList stand alone: nothing says that each takes what the one before returned, and that alone."""
    if not _is_looped_over(model, name):
        return [sequence_of(name, container)]
    layers = _layers_in(name, container)
    return [Layers((layer,)) for layer in layers] if isinstance(container, nn.ModuleList) else [Layers(layers)]


def _layers_in(name: str, container: nn.Module) -> tuple[Layer, ...]:
    """The children of ``container``; of a ModuleList of ModuleLists, theirs."""
    layers: tuple[Layer, ...] = ()
    for child_name, child in container.named_children():
        full_name = f"{name}.{child_name}"
        layers += _layers_in(full_name, child) if isinstance(child, nn.ModuleList) else (Layer(full_name, child),)
    return layers


def _containers(model: nn.Module) -> set[str]:
    """The names of every ``nn.Sequential``, and ``nn.ModuleList`` of layers alike, that is in no other one."""
    names: set[str] = set()
    covered: set[nn.Module] = set()
    for name, module in model.named_modules():
        # A subclass with a forward of its own need not run its children in order.
        is_sequence = type(module).forward is nn.Sequential.forward and any(module.children())
        if module not in covered and (is_sequence or (_lists_layers(module) and _is_looped_over(model, name))):
            names.add(name)
            covered.update(module.modules())
    return names


def _lists_layers(module: nn.Module) -> bool:
    """A list of layers, or of lists of layers, and not of stages that have layers of their own."""
    below = (part for layer in _layers_in("", module) for part in layer.module.modules())
    return isinstance(module, nn.ModuleList) and _repeats(module) and not any(map(_repeats, below))


def _repeats(module: nn.Module) -> bool:
    """Several modules of one class, each with modules inside."""
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        return False
    layers = [layer.module for layer in _layers_in("", module)]
    return len(layers) > 1 and len(set(map(type, layers))) == 1 and all(any(layer.children()) for layer in layers)


def _is_stem(name: str, module: nn.Module, containers: set[str]) -> bool:
    """Several layers beside a container, such as the first convolution of a ResNet, its norm and its pooling.

    They often make the largest feature maps of all. A single layer has nothing inside to recompute.
    """
    parent = name.rpartition(".")[0]
    inside_or_above = any(_is_below(name, other) or _is_below(other, name) for other in containers)
    beside = any(_is_below(other, parent) for other in containers)
    is_called = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    return beside and not inside_or_above and is_called and any(module.children())


def _is_below(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _is_looped_over(model: nn.Module, name: str) -> bool:
    """Whether the parent of a module goes through its children in a loop of its own forward, as ResNet stages do.

    Replacing the forward of such a module would change nothing. Read from the source of the forward and of the methods
    that it calls; without one, taken to be called.
    """
    parent_name, _, attribute = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    while parent_name and isinstance(parent, nn.ModuleDict):  # which has no forward, so whoever holds it loops
        parent_name = parent_name.rpartition(".")[0]
        parent = model.get_submodule(parent_name)
    nodes = [node for tree in _sources_of_forward(type(parent)) for node in ast.walk(tree)]
    read = (part for loop in nodes if isinstance(loop, ast.For) for part in ast.walk(loop.iter))
    return bool(attribute) and any(isinstance(node, ast.Attribute) and node.attr == attribute for node in read)


def _sources_of_forward(kind: type[nn.Module]) -> list[ast.AST]:
    """Of the class's ``forward``, and of its methods that ``forward`` names, or that one of these names."""
    trees: dict[str, ast.AST] = {}
    names = ["forward"]
    while names:
        name = names.pop()
        method = getattr(kind, name, None)
        if name in trees or not inspect.isfunction(method):
            continue
        try:
            trees[name] = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
        except (OSError, TypeError, SyntaxError):
            continue
        names += [node.attr for node in ast.walk(trees[name]) if isinstance(node, ast.Attribute)]
    return list(trees.values())


def sequence_of(name: str, root: nn.Module) -> Sequence:
    """The children of the ``nn.Sequential`` ``root``, called ``name`` in its model, as blocks that we run ourselves."""
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
