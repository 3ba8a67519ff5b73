"""Find the blocks of a model: the smallest parts that a plan decides about, in stacks.

The blocks of a stack feed one another; no span of a plan leaves its stack. There are two kinds of stacks:

* ``SequentialStack``: an ``nn.Sequential``. We run its children ourselves, so neighbours can recompute together.
  The dense blocks of a DenseNet are opened up into their layers.
* ``CalledLayers``: modules that the model's own code calls one after the other: the layers of a transformers model,
  or the children of an ``nn.Sequential``, ``nn.ModuleList`` or ``nn.ModuleDict`` that its parent goes through in a
  loop.

Nothing here changes a model; ``memsave_recipes.core.activations.apply`` does.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from memsave_recipes.core.errors import InputError

LISTS = (nn.ModuleList, nn.ModuleDict)
"""They have no forward: whoever holds them calls their children."""
OF_DENSE_BLOCKS = (
    ("memsave_recipes.models.convnets", "DenseBlock.forward"),
    ("timm.models.densenet", "DenseBlock.forward"),
    ("torchvision.models.densenet", "_DenseBlock.forward"),
)
"""Forwards that give each child the list of all feature maps before it, and return them all as one."""
State = tuple[Tensor, ...]
"""The input and output of blocks: one tensor, or the list of feature maps inside a dense block."""


LAYER = "transformers.modeling_layers.GradientCheckpointingLayer"
MODEL = "transformers.modeling_utils.PreTrainedModel"
CONV1D = "transformers.pytorch_utils.Conv1D"


def is_of(name: str, module: nn.Module) -> bool:
    """Tell whether ``module`` is of the class with this full name, or of one that is made from it."""
    home, _, own = name.rpartition(".")
    return any(one.__name__ == own and one.__module__ == home for one in type(module).__mro__)


@dataclass(frozen=True)
class Block:
    """A block of a ``SequentialStack``: ``run`` takes the state (see ``State``) and gives the next one."""

    name: str
    modules: tuple[nn.Module, ...]
    run: Callable[..., State]


@dataclass(frozen=True)
class SequentialStack:
    """Blocks that we run ourselves in place of ``root``'s forward."""

    root: nn.Module
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Layer:
    """A block that the model calls itself: the method ``method`` of ``module``."""

    name: str
    module: nn.Module
    method: str = "forward"

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """As those of a ``Block``."""
        return (self.module,)


@dataclass(frozen=True)
class CalledLayers:
    """Neighbouring blocks that the model calls itself, each on the output of the one before."""

    blocks: tuple[Layer, ...]


Stack = SequentialStack | CalledLayers


def _forward_of(module: nn.Module) -> Any:
    """That of its class; the classes of TorchScript have none."""
    return getattr(type(module), "forward", None)


def begins_in_place(module: nn.Module) -> bool:
    """Whether ``module`` overwrites its input, as ``nn.ReLU(inplace=True)`` does."""
    return getattr(module, "inplace", False) is True


def find_stacks(model: nn.Module) -> list[Stack]:
    """The stacks of ``model``, in the order in which its modules are registered.

    Looks, in this order, for the ``nn.Sequential`` modules that the model names in a class attribute
    ``activation_stacks``, for the ``GradientCheckpointingLayer`` modules of transformers, and for every outermost
    ``nn.Sequential``, and ``nn.ModuleList`` or ``nn.ModuleDict`` of layers alike, with the stems before them. Models
    inside of one with such modules, as towers for images are, may have none: there the last are looked for. A model
    with none of them has no stacks.
    """
    if declared := getattr(model, "activation_stacks", None):
        return [sequence_of(name, model.get_submodule(name)) for name in declared]
    stacks = _transformer_layers(model)
    if not stacks:
        return _stacks_of_containers(model)
    for name, tower in _towers(model):
        stacks += [_inside(name, stack) for stack in _stacks_of_containers(tower)]
    order = {module: number for number, module in enumerate(model.modules())}
    return sorted(stacks, key=lambda stack: order[stack.blocks[0].modules[0]])


