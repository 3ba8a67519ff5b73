"""Several micro-batches in lockstep: every operator runs on each of them before the next operator begins.

Notes: ``docs/design/training.md``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from memsave_recipes.core.activations.micro_batches import WrapperTensor
from memsave_recipes.core.errors import InputError
from memsave_recipes.training.exact.reduction_tree import Subtrees, deal_subtrees, join

NO_VALUES = torch.empty(0)


class MicroBatched(WrapperTensor):
    """The tensors of several micro-batches, on each of which every function runs by itself."""

    lockstep: "Lockstep"

    @classmethod
    def of(cls, inner: Sequence[Tensor], lockstep: "Lockstep") -> "MicroBatched":
        """One for each of ``lockstep.indices``."""
        whole: MicroBatched = Tensor._make_subclass(cls, NO_VALUES)
        whole.tensors, whole.lockstep = list(inner), lockstep
        return whole

    @property
    def wrap(self) -> Callable[[Sequence[Tensor]], WrapperTensor]:
        """As of ``WrapperTensor``."""
        return partial(MicroBatched.of, lockstep=self.lockstep)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """``func`` on every micro-batch.

        Raises:
            InputError: rule 5, or the function takes a tensor that was computed from parameters alone.
        """
        leaves, structure = tree_flatten((args, kwargs or {}))
        lockstep = next(leaf.lockstep for leaf in leaves if isinstance(leaf, cls))
        return lockstep.run(func, leaves, structure)

    def backward(self, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
        """Of all micro-batches together."""
        torch.autograd.backward(self.tensors, None if gradient is None else gradient.tensors)


@dataclass(eq=False)
class Lockstep:
    """The micro-batches of one step, on all ranks.

    Attributes:
        subtrees: of the micro-batches, for every rank.
        rank: this one.
        count: leaves of the tree.
        sums: over this rank's subtrees but the last one, the gradients by parameter; complete after the backward.
    """

    subtrees: Subtrees
    rank: int
    count: int
    sums: dict[range, dict[Tensor, Tensor]] = field(init=False)
    _views: dict[Tensor, list[Tensor]] = field(init=False, default_factory=dict)
    _totals: dict[Tensor, "_GradientSum"] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.sums = {subtree: {} for subtree in self.subtrees[self.rank][:-1]}

    @property
    def indices(self) -> list[int]:
        """Of this rank's micro-batches."""
        return _indices(self.subtrees[self.rank])

    def run(self, function: Callable[..., Any], leaves: Sequence[Any], structure: TreeSpec) -> Any:
        """The results of ``function`` for every micro-batch, its tensors as ``MicroBatched``."""
        results = []
        with _seeds(function, leaves) as seed:
            for number, index in enumerate(self.indices):
                seed(index)
                args, kwargs = tree_unflatten([self._of(leaf, number, function) for leaf in leaves], structure)
                results.append(function(*args, **kwargs))
        flat, structures = zip(*map(tree_flatten, results), strict=True)
        return tree_unflatten([self._together(one, function) for one in zip(*flat, strict=True)], structures[0])

    def rows_of_all_ranks(self, rows: Tensor) -> Tensor:
        """(N, n), in the order of the index, of this rank's (k, n), one for each micro-batch."""
        if len(self.subtrees) == 1:
            return rows
        indices = [_indices(own) for own in self.subtrees]
        own = rows.new_zeros(max(map(len, indices)), rows.shape[1])
        own[: len(rows)] = rows
        gathered = [torch.empty_like(own) for _ in self.subtrees]
        dist.all_gather(gathered, own)
        by_index = {i: gathered[rank][at] for rank, of_rank in enumerate(indices) for at, i in enumerate(of_rank)}
        return torch.stack([by_index[index] for index in sorted(by_index)])

    def _of(self, leaf: Any, number: int, function: Callable[..., Any]) -> Any:
        """An argument as the micro-batch with this number has it."""
        if isinstance(leaf, MicroBatched):
            return leaf.tensors[number]
        if not isinstance(leaf, Tensor) or not leaf.requires_grad or not torch.is_grad_enabled():
            return leaf
        if not leaf.is_leaf:
            raise InputError(
                f"batchnorm global: {_name(function)} takes a tensor that the model computes from its parameters "
                "alone, which cannot run in lockstep: take batchnorm global without the bitwise topology"
            )
        if leaf not in self._views:
            self._totals[leaf], self._views[leaf] = _GradientSum(leaf, self), []
        views = self._views[leaf]
        if number == len(views):
            views.append(_View.apply(leaf, self._totals[leaf], self.indices[number]))  # type: ignore[no-untyped-call]
        return views[number]

    def _together(self, values: Sequence[Any], function: Callable[..., Any]) -> Any:
        if isinstance(values[0], Tensor):
            return MicroBatched.of(values, self)
        if any(value != values[0] for value in values[1:]):
            raise InputError(
                f"batchnorm global: {_name(function)} differs between micro-batches, whose last one may be short, so "
                "they cannot run in lockstep: take a global batch that the micro-batch size divides, and drop a "
                "shorter one at the end of an epoch"
            )
        return values[0]


