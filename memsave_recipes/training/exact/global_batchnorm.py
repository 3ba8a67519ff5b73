"""BatchNorm over the whole global batch: across the ranks, and across the micro-batches of a block that takes several.

``global_batchnorm`` makes the BatchNorm layers of a model take their statistics over all ranks, as
``torch.nn.SyncBatchNorm`` does, on a CPU too. A forward is then given the whole share of its rank, and
``in_micro_batches`` runs single blocks of it a micro-batch at a time: between blocks the feature maps of the share
live, inside a block those of one micro-batch.

Notes: ``docs/design/training.md``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import wrap_torch_function
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from memsave_recipes.core.activations.micro_batches import JoinedBatchNorm
from memsave_recipes.core.activations.recompute import batchnorm_layers
from memsave_recipes.core.activations.side_effects import SideEffects
from memsave_recipes.core.errors import InputError
from memsave_recipes.training.exact.lockstep import (
    Lockstep,
    MicroBatched,
    device_of,
    draw_seed,
    own_random_numbers,
    seed_generators,
)


def global_batchnorm(model: nn.Module) -> None:
    """Make the BatchNorm layers of ``model`` take their statistics over all ranks, in training.

    Parameters, buffers and state-dict keys stay as they are; evaluation does not change. Every rank has to run the same
    layers in the same order. Layers that evaluate while the model trains are frozen, and left alone.

    Raises:
        InputError: there is no such layer, or one of them is torch's ``SyncBatchNorm``.
    """
    layers = [layer for layer in batchnorm_layers([model]) if layer.training or not model.training]
    if not layers:
        raise InputError(f"batchnorm global: {type(model).__name__} has no BatchNorm layers that train: leave it out")
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in layers):
        raise InputError("batchnorm global: SyncBatchNorm joins the ranks already: take the model without it")
    for layer in layers:
        layer.forward = GlobalBatchNorm(layer)  # type: ignore[method-assign]


class Statistics(NamedTuple):
    """Of the values of each channel in the global batch: ``mean`` and ``var`` (C,), and their number, ()."""

    mean: Tensor
    var: Tensor
    num_values: Tensor

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> "Statistics":
        """From the ``moments`` of this rank's micro-batches, and those of the other ranks."""
        return cls.from_rows(_from_all_ranks(_joined(torch.stack([*parts]))))

    @classmethod
    def from_rows(cls, rows: Tensor) -> "Statistics":
        """From the ``moments`` of all sets of values, (n, 1 + 2 C)."""
        count, mean, squares = _split(_joined(rows))
        return cls(mean, squares / count, count.squeeze(0))

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The part of the gradient of ``x`` that comes by way of the statistics, whose own is ``gradient``, (2, C)."""
        by_mean, by_var = (_per_channel(part / self.num_values, x) for part in gradient)
        return (by_mean + 2 * by_var * (x - _per_channel(self.mean, x))).to(x.dtype)


def moments(x: Tensor) -> Tensor:
    """The count, means and summed squared deviations of the channels of ``x``, (B, C, ...), as (1 + 2 C,)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = x.numel() // x.shape[1]
    var, mean = torch.var_mean(wide, [0, *range(2, x.dim())], correction=0)
    return torch.cat([mean.new_full((1,), count), mean, count * var])


def _joined(rows: Tensor) -> Tensor:
    """The moments of several sets of values, (n, 1 + 2 C), as those of one."""
    if len(rows) == 1:
        return rows[0]
    counts, means, squares = _split(rows)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    return torch.cat([count, mean, (squares + counts * (means - mean).square()).sum(0)])


def _split(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_channels = rows.shape[-1] // 2
    count, mean, squares = rows.split([1, num_channels, num_channels], dim=-1)
    return count, mean, squares


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))


def _num_ranks(values: Tensor) -> int:
    """Of the process group; a simulated step has one."""
    is_one = isinstance(values, FakeTensor) or not (dist.is_available() and dist.is_initialized())
    return 1 if is_one else dist.get_world_size()


def _from_all_ranks(row: Tensor) -> Tensor:
    """(num_ranks, n) of (n,)."""
    if (num_ranks := _num_ranks(row)) == 1:
        return row[None]
    rows = [torch.empty_like(row) for _ in range(num_ranks)]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def _summed_over_ranks(values: Tensor) -> Tensor:
    return _from_all_ranks(values.flatten()).sum(0).view_as(values)


