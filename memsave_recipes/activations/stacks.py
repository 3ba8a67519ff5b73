"""Stacks: blocks that feed one another. A plan's spans stay inside a stack.

There are two kinds:

* ``Sequence``: an ``nn.Sequential``. We run its children ourselves, so any run of neighbours can recompute together.
  The dense blocks of a DenseNet are opened up into their layers.
* ``Layers``: modules that the model's own code calls one after the other, such as the layers of a transformers model,
  or the children of an ``nn.Sequential`` or ``nn.ModuleList`` that its parent goes through in a loop.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

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


def begins_in_place(module: nn.Module) -> bool:
    """Whether ``module`` overwrites its input, as ``nn.ReLU(inplace=True)`` does."""
    return getattr(module, "inplace", False) is True