class _View(torch.autograd.Function):
    """A parameter as one micro-batch uses it."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, total: "_GradientSum", index: int) -> Tensor:
        ctx.total, ctx.index = total, index
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.total.take(ctx.index, gradient), None, None


@dataclass(eq=False)
class _GradientSum:
    """The gradients of a parameter by this rank's micro-batches: rule 2."""

    parameter: Tensor
    lockstep: Lockstep
    sums: dict[range, Tensor] = field(default_factory=dict)
    num_missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_missing = len(self.lockstep.indices)

    def take(self, index: int, gradient: Tensor) -> Tensor | None:
        """The sum over the last subtree, once all gradients are there."""
        join(self.sums, range(index, index + 1), gradient, self.lockstep.count, torch.add)
        self.num_missing -= 1
        if self.num_missing:
            return None
        for subtree, by_parameter in self.lockstep.sums.items():
            by_parameter[self.parameter] = self.sums.pop(subtree)
        (last,) = self.sums.values()
        self.sums.clear()
        return last


def _indices(subtrees: Sequence[range]) -> list[int]:
    return list(chain.from_iterable(subtrees))


def _name(function: Callable[..., Any]) -> str:
    return getattr(getattr(function, "__self__", function), "__name__", str(function))


def device_of(leaves: Sequence[Any]) -> torch.device:
    """Of the first tensor."""
    return next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """What is drawn inside leaves the generators as they are."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield


def seed_generators(seed: int, device: torch.device) -> None:
    """Those of the host and of ``device``."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def draw_seed() -> int:
    """Of the host's generator."""
    with _disable_current_modes():
        return int(torch.empty((), dtype=torch.int64).random_())


@contextmanager
def _seeds(function: Callable[..., Any], leaves: Sequence[Any]) -> Iterator[Callable[[int], None]]:
    """Seeds the generators for a micro-batch by its index: rule 4; an attribute draws nothing."""
    if getattr(function, "__name__", "") == "__get__":
        yield lambda index: None
        return
    device = next(leaf.tensors[0].device for leaf in leaves if isinstance(leaf, MicroBatched))
    seed = draw_seed()
    with own_random_numbers(device):
        yield lambda index: seed_generators(seed + index, device)


def in_lockstep(micro_batches: list[dict[str, Tensor]], rank: int = 0, num_ranks: int = 1) -> dict[str, Tensor]:
    """As one, outside of steps; every rank has as many of the same sizes, and one subtree."""
    power_of_two = 1 << (num_ranks - 1).bit_length()
    count = len(micro_batches) * power_of_two
    subtrees = deal_subtrees(count, power_of_two)[:num_ranks]
    return micro_batched(micro_batches, Lockstep(subtrees, rank, count))


def micro_batched(micro_batches: list[dict[str, Tensor]], lockstep: Lockstep) -> dict[str, Tensor]:
    """Those of ``lockstep``, as one."""
    return {key: MicroBatched.of([one[key] for one in micro_batches], lockstep) for key in micro_batches[0]}