@dataclass(eq=False)
class GlobalBatchNorm(JoinedBatchNorm):
    """The forward of a BatchNorm layer of ``global_batchnorm``; ``run`` is that of the block that calls it."""

    layer: _BatchNorm
    run: "_Run | None" = None

    def __call__(self, input: Tensor) -> Tensor:
        """As that of the layer, for (B, C, ...)."""
        if self.layer.training and self.run is not None:
            return self.run.normalized(self, input)
        if self.layer.training and isinstance(input, MicroBatched):
            return self.in_lockstep(input)
        if not self.layer.training or _num_ranks(input) == 1:
            output: Tensor = type(self.layer).forward(self.layer, input)
            return output
        statistics = Statistics(*_StatisticsOfRanks.apply(input))  # type: ignore[no-untyped-call]
        self.record(statistics)
        return self.normalized(input, statistics)

    @staticmethod
    def in_micro_batches(
        function: Callable[..., Any], *inputs: Any, modules: Iterable[nn.Module], micro_batch_size: int
    ) -> Any:
        """``function(*inputs)`` a micro-batch at a time, of which only the inputs are saved for backward.

        Statistics of BatchNorm are those of all micro-batches of all ranks: NOTE [ statistics first ].

        Args:
            function: of a batch; its outputs are as long as its inputs.
            inputs: tensors of one length among them, the samples of this rank.
            modules: run by ``function``; their BatchNorm layers are those of ``global_batchnorm``.

        Raises:
            InputError: the tensors differ in length, or a module writes on a tensor of its own in every forward.
        """
        modules = list(modules)
        leaves, structure = tree_flatten(inputs)
        parameters = list(dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad))
        checked, _ = SideEffects(modules).around(function)
        block = _Block(checked, modules, parameters, structure, micro_batch_size)
        made = _InMicroBatches.apply(block, len(leaves), *leaves, *parameters)  # type: ignore[no-untyped-call]
        assert block.outputs is not None
        return block.outputs.filled(leaves, made)

    def in_lockstep(self, x: MicroBatched) -> Tensor:
        """For all micro-batches of this rank, each with the statistics of those of all ranks: rule 7 of the NOTE."""
        *by_part, num_values = _StatisticsInLockstep.apply(x.lockstep, *x.tensors)  # type: ignore[no-untyped-call]
        means, variances = by_part[: len(x.tensors)], by_part[len(x.tensors) :]
        self.record(Statistics(means[0], variances[0], num_values))
        mean, var = (MicroBatched.of(parts, x.lockstep) for parts in (means, variances))
        return self.normalized(x, Statistics(mean, var, num_values))

    def normalized(self, x: Tensor, statistics: Statistics) -> Tensor:
        """``x`` by the given statistics, scaled and shifted."""
        mean, var, _ = statistics
        output: Tensor = _normalized(x, mean, var, self.layer.weight, self.layer.bias, self.layer.eps)
        return output

    @torch.no_grad()
    def record(self, statistics: Statistics) -> None:
        """Move the running statistics, as torch does for one batch of that many values."""
        layer = self.layer
        if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
            return
        mean, var, count = statistics
        share: float | Tensor = 0.0 if layer.momentum is None else layer.momentum
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
            if layer.momentum is None:
                share = 1 / layer.num_batches_tracked.to(mean.dtype)
        for running, value in ((layer.running_mean, mean), (layer.running_var, var * count / (count - 1))):
            running.mul_(1 - share).add_((share * value).to(running.dtype))


