"""MLPs in tiles: a few tokens at a time, so that what an MLP makes inside is never there for all of them.

Arctic Long Sequence Training (https://arxiv.org/abs/2506.13996) has it as ``TiledMLP``.

Notes: ``docs/design/activations.md``.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from memsave_recipes.core.activations.block_state import replaced
from memsave_recipes.core.activations.side_effects import undone
from memsave_recipes.core.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class Mlp:
    """An MLP of a layer.

    Args:
        module: takes (..., H), gives (..., H), and computes each token, of H numbers, by itself.
        dropout: its last operator, if that draws random numbers.
    """

    module: nn.Module
    dropout: nn.Dropout | None


def find_mlps(layer: nn.Module) -> list[Mlp]:
    """The outermost MLPs of ``layer``: linear layers and activations that compute each token by itself.

    That is proven on a few tokens; a model of fake or meta tensors has no values, and its structure is believed. Where
    weights are in shards, others take their place.
    """
    found: list[Mlp] = []
    for child in layer.children():
        mlp = _as_mlp(child)
        found += [mlp] if mlp else find_mlps(child)
    return found


def _as_mlp(module: nn.Module) -> Mlp | None:
    if not _takes_one_tensor(module) or not _has_structure(module):
        return None
    drawing = [part for part in module.modules() if isinstance(part, nn.Dropout) and part.p > 0]
    if len(drawing) > 1:
        return None
    dropout = drawing[0] if drawing else None
    if not _has_values(next(module.parameters())):
        kinds = [type(part) for part in module.modules()]
        if _believed.get(module) != kinds and _computes_tokens_alone(module, dropout):
            _believed[module] = kinds
        return Mlp(module, dropout) if _believed.get(module) == kinds else None
    return Mlp(module, dropout) if _computes_tokens_alone(module, dropout) else None


_believed: WeakKeyDictionary[nn.Module, list[type]] = WeakKeyDictionary()
"""Modules without values that ran on a few tokens, with the kinds of their parts: each plan of an estimate asks."""


def _takes_one_tensor(module: nn.Module) -> bool:
    parameters = list(signature(type(module).forward).parameters.values())[1:]
    return len(parameters) == 1 and parameters[0].kind is parameters[0].POSITIONAL_OR_KEYWORD


def _has_structure(module: nn.Module) -> bool:
    """Two linear layers or more, an activation, and nothing else with weights but norms of a token."""
    leaves = [part for part in module.modules() if not any(part.children())]
    linear = [leaf for leaf in leaves if _is_linear(leaf)]
    with_weights = [part for part in module.modules() if list(part.parameters(recurse=False))]
    activations = [
        leaf for leaf in leaves if leaf not in with_weights and not isinstance(leaf, nn.Dropout | nn.Identity)
    ]
    others = [part for part in with_weights if not _is_linear(part) and not is_norm_of_a_token(part)]
    return len(linear) > 1 and bool(activations) and not others


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # of transformers: GPT-2


def is_norm_of_a_token(module: nn.Module) -> bool:
    """Whether it is a norm over the last dimension."""
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("RMSNorm")


def _computes_tokens_alone(module: nn.Module, dropout: nn.Dropout | None) -> bool:
    """Also that ``dropout`` makes its output, and that it remembers nothing of them."""
    if len({parameter.device for parameter in module.parameters()}) > 1:  # frozen weights wait on the host
        module, dropout = copy.deepcopy((module, dropout))
        module.cpu()
    whole = _stand_ins(module)
    run = partial(functional_call, module, whole) if whole else module
    last: list[Any] = []
    hook = dropout.register_forward_hook(lambda _, __, output: last.append(output)) if dropout else None
    tokens = _tokens_for(module)
    try:
        kind = "mps" if tokens.device.type == "mps" else "cuda"
        devices = [tokens.device] if tokens.device.type == kind else []
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=kind), undone(module) as remembered:
            output = run(tokens)
            ends_with_dropout = not last or last[-1] is output
            with replaced(dropout, "training", False) if dropout else nullcontext():
                together, alone = run(tokens) if _has_values(tokens) else output, run(tokens[1:, 2:])
    except Exception:  # it is another kind of module
        return False
    finally:
        if hook is not None:
            hook.remove()
    same_shape = together.shape == tokens.shape
    return (
        not remembered
        and ends_with_dropout
        and same_shape
        and (not _has_values(together) or _same(together[1:, 2:], alone))
    )


def _stand_ins(module: nn.Module) -> dict[str, Tensor]:
    """Whole weights for those of ``module`` that are in shards; each in the memory of about a row and a column."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: weight for name, weight in module.named_parameters() if isinstance(weight, DTensor)}
    return {name: _stand_in(weight, generator) for name, weight in weights.items()}