def _towers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost models of transformers inside of ``model`` that have none of transformers' layers."""
    found = ""
    for name, module in model.named_modules():
        is_inside = bool(found) and _is_below(name, found)
        if name and not is_inside and is_of(MODEL, module) and not any(is_of(LAYER, part) for part in module.modules()):
            found = name
            yield name, module


def _inside(name: str, stack: Stack) -> Stack:
    """The stack of a module called ``name`` with the names of its blocks in the model around it."""
    if isinstance(stack, SequentialStack):
        blocks = tuple(replace(block, name=f"{name}.{block.name}") for block in stack.blocks)
        return replace(stack, blocks=blocks)
    return CalledLayers(tuple(replace(layer, name=f"{name}.{layer.name}") for layer in stack.blocks))


def named_stack(model: nn.Module, names: Sequence[str]) -> CalledLayers:
    """Modules of ``model`` as one stack of blocks, in the order in which the model calls them.

    Raises:
        AttributeError: it has no module of such a name.
        InputError: TorchScript runs one of them.
    """
    layers = tuple(Layer(name, model.get_submodule(name)) for name in names)
    for layer in layers:
        if not _can_be_called(layer):
            raise InputError(
                f"blocks {layer.name}: TorchScript runs it, not a forward that a plan replaces: leave it out"
            )
    return CalledLayers(layers)


def find_bottlenecks(model: nn.Module) -> list[Stack]:
    """The ``bottleneck`` functions of a DenseNet's layers, each a stack of its own.

    Recomputing just them is what torchvision calls ``memory_efficient=True`` (Pleiss et al. 2017,
    "Memory-Efficient Implementation of DenseNets", https://arxiv.org/abs/1707.06990).
    """
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "bottleneck")]
    return [CalledLayers((Layer(f"{name}.bottleneck", module, "bottleneck"),)) for name, module in layers]


def find_parts(block: nn.Module) -> list[Layer]:
    """Parts of a block of a CNN: the normalised input of a dense layer, or convolutions with their norms.

    The latter are the smallest modules inside ``block`` that hold a convolution and a BatchNorm each, if there are
    several, as in a residual block. Those that begin by writing on their input are left out, as they could not start
    from it again. Names are those inside the block.
    """
    modules = list(block.named_modules())
    normalized = [Layer(name, module, "normalized") for name, module in modules if hasattr(module, "normalized")]
    smallest = [
        Layer(name, module)
        for name, module in modules[1:]
        if _has_both(module) and not any(_has_both(child) for child in module.children())
    ]
    starting = [part for part in smallest if not begins_in_place(_first_leaf(part.module))]
    return normalized or (starting if len(smallest) > 1 else [])


def _has_both(module: nn.Module) -> bool:
    return all(any(isinstance(part, kind) for part in module.modules()) for kind in (_ConvNd, _BatchNorm))


def _first_leaf(module: nn.Module) -> nn.Module:
    while children := list(module.children()):
        module = children[0]
    return module


def block_names(stacks: list[Stack]) -> list[list[str]]:
    """The names of the blocks of every stack, as the strategies in ``memsave_recipes.core.plans`` take them."""
    return [[block.name for block in stack.blocks] for stack in stacks]


def _transformer_layers(model: nn.Module) -> list[Stack]:
    # A model that is no transformers model can hold transformers layers, so the class decides, not the model.
    layers = [
        Layer(name, module)
        for name, module in model.named_modules()
        if is_of(LAYER, module) and not any(is_of(LAYER, child) for child in module.modules() if child is not module)
    ]
    return [
        CalledLayers(group) for _, siblings in groupby(layers, key=_parent_name) for group in _joinable(list(siblings))
    ]


def _can_be_called(layer: Layer) -> bool:
    """TorchScript has no forward that could be replaced."""
    return not isinstance(layer.module, torch.jit.ScriptModule)