@wrap_torch_function(lambda x, *others: (x,))
def _normalized(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
    bias = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
    output: Tensor = _Normalized.apply(x, mean, var, weight, bias, eps)  # type: ignore[no-untyped-call]
    return output


class _Normalized(torch.autograd.Function):
    """BatchNorm by given statistics, with gradients by them too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, mean, var, weight)
        ctx.eps = eps
        return torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], True, True]
        none = mean.new_empty(0)  # CUDA's kernel takes no None for what only training has saved
        by_x, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, mean, var, none, none, False, ctx.eps, wanted
        )
        scale = torch.rsqrt(var + ctx.eps)
        return by_x, -scale * weight * by_bias, -0.5 * scale.square() * weight * by_weight, by_weight, by_bias, None


class _StatisticsOfRanks(torch.autograd.Function):
    """The ``Statistics`` of an input over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        statistics = Statistics.of([moments(x)])
        ctx.save_for_backward(x, *statistics)
        ctx.mark_non_differentiable(statistics.num_values)
        return tuple(statistics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_mean: Tensor, by_var: Tensor, _: Any) -> Tensor:
        x, *statistics = ctx.saved_tensors
        return Statistics(*statistics).input_gradient(x, _summed_over_ranks(torch.stack([by_mean, by_var])))


class _StatisticsInLockstep(torch.autograd.Function):
    """The mean and variance over the inputs of all micro-batches of all ranks, once for every micro-batch of this one.

    All that is joined are the rows of all micro-batches in the order of their index, whoever has them.
    """

    @staticmethod
    def forward(ctx: Any, lockstep: Lockstep, *parts: Tensor) -> tuple[Tensor, ...]:
        rows = torch.stack([moments(part) for part in parts])
        statistics = Statistics.from_rows(lockstep.rows_of_all_ranks(rows))
        ctx.lockstep = lockstep
        ctx.save_for_backward(*parts, *statistics)
        ctx.mark_non_differentiable(statistics.num_values)
        copies = (one.clone() for one in statistics[:2] for _ in parts)
        return *copies, statistics.num_values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *parts, mean, var, num_values = ctx.saved_tensors
        by_mean, by_var = gradients[: len(parts)], gradients[len(parts) : -1]
        rows = torch.stack([torch.cat(of_part) for of_part in zip(by_mean, by_var, strict=True)])
        total = ctx.lockstep.rows_of_all_ranks(rows).sum(0).view(2, -1)
        statistics = Statistics(mean, var, num_values)
        return None, *(statistics.input_gradient(part, total) for part in parts)


class _WithGradientByStatistics(torch.autograd.Function):
    """The input of a layer, to whose gradient that by way of the layer's statistics is added: rule 3 of the NOTE."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor, *statistics: Tensor) -> Tensor:
        ctx.save_for_backward(x, gradient, *statistics)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_of_x: Tensor) -> tuple[Tensor | None, ...]:
        x, gradient, *statistics = ctx.saved_tensors
        return gradient_of_x + Statistics(*statistics).input_gradient(x, gradient), None, None, None, None


class _Reached(Exception):
    """Ends a run at the layer whose moments are wanted."""


@dataclass
class _Run:
    """A run of a block on one micro-batch.

    Args:
        known: the statistics of the first layers that the block calls.
        gradients: by them, each (2, C); of the last ones, where the others are not known yet.
        recorded_from: the number of the layer from which on autograd records; 0: from the beginning, as all others.
    """

    known: Sequence[Statistics]
    gradients: dict[int, Tensor] = field(default_factory=dict)
    recorded_from: int | None = None
    called: list[GlobalBatchNorm] = field(default_factory=list)
    moments: Tensor | None = None

    def normalized(self, norm: GlobalBatchNorm, x: Tensor) -> Tensor:
        """The output of the next layer.

        Raises:
            _Reached: its statistics are not known; ``moments`` are those of ``x``.
        """
        number = len(self.called)
        self.called.append(norm)
        if number == len(self.known):
            self.moments = moments(x)
            raise _Reached
        if number == self.recorded_from:
            torch.set_grad_enabled(True)  # until the caller's no_grad ends
        elif number in self.gradients and x.requires_grad:
            x = _WithGradientByStatistics.apply(x, self.gradients[number], *self.known[number])  # type: ignore[no-untyped-call]
        return norm.normalized(x, self.known[number])


@dataclass(frozen=True)
class _Outputs:
    """How the outputs of a block are made up: of its inputs, by their numbers, and of new tensors, for which ``None``
    stands."""

    taken: list[int | None]
    structure: TreeSpec

    @classmethod
    def of(cls, outputs: Any, inputs: Sequence[Any]) -> tuple["_Outputs", list[Tensor]]:
        """With the new tensors."""
        leaves, structure = tree_flatten(outputs)
        numbers = [next((n for n, one in enumerate(inputs) if one is leaf), None) for leaf in leaves]
        made = [leaf for leaf, number in zip(leaves, numbers, strict=True) if number is None]
        return cls(numbers, structure), made

    def filled(self, inputs: Sequence[Any], made: Iterable[Tensor]) -> Any:
        new = iter(made)
        return tree_unflatten([next(new) if n is None else inputs[n] for n in self.taken], self.structure)


@dataclass
class _Block:
    """A block that runs in micro-batches; ``run`` runs it on one of them."""

    function: Callable[..., Any]
    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    structure: TreeSpec
    micro_batch_size: int
    outputs: _Outputs | None = None
    seed: int = 0
    precision: dict[str, Any] = field(default_factory=dict)

    def begin(self, inputs: Sequence[Any]) -> None:
        """Note all that later runs have to repeat."""
        self.seed = draw_seed()
        kind = device_of(inputs).type
        self.precision = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": False,  # a weight that was cast without gradients must not serve a run with them
        }

    def pieces(self, inputs: Sequence[Any]) -> list[list[Any]]:
        """The inputs of every micro-batch.

        Raises:
            InputError: they differ in length.
        """
        lengths = {len(leaf) for leaf in inputs if isinstance(leaf, Tensor)}
        if len(lengths) != 1:
            raise InputError(
                f"batchnorm global: {type(self.modules[0]).__name__} takes tensors of {sorted(lengths)} samples, so it "
                "cannot run in micro-batches: keep or recompute this block"
            )
        starts = range(0, lengths.pop(), self.micro_batch_size)
        return [
            [leaf[start : start + self.micro_batch_size] if isinstance(leaf, Tensor) else leaf for leaf in inputs]
            for start in starts
        ]

    def run(self, number: int, piece: Sequence[Any], run: _Run) -> list[Tensor]:
        """The new tensors among the outputs for micro-batch ``number``; none where ``run`` ends at a layer."""
        seed_generators(self.seed + number, device_of(piece))
        with torch.autocast(**self.precision), self._followed(run):
            try:
                outputs = self.function(*tree_unflatten(piece, self.structure))
            except _Reached:
                return []
        self.outputs, made = _Outputs.of(outputs, piece)
        return made

    @contextmanager
    def _followed(self, run: _Run) -> Iterator[None]:
        forwards: list[Any] = [layer.forward for layer in batchnorm_layers(self.modules)]
        norms = [forward for forward in forwards if isinstance(forward, GlobalBatchNorm)]
        try:
            for norm in norms:
                norm.run = run
            yield
        finally:
            for norm in norms:
                norm.run = None


class _InMicroBatches(torch.autograd.Function):
    """The new outputs of a block for its inputs; parameters are arguments so that autograd knows of them."""

    @staticmethod
    def forward(ctx: Any, block: _Block, num_inputs: int, *tensors: Any) -> tuple[Tensor, ...]:
        inputs = tensors[:num_inputs]
        block.begin(inputs)
        with own_random_numbers(device_of(inputs)):
            outputs, statistics = _outputs_of(block, block.pieces(inputs))
        ctx.block, ctx.num_inputs, ctx.num_statistics = block, num_inputs, len(statistics)
        ctx.set_materialize_grads(False)
        ctx.others = {n: leaf for n, leaf in enumerate(inputs) if not isinstance(leaf, Tensor)}
        # Not the parameters: hooks of saved tensors may give them back as other tensors than those of the modules.
        ctx.save_for_backward(*(leaf for leaf in inputs if isinstance(leaf, Tensor)), *tree_leaves(statistics))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        saved = list(ctx.saved_tensors)
        cut = len(saved) - 3 * ctx.num_statistics
        inputs = saved[:cut]
        for number, other in sorted(ctx.others.items()):
            inputs.insert(number, other)
        statistics = [Statistics(*saved[at : at + 3]) for at in range(cut, len(saved), 3)]
        backward = _Backward(ctx.block, ctx.block.pieces(inputs), gradients, statistics)
        with own_random_numbers(device_of(inputs)):
            for number in reversed(range(len(statistics))):
                backward.find_gradient_by_statistics(number)
            wanted = ctx.needs_input_grad[2 : 2 + ctx.num_inputs]
            return (None, None, *backward.input_and_parameter_gradients(inputs, wanted))


def _outputs_of(block: _Block, pieces: list[list[Any]]) -> tuple[tuple[Tensor, ...], list[Statistics]]:
    """The outputs of all micro-batches, and the statistics of the layers, which are recorded: rule 1 of the NOTE."""
    statistics: list[Statistics] = []
    while True:
        of_pieces = []
        outputs = _Joined(sum(map(_length, pieces)))
        for number, piece in enumerate(pieces):
            run = _Run(statistics)
            outputs.add(block.run(number, piece, run))
            if run.moments is not None:
                of_pieces.append(run.moments)
        if not of_pieces:
            break
        statistics.append(Statistics.of(of_pieces))
    for norm, found in zip(run.called, statistics, strict=True):
        norm.record(found)
    return tuple(outputs.tensors), statistics


@dataclass
class _Backward:
    """The runs of NOTE [ statistics first ], rule 3, for the micro-batches of a block."""

    block: _Block
    pieces: list[list[Any]]
    gradients: Sequence[Tensor | None]  # of the outputs of all of them
    statistics: list[Statistics]
    by_statistics: dict[int, Tensor] = field(default_factory=dict)

    def find_gradient_by_statistics(self, number: int) -> None:
        """The gradient by the statistics of a layer, after those of the layers behind it."""
        known = [*self.statistics]
        mean, var, count = known[number]
        known[number] = Statistics(mean.detach().requires_grad_(), var.detach().requires_grad_(), count)
        total = torch.stack([torch.zeros_like(mean), torch.zeros_like(var)])
        for at, piece in enumerate(self.pieces):
            run = _Run(known, self.by_statistics, recorded_from=number)
            with torch.no_grad():
                found = self._gradients(at, piece, run, known[number][:2])
            for part, gradient in zip(total, found, strict=True):
                part += 0 if gradient is None else gradient
        self.by_statistics[number] = _summed_over_ranks(total)

    def input_and_parameter_gradients(self, inputs: Sequence[Any], wanted: Sequence[bool]) -> list[Tensor | None]:
        """Of every input, those that are not ``wanted`` without one, and of every parameter.

        The hooks of the parameters see the sums alone, so other leaves stand for them here.
        """
        twins: dict[Tensor, Tensor] = {own: own.detach().requires_grad_() for own in self.block.parameters}
        of_inputs = [torch.zeros_like(leaf) if needed else None for leaf, needed in zip(inputs, wanted, strict=True)]
        of_parameters: list[Tensor | None] = [None] * len(twins)
        start = 0
        for at, piece in enumerate(self.pieces):
            own = [leaf.detach().requires_grad_() if n else leaf for leaf, n in zip(piece, wanted, strict=True)]
            leaves = [leaf for leaf, needed in zip(own, wanted, strict=True) if needed]
            with torch.enable_grad(), _in_place_of_parameters(self.block.modules, twins):
                run = _Run(self.statistics, self.by_statistics)
                found = self._gradients(at, own, run, [*leaves, *twins.values()])
            stop = start + _length(piece)
            targets = [gradient for gradient in of_inputs if gradient is not None]
            for target, gradient in zip(targets, found, strict=False):
                if gradient is not None:
                    target[start:stop] = gradient
            for number, gradient in enumerate(found[len(leaves) :]):
                of_parameters[number] = _sum(of_parameters[number], gradient)
            start = stop
        return [*of_inputs, *of_parameters]

    def _gradients(self, at: int, piece: Sequence[Any], run: _Run, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """Of the leaves, by one run of micro-batch ``at``; none of those that do not count."""
        start = at * self.block.micro_batch_size
        outputs = self.block.run(at, piece, run)
        pairs = [
            (output, gradient[start : start + len(output)])
            for output, gradient in zip(outputs, self.gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if not pairs or not leaves:
            return [None] * len(leaves)
        made, gradients = zip(*pairs, strict=True)
        return list(torch.autograd.grad(made, leaves, gradients, allow_unused=True))


@contextmanager
def _in_place_of_parameters(modules: Iterable[nn.Module], twins: dict[Tensor, Tensor]) -> Iterator[None]:
    """Inside, the modules compute with the twins of their parameters."""
    below = dict.fromkeys(child for module in modules for child in module.modules())
    places = [(child, name, own) for child in below for name, own in child._parameters.items() if own in twins]
    try:
        for child, name, own in places:
            child._parameters[name] = twins[own]  # type: ignore[assignment]
        yield
    finally:
        for child, name, own in places:
            child._parameters[name] = own


@dataclass
class _Joined:
    """The outputs of all micro-batches, each in one tensor of ``length`` samples."""

    length: int
    tensors: list[Tensor] = field(default_factory=list)
    filled: int = 0

    def add(self, outputs: Sequence[Tensor]) -> None:
        """Those of the next micro-batch."""
        if not self.tensors:
            self.tensors = [_longer(output, self.length) for output in outputs]
        for whole, output in zip(self.tensors, outputs, strict=True):
            whole[self.filled : self.filled + len(output)] = output
        self.filled += len(outputs[0]) if outputs else 0


def _longer(tensor: Tensor, length: int) -> Tensor:
    """An empty tensor of ``length`` samples, in the memory format of ``tensor``."""
    shape = (length, *tensor.shape[1:])
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=_format_of(tensor))


def _format_of(tensor: Tensor) -> torch.memory_format:
    is_last = tensor.dim() == 4 and not tensor.is_contiguous()
    is_last = is_last and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def _length(piece: Sequence[Any]) -> int:
    return next(len(leaf) for leaf in piece if isinstance(leaf, Tensor))


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other