def _stand_in(weight: DTensor, generator: torch.Generator) -> Tensor:
    numbers: Tensor = torch.randn(sum(weight.shape), generator=generator) / weight.shape[-1] ** 0.5
    return numbers.to(weight.to_local()).as_strided(weight.shape, [1] * weight.ndim)


def _tokens_for(module: nn.Module) -> Tensor:
    """(2, 3, H)."""
    linear = next(part for part in module.modules() if _is_linear(part))
    width = linear.in_features if isinstance(linear, nn.Linear) else linear.get_parameter("weight").shape[0]
    weight: Tensor = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    weight = weight.to_local() if isinstance(weight, DTensor) else weight
    tokens = weight.new_zeros(2, 3, int(width))
    return tokens + torch.linspace(-1, 1, tokens.numel()).to(tokens).view_as(tokens) if _has_values(tokens) else tokens


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _same(one: Tensor, other: Tensor) -> bool:
    precision = torch.finfo(one.dtype).eps
    return bool((one - other).abs().max() <= 64 * precision * one.abs().max().clamp(min=precision))


@dataclass
class TiledForward:
    """The forward of an MLP under a plan; while it is there, that of ``dropout`` gives its input back."""

    mlp: Mlp
    method: Callable[[Tensor], Tensor]
    num_tokens: int

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The output of the MLP's own forward.

        Raises:
            InputError: it is called with more than one tensor.
        """
        (tokens,) = (*args, *kwargs.values()) if len(args) + len(kwargs) == 1 else (None,)
        if not isinstance(tokens, Tensor):
            name = type(self.mlp.module).__name__
            raise InputError(f"strategy: {name} takes more than one tensor, so it cannot run in tiles: use full")
        output = in_tiles(self, tokens) if torch.is_grad_enabled() else self.method(tokens)
        dropout = self.mlp.dropout
        return output if dropout is None else type(dropout).forward(dropout, output)

    @property
    def module(self) -> nn.Module:
        """The MLP."""
        return self.mlp.module

    def compute(self, tokens: Tensor) -> Tensor:
        """As ``Tiled``."""
        output = torch.empty(0)
        for start, rows in in_turn(_tiles(tokens, self.num_tokens)):
            made = self.method(rows[None])[0]
            if not start:
                output = made.new_empty(tokens.shape)
            output.flatten(0, -2)[start : start + len(rows)] = made
        return output

    def differentiate(self, tokens: Tensor, gradient: Tensor, weights: "Weights", of_tokens: Tensor | None) -> None:
        """As ``Tiled``."""
        tiles = zip(_tiles(tokens, self.num_tokens), _tiles(gradient, self.num_tokens), strict=True)
        for (start, rows), (_, gradient_rows) in in_turn(tiles):
            rows = rows.detach().requires_grad_(of_tokens is not None)
            weights.backward(weights.call(self.method, rows[None])[0], gradient_rows)
            if of_tokens is not None and rows.grad is not None:
                of_tokens.flatten(0, -2)[start : start + len(rows)] = rows.grad


class Tiled(Protocol):
    """What runs in tiles."""

    @property
    def module(self) -> nn.Module:
        """Holds its weights."""

    def compute(self, tokens: Tensor) -> Tensor:
        """Of (..., H) to the same, without gradients, tile after tile."""

    def differentiate(self, tokens: Tensor, gradient: Tensor, weights: "Weights", of_tokens: Tensor | None) -> None:
        """Run each tile again with ``weights`` and take its gradients.

        Args:
            gradient: of what ``compute`` gave.
            of_tokens: where those of ``tokens`` go, if anybody asks for them.
        """


def in_tiles(tiled: Tiled, tokens: Tensor) -> Tensor:
    """(..., H) to the same, of which ``tokens`` alone are saved for backward."""
    named = tiled.module.named_parameters()
    weights = {name: one for name, one in named if one.requires_grad or not isinstance(one, nn.Parameter)}  # streamed
    box: list[Any] = []
    kept = _Keep.apply(box, tokens, *weights.values())  # type: ignore[no-untyped-call]
    output: Tensor = _Tiles.apply(box[0], tiled, list(weights), kept, *weights.values())  # type: ignore[no-untyped-call]
    return output


@dataclass
class Weights:
    """The weights of a module for the tiles of a backward, and the sums of their gradients."""

    module: nn.Module
    summed: dict[str, "_Summed"]

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """``method(*args)``, which runs the module, with these weights."""
        own = {f"module.{name}": one.weight for name, one in self.summed.items()}
        return functional_call(Caller(self.module, method), own, args)

    def backward(self, output: Tensor, gradient: Tensor) -> None:
        """Of a tile."""
        torch.autograd.backward(output, gradient)
        for one in self.summed.values():
            one.add()


class Caller(nn.Module):
    """Calls a module's own forward, of which the instance has another one."""

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the method."""
        return self.method(*args, **kwargs)


class _Keep(torch.autograd.Function):
    """Rule 3 of the NOTE. Its node runs after that of the tiles, which read what it saved."""

    @staticmethod
    def forward(ctx: Any, box: list[Any], tokens: Tensor, *weights: Tensor) -> Tensor:
        """(..., H) to the same."""
        box.append(ctx)
        ctx.save_for_backward(tokens, *weights)
        ctx.num_weights = len(weights)
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """(..., H) to the same."""
        return None, gradient, *[None] * ctx.num_weights


class _Tiles(torch.autograd.Function):
    """Rules 1 and 2 of the NOTE."""

    @staticmethod
    def forward(ctx: Any, kept: Any, tiled: Tiled, names: list[str], tokens: Tensor, *weights: Tensor) -> Tensor:
        """(..., H) to the same."""
        ctx.kept, ctx.tiled, ctx.names, ctx.autocast = kept, tiled, names, _autocast_of(tokens.device.type)
        with torch.autocast(**ctx.autocast):
            return tiled.compute(tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """(..., H) to the same, and the gradients of the weights."""
        tokens, *weights = ctx.kept.saved_tensors
        each = zip(ctx.names, weights, ctx.needs_input_grad[4:], strict=True)
        summed = {name: _Summed.of(weight, is_trained) for name, weight, is_trained in each}
        of_tokens = torch.empty_like(tokens, memory_format=torch.contiguous_format) if ctx.needs_input_grad[3] else None
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            ctx.tiled.differentiate(tokens, gradient, Weights(ctx.tiled.module, summed), of_tokens)
        return None, None, None, of_tokens, *(one.total() for one in summed.values())


def in_turn(tiles: Iterable[T]) -> Iterable[T]:
    """All of them; an estimate takes some in its place, as it knows what the others take."""
    return tiles


def _tiles(tokens: Tensor, num_tokens: int) -> Iterator[tuple[int, Tensor]]:
    """Rows of (..., H), (N, H) each, and the number of the first."""
    for number, rows in enumerate(tokens.flatten(0, -2).split(num_tokens)):
        yield number * num_tokens, rows


@dataclass
class _Summed:
    """A weight whose gradients of all tiles are summed; by autograd in its own precision, or by us in float32."""

    weight: Tensor
    in_float32: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, is_trained: bool) -> "_Summed":
        """With no gradient yet."""
        has_16_bits = weight.is_floating_point() and weight.element_size() == 2
        zeros = torch.zeros_like(weight, dtype=torch.float32) if has_16_bits and is_trained else None
        return cls(weight.detach().requires_grad_(is_trained), zeros)

    def add(self) -> None:
        """The gradient of a tile."""
        if self.in_float32 is not None and self.weight.grad is not None:
            self.in_float32 += self.weight.grad
            self.weight.grad = None

    def total(self) -> Tensor | None:
        """The sum, in the precision of the weight."""
        return self.weight.grad if self.in_float32 is None else self.in_float32.to(self.weight.dtype)


def _autocast_of(device_type: str) -> dict[str, Any]:
    return {
        "device_type": device_type,
        "dtype": torch.get_autocast_dtype(device_type),
        "enabled": torch.is_autocast_enabled(device_type),
        "cache_enabled": False,  # a weight that was cast without gradients must not serve a run with them
    }
