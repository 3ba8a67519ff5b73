"""What a plan knows of models that join several micro-batches: tensors that stand for them, and their BatchNorm.

A package above makes such tensors and layers. Blocks, meters and plans only ask what is here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves


class WrapperTensor(Tensor):
    """A tensor that stands for its ``tensors``: those have memory, are saved for backward, and are offloaded."""

    tensors: list[Tensor]

    @property
    def wrap(self) -> "Callable[[Sequence[Tensor]], WrapperTensor]":
        """A function that wraps as many other tensors in the same way, and holds none of these."""
        raise NotImplementedError


def inner_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return ``tensors``, and in place of each wrapper those that it stands for."""
    return [inner for one in tensors for inner in (one.tensors if isinstance(one, WrapperTensor) else [one])]


def tensors_in(values: Any) -> list[Tensor]:
    """Return the ``inner_tensors`` of nested containers."""
    return inner_tensors(leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def on_inner_tensors(function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Return ``function`` and ``inputs`` without wrappers, for code that keeps the inputs for a second run."""
    if not any(isinstance(one, WrapperTensor) for one in inputs):
        return function, list(inputs)
    wrappers = [(one.wrap, len(one.tensors)) if isinstance(one, WrapperTensor) else None for one in inputs]

    def run(*inner: Any) -> Any:
        rest = iter(inner)
        return function(*(one[0]([next(rest) for _ in range(one[1])]) if one else next(rest) for one in wrappers))

    return run, inner_tensors(inputs)


class JoinedBatchNorm(ABC):
    """The forward of a BatchNorm layer with statistics over more values than those that it is given."""

    @staticmethod
    @abstractmethod
    def in_micro_batches(
        function: Callable[..., Any], *inputs: Any, modules: Iterable[nn.Module], micro_batch_size: int
    ) -> Any:
        """Return ``function(*inputs)``, run a micro-batch at a time, with the statistics of all of them."""


def joined_batchnorm(model: nn.Module) -> JoinedBatchNorm | None:
    """Return the first such forward of a model all of whose BatchNorm layers have one; of others ``None``."""
    forwards: list[Any] = [module.forward for module in model.modules() if isinstance(module, _BatchNorm)]
    joined = [forward for forward in forwards if isinstance(forward, JoinedBatchNorm)]
    return joined[0] if joined and len(joined) == len(forwards) else None
