"""Attention and MLP of a layer, each starting again from its own input, which waits on the host.

NOTE [ sub-layers ]
1. In a layer that recomputes as a whole, what attention saved is there while the MLP's backward runs. Here each of both
   is a block of its own that begins with its norm: both run in tiles, and an attention that cannot recomputes. Twice as
   many inputs wait on the host.
2. The layer still calls the norms, and adds the residuals. A norm gives its input back as an ``Unnormed`` tensor.
   Attention and MLP know it, take the input, and normalise it inside; for anything else it is the normalised tensor,
   as soon as an operator takes it.
3. For layers that are two norms, an attention and an MLP, without dropout among them. Others, such as Gemma 2's with a
   norm behind the MLP, recompute as a whole.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from memsave_recipes.core.activations.arguments import LayerCall, split_call
from memsave_recipes.core.activations.block_state import is_cache
from memsave_recipes.core.activations.planned_forward import PlannedForward
from memsave_recipes.core.activations.recompute import BlockRuns
from memsave_recipes.core.activations.spans import RUN
from memsave_recipes.core.activations.tiled_attention import KeysSoFar, NotInTiles, TiledAttention
from memsave_recipes.core.activations.tiles import Mlp, TiledForward, find_mlps, in_tiles, is_norm_of_a_token
from memsave_recipes.core.plans import Action


@dataclass(frozen=True)
class SubLayers:
    """The parts of a layer."""

    norms: tuple[nn.Module, ...]
    attention: nn.Module
    mlp: nn.Module


def find_sublayers(layer: nn.Module) -> SubLayers | None:
    """Those of a layer by rule 3 of the NOTE; ``None`` for any other layer."""
    children = list(layer.children())
    norms = tuple(child for child in children if is_norm_of_a_token(child))
    others = [child for child in children if child not in norms and any(True for _ in child.parameters())]
    drops = any(isinstance(child, nn.Dropout) and child.p > 0 for child in children)
    mlps = [mlp for mlp in find_mlps(layer) if mlp.dropout is None and mlp.module in others]
    if len(norms) != 2 or len(others) != 2 or len(mlps) != 1 or drops:
        return None
    (mlp,) = mlps
    (attention,) = (child for child in others if child is not mlp.module)
    return SubLayers(norms, attention, mlp.module)


class Unnormed(Tensor):
    """What a norm is to be applied to: rule 2 of the NOTE."""

    source: Tensor
    later: "NormLater"

    @classmethod
    def of(cls, source: Tensor, norm: "NormLater") -> "Unnormed":
        """``source``, for those that know it; its norm for all others."""
        made: Unnormed = Tensor._make_subclass(cls, _NOTHING)
        made.source, made.later = source, norm
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda one: one.normed, (args, kwargs or {}))
        return func(*args, **kwargs)

    @cached_property
    def normed(self) -> Tensor:
        """The norm of the source."""
        return self.later.method(self.source)


_NOTHING = torch.empty(0)


@dataclass
class NormLater(PlannedForward):
    """The forward of a norm."""

    module: nn.Module
    method: Callable[[Tensor], Tensor]

    def planned(self, tokens: Tensor) -> Tensor:
        """What it is the norm of: (..., H)."""
        return Unnormed.of(tokens, self)

    def compiled(self, tokens: Tensor) -> Tensor:
        """The norm of (..., H)."""
        return self.method(tokens)


@dataclass
class AttentionBlock(PlannedForward):
    """The forward of an attention that runs again from the input of its norm, on the host meanwhile.

    Args:
        num_tokens: of a tile of queries.
        runs_in_tiles: whether it has not been found unable to.
    """

    name: str
    module: nn.Module
    method: Callable[..., Any]
    runs: BlockRuns
    action: Action
    num_tokens: int
    runs_in_tiles: bool = True

    def planned(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the attention's own forward."""
        call, (tokens,) = split_call(self.module, self.method, args, kwargs)
        norm = tokens.later if isinstance(tokens, Unnormed) else None
        tokens = tokens.source if isinstance(tokens, Unnormed) else tokens
        modules = [self.module, *([norm.module] if norm else [])]
        if self.runs_in_tiles and LENGTHS in call.kwargs and tokens.shape[1] > self.num_tokens:
            try:
                return self._in_tiles(_TileCall(call, norm, tokens.shape[1]), tokens, modules)
            except NotInTiles:
                self.runs_in_tiles = False
        run = partial(_after, norm, call)
        recorded = self.runs.recorded(run, self.name, action=self.action, modules=modules)
        return RUN[Action.RECOMPUTE_OFFLOAD](recorded, tokens, modules=modules)

    def _in_tiles(self, call: "_TileCall", tokens: Tensor, modules: list[nn.Module]) -> Any:
        """
        Raises:
            NotInTiles: it is more than tiles compute.
        """
        again = partial(self.runs.again.add, self.name)
        tiled = TiledAttention(nn.ModuleList(modules), call, self.num_tokens, call.whole.kwargs[LENGTHS], again)
        output = RUN[Action.OFFLOAD](partial(in_tiles, tiled), tokens, modules=modules)
        self.runs.first.add(self.name)
        return output if call.num_others is None else (output, *[None] * call.num_others)