def _parent_name(layer: Layer) -> str:
    return layer.name.rpartition(".")[0]


def _joinable(siblings: list[Layer]) -> Iterator[tuple[Layer, ...]]:
    """Siblings that return a bare tensor can recompute together; the others stand alone."""
    if all(_returns_tensor(layer.module) for layer in siblings):
        yield tuple(siblings)
    else:
        yield from ((layer,) for layer in siblings)


def _returns_tensor(module: nn.Module) -> bool:
    forward = _forward_of(module)
    annotation = inspect.signature(forward).return_annotation
    return annotation in (Tensor, "torch.Tensor", "Tensor") or _returns_its_residual(forward)


def _returns_its_residual(forward: Any) -> bool:
    """Whether a forward returns its first argument after adding to it, as Gemma 3's does, which promises a tuple."""
    tree = _parsed(forward)
    function = tree.body[0] if isinstance(tree, ast.Module) else None
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) < 2:
        return False
    stream, nodes = function.args.args[1].arg, list(ast.walk(function))
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and _names(stream, node.targets)]
    last = max(assigned, key=lambda node: node.lineno, default=None)
    is_sum = last is not None and isinstance(last.value, ast.BinOp)
    has_tuples = any(isinstance(part, ast.Tuple) for node in assigned for part in ast.walk(node.value))
    return all(_names(stream, [value]) for value in returned) and is_sum and not has_tuples


def _names(name: str, nodes: Sequence[ast.AST | None]) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in nodes)


def _parsed(function: Any) -> ast.AST | None:
    """The source of a function, if it can be read."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None


def _stacks_of_containers(model: nn.Module) -> list[Stack]:
    """The stacks of the outermost containers of ``model``, and of the stems before them, as they are registered.

    A shared layer makes most of what its model saves, and its stem next to nothing.
    """
    containers = _containers(model)
    stacks: list[Stack] = []
    left = {name for name in containers if not _is_shared_layer(model, name, model.get_submodule(name))}
    for name, module in model.named_modules():
        if name in containers:
            left.discard(name)
            stacks += _stacks_in(model, name, module)
        elif left and _is_stem(name, module, containers):
            stacks.append(CalledLayers((Layer(name, module),)))
    return stacks


def _stacks_in(model: nn.Module, name: str, container: nn.Module) -> list[Stack]:
    """Each layer of a list is a stack of its own: its input need not be the output of the one before."""
    if not _is_looped_over(model, name):
        return [sequence_of(name, container)]
    layers = _layers_in(name, container)
    if not all(map(_can_be_called, layers)):
        return []
    return [CalledLayers((layer,)) for layer in layers] if isinstance(container, LISTS) else [CalledLayers(layers)]


def _layers_in(name: str, container: nn.Module) -> tuple[Layer, ...]:
    """The children of ``container``; of a list of lists, theirs."""
    layers: tuple[Layer, ...] = ()
    for child_name, child in container.named_children():
        full_name = f"{name}.{child_name}"
        layers += _layers_in(full_name, child) if isinstance(child, LISTS) else (Layer(full_name, child),)
    return layers


def _containers(model: nn.Module) -> set[str]:
    """The names of every ``nn.Sequential``, and list of layers alike, that is in no other one."""
    names: set[str] = set()
    covered: set[nn.Module] = set()
    for name, module in model.named_modules():
        # A subclass with a forward of its own need not run its children in order.
        is_sequence = _forward_of(module) is nn.Sequential.forward and any(module.children())
        is_list = _lists_layers(module) and _is_looped_over(model, name)
        if module not in covered and (is_sequence or is_list or _is_shared_layer(model, name, module)):
            names.add(name)
            covered.update(module.modules())
    return names


def _lists_layers(module: nn.Module) -> bool:
    """A list of layers, or of lists of layers, and not of stages that have layers of their own."""
    below = (part for layer in _layers_in("", module) for part in layer.module.modules())
    return isinstance(module, LISTS) and _repeats(module) and not any(map(_repeats, below))


def _is_shared_layer(model: nn.Module, name: str, module: nn.Module) -> bool:
    """A list of one layer that a loop calls again and again, as ALBERT's."""
    return isinstance(module, LISTS) and len(module) == 1 and _is_called_by_number(model, name)


def _repeats(module: nn.Module) -> bool:
    """Several modules of one class, each with modules inside."""
    if not isinstance(module, (nn.Sequential, *LISTS)):
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
    is_called = not isinstance(module, (*LISTS, torch.jit.ScriptModule))
    return beside and not inside_or_above and is_called and any(module.children())


def _is_below(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _is_looped_over(model: nn.Module, name: str) -> bool:
    """Whether the parent of a module goes through its children in a loop of its own forward, as ResNet stages do.

    The loop is over the children, or takes them by number. Replacing the forward of such a module would change nothing.
    Read from the source of the forward and of the methods that it calls; without one, taken to be called.
    """
    over = (part for loop in _loops_around(model, name) for part in ast.walk(loop.iter))
    return _is_read(name, over) or _is_called_by_number(model, name)


def _is_called_by_number(model: nn.Module, name: str) -> bool:
    """As ``self.layers[number]`` in a loop."""
    parts = (part for loop in _loops_around(model, name) for part in ast.walk(loop))
    return _is_read(name, (part.value for part in parts if isinstance(part, ast.Subscript)))


def _is_read(name: str, nodes: Iterable[ast.AST]) -> bool:
    attribute = name.rpartition(".")[2]
    return bool(attribute) and any(isinstance(node, ast.Attribute) and node.attr == attribute for node in nodes)


def _loops_around(model: nn.Module, name: str) -> list[ast.For]:
    """In the forward of the module that holds the one called ``name``."""
    parent_name = name.rpartition(".")[0]
    parent = model.get_submodule(parent_name)
    while parent_name and isinstance(parent, nn.ModuleDict):  # which has no forward, so whoever holds it loops
        parent_name = parent_name.rpartition(".")[0]
        parent = model.get_submodule(parent_name)
    nodes = [node for tree in _sources_of_forward(type(parent)) for node in ast.walk(tree)]
    return [node for node in nodes if isinstance(node, ast.For)]


def _sources_of_forward(kind: type[nn.Module]) -> list[ast.AST]:
    """Of the class's ``forward``, and of its methods that ``forward`` names, or that one of these names."""
    trees: dict[str, ast.AST] = {}
    names = ["forward"]
    while names:
        name = names.pop()
        method = getattr(kind, name, None)
        if name in trees or not inspect.isfunction(method):
            continue
        if (tree := _parsed(method)) is None:
            continue
        trees[name] = tree
        names += [node.attr for node in ast.walk(trees[name]) if isinstance(node, ast.Attribute)]
    return list(trees.values())


def sequence_of(name: str, root: nn.Module) -> SequentialStack:
    """The children of the ``nn.Sequential`` ``root``, called ``name`` in its model, as blocks that we run ourselves."""
    prefix = f"{name}." if name else ""
    blocks: list[Block] = []
    for child_name, child in root.named_children():
        forward = _forward_of(child)
        if (getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")) in OF_DENSE_BLOCKS:
            blocks += _dense_blocks(f"{prefix}{child_name}", child)
        elif blocks and isinstance(blocks[-1].run, _Run) and _belongs_to_the_block_before(child):
            modules = (*blocks[-1].modules, child)
            blocks[-1] = Block(f"{blocks[-1].name.partition('..')[0]}..{child_name}", modules, _Run(modules))
        else:
            blocks.append(Block(f"{prefix}{child_name}", (child,), _Run((child,))))
    return SequentialStack(root, tuple(blocks))


def _belongs_to_the_block_before(child: nn.Module) -> bool:
    """A convolution, its BatchNorm and its in-place ReLU are one block.

    Keeping the output of the first would save nothing, and writing in place is safe only inside a block.
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