LENGTHS, KEYS = "document_lengths", "keys_so_far"
"""Arguments of ``attention_by_document``."""


@dataclass
class _TileCall:
    """The call of an attention, and of its norm before, for a tile of its tokens.

    Args:
        num_others: of results besides the hidden states, which are none; ``None`` where these come by themselves.
    """

    whole: LayerCall
    norm: NormLater | None
    length: int
    num_others: int | None = None

    def __call__(self, rows: Tensor, so_far: KeysSoFar) -> Tensor:
        """(B, L, H) to the same."""
        cut = partial(_of_tile, so_far.start, rows.shape[1], self.length)
        args, kwargs = tree_map_only(Tensor, cut, (self.whole.args, self.whole.kwargs))
        if any(map(is_cache, (*args, *kwargs.values()))):
            raise NotInTiles
        found = _after(self.norm, replace(self.whole, args=args, kwargs={**kwargs, KEYS: so_far}), rows)
        output, *others = found if isinstance(found, tuple) else (found,)
        if any(other is not None for other in others):
            raise NotInTiles
        self.num_others = len(others) if isinstance(found, tuple) else None
        made: Tensor = output
        return made


def _of_tile(start: int, num_tokens: int, length: int, argument: Tensor) -> Tensor:
    """The part of an argument with a value for each token: (B, T, ...), as rotary tables have, or (T,)."""
    dim = 1 if argument.ndim > 1 else 0
    has_tokens = argument.ndim > 0 and argument.shape[dim] == length
    return argument.narrow(dim, start, num_tokens) if has_tokens else argument


def _after(norm: NormLater | None, call: Callable[[Tensor], Any], tokens: Tensor) -> Any:
    """``call`` on what a norm gives."""
    return call(tokens if norm is None else norm.method(tokens))


@dataclass
class MlpBlock(PlannedForward):
    """The forward of an MLP that runs in tiles, with its norm, from an input on the host."""

    module: nn.Module
    method: Callable[[Tensor], Tensor]
    num_tokens: int

    def planned(self, tokens: Tensor) -> Tensor:
        """(..., H) to the same."""
        run = TiledForward(Mlp(self.module, None), self.method, self.num_tokens)
        if isinstance(tokens, Unnormed):
            normed = _NormedMlp(tokens.later, self)
            tokens, run = tokens.source, TiledForward(Mlp(normed, None), normed.forward, self.num_tokens)
        output: Tensor = RUN[Action.OFFLOAD](run, tokens, modules=[run.mlp.module])
        return output


class _NormedMlp(nn.Module):
    """A norm and an MLP, by the forwards that a plan has replaced."""

    def __init__(self, norm: NormLater, mlp: MlpBlock) -> None:
        super().__init__()
        self.norm, self.mlp = norm.module, mlp.module
        self.methods = norm.method, mlp.method

    def forward(self, tokens: Tensor) -> Tensor:
        """(..., H) to the same."""
        norm, mlp = self.methods
        return mlp(norm(tokens))
