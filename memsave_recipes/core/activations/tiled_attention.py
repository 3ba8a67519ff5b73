"""Attention in tiles of queries: a few tokens at a time against the keys and values of all before them.

The Fully Pipelined Distributed Transformer (https://arxiv.org/abs/2408.16978) streams long rows so. The attention of
two sets of keys is one by their log-sum-exps (Rabe and Staats 2021, https://arxiv.org/abs/2112.05682).

Notes: ``docs/design/activations.md``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memsave_recipes.core.activations.tiles import Weights

aten = torch.ops.aten


class NotInTiles(Exception):
    """This attention is more than tiles compute: rule 5 of the NOTE."""


class Collected(Exception):
    """Keys and values of a tile are there, and nothing else is asked for."""


@dataclass
class KeysSoFar:
    """Keys and values of a row of tiles, and their gradients.

    Args:
        length: tokens of a row.
        lengths: of the documents of each row; ``None``: each row is one document.
        start: the first token of this tile.
        only_collects: whether to end with ``Collected`` once keys and values of the tile are there.
        states: keys and values, (B, K, T, D) each, once there are any.
        gradients: of both, in float32 where they have 16 bits.
    """

    length: int
    lengths: Sequence[Sequence[int]] | None
    start: int = 0
    only_collects: bool = False
    states: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, dropout: float, scale: float | None, window: int | None
    ) -> Tensor:
        """The attention of a tile.

        Args:
            query: (B, H, L, D), of the tile.
            key, value: (B, K, L, D), of the tile.

        Returns:
            (B, L, H, D).

        Raises:
            NotInTiles: there is dropout or a window, or no flash kernel for such tensors.
            Collected: as asked for.
        """
        if dropout or (window is not None and window < self.length) or not has_flash(query, value):
            raise NotInTiles
        self._keep(key.detach(), value.detach())
        if self.only_collects:
            raise Collected
        attended: Tensor = _Attended.apply(query, key, value, self, scale)  # type: ignore[no-untyped-call]
        return attended.transpose(1, 2)

    def _keep(self, key: Tensor, value: Tensor) -> None:
        if not self.states:
            self.states = [one.new_empty((*one.shape[:2], self.length, one.shape[3])) for one in (key, value)]
        for whole, one in zip(self.states, (key, value), strict=True):
            whole[:, :, self.start : self.start + one.shape[2]] = one

    def parts(self, num_queries: int) -> Iterator["Part"]:
        """The documents that the tile has tokens of."""
        begin, end = self.start, self.start + num_queries
        for row in range(len(self.states[0])):
            first = 0
            for length in self.lengths[row] if self.lengths is not None else [self.length]:
                last = first + length
                if first < end and begin < last:
                    yield Part(row, first, max(first, begin), min(last, end), begin)
                first = last


@dataclass(frozen=True)
class Part:
    """The tokens of one document in a tile: from ``start`` to ``stop`` of a row; the document began at ``first``."""

    row: int
    first: int
    start: int
    stop: int
    tile: int

    def of_tile(self, states: Tensor) -> Tensor:
        """Its tokens of a tile's (B, H, L, D): (1, H, l, D)."""
        return states[self.row : self.row + 1, :, self.start - self.tile : self.stop - self.tile]

    def own(self, states: Tensor) -> Tensor:
        """The same of all tokens' (B, K, T, D)."""
        return states[self.row : self.row + 1, :, self.start : self.stop]

    def before(self, states: Tensor) -> Tensor:
        """Those of its document before it."""
        return states[self.row : self.row + 1, :, self.first : self.start]

    @property
    def has_before(self) -> bool:
        """Whether there are any."""
        return self.first < self.start


class _Attended(torch.autograd.Function):
    """Rule 4 of the NOTE; gradients of keys and values of earlier tiles go to ``KeysSoFar``."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, so_far: KeysSoFar, scale: float | None) -> Tensor:
        """(B, H, L, D) and twice (B, K, L, D) to (B, H, L, D)."""
        output, sums = torch.empty_like(query), []
        for part in so_far.parts(query.shape[2]):
            own = part.of_tile(query)
            out, logsumexp = flash(own, [*map(part.own, so_far.states)], True, scale)
            if part.has_before:
                earlier = flash(own, [*map(part.before, so_far.states)], False, scale)
                out, logsumexp = _joined((out, logsumexp), earlier)
            part.of_tile(output).copy_(out)
            sums.append(logsumexp)
        ctx.save_for_backward(query, output, *sums)
        ctx.so_far, ctx.scale = so_far, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """(B, H, L, D) to the shapes of query, key and value of the tile."""
        query, output, *sums = ctx.saved_tensors
        so_far: KeysSoFar = ctx.so_far
        of_query = torch.empty_like(query)
        for part, logsumexp in zip(so_far.parts(query.shape[2]), sums, strict=True):
            own = [part.of_tile(one) for one in (gradient, query, output)]
            found, *others = flash_backward(own, [*map(part.own, so_far.states)], logsumexp, True, ctx.scale)
            for total, one in zip(so_far.gradients, others, strict=True):
                part.own(total).add_(one)
            if part.has_before:
                more, *others = flash_backward(own, [*map(part.before, so_far.states)], logsumexp, False, ctx.scale)
                for total, one in zip(so_far.gradients, others, strict=True):
                    part.before(total).add_(one)
                found = found + more
            part.of_tile(of_query).copy_(found)
        of_tile = slice(so_far.start, so_far.start + query.shape[2])
        return of_query, *(total[:, :, of_tile].to(query.dtype) for total in so_far.gradients), None, None


def _joined(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention of two sets of keys, from that of each and their log-sum-exps (1, H, l)."""
    (out, logsumexp), (more, others) = one, other
    joined = torch.logaddexp(logsumexp, others)
    weights = [(sums - joined).exp()[..., None] for sums in (logsumexp, others)]
    return (out * weights[0] + more * weights[1]).to(out.dtype), joined


def has_flash(query: Tensor, value: Tensor) -> bool:
    """Whether ``flash`` takes such tensors: on a CPU any, on CUDA those of 16 bits, from Ampere on."""
    if query.shape[-1] != value.shape[-1]:
        return False
    if not query.is_cuda:
        return query.device.type == "cpu"
    fits = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return fits and _is_there(query.device)


def _is_there(device: torch.device) -> bool:
    """An estimate for CUDA computes on the CPU, and says which device it is for."""
    if _WITHOUT_FLASH.get():
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


_WITHOUT_FLASH: ContextVar[bool] = ContextVar("without_flash", default=False)


@contextmanager
def without_flash() -> Iterator[None]:
    """Inside, CUDA has no flash kernel, as on devices before Ampere."""
    before = _WITHOUT_FLASH.set(True)
    try:
        yield
    finally:
        _WITHOUT_FLASH.reset(before)


def flash(query: Tensor, states: Sequence[Tensor], is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """The output (1, H, l, D) and the log-sum-exp (1, H, l) of torch's flash kernel; ``states``: keys and values."""
    kernel = (
        aten._scaled_dot_product_flash_attention if query.is_cuda else aten._scaled_dot_product_flash_attention_for_cpu
    )
    output, logsumexp, *_ = kernel(query, *states, 0.0, is_causal, scale=scale)
    return output, logsumexp


def flash_backward(
    of_tile: Sequence[Tensor], states: Sequence[Tensor], logsumexp: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, keys and values.

    Args:
        of_tile: the output's gradient, the query, and the output for all keys.
        states: some of the keys and values.
        logsumexp: for all keys.
    """
    gradient, query, output = of_tile
    whole = (gradient, query, *states, output, logsumexp)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
    others: list[Any] = [0.0, is_causal]
    if query.is_cuda:
        kernel = aten._scaled_dot_product_flash_attention_backward
        state = torch.empty(0, dtype=torch.uint64, device=query.device)  # of the generator: nothing is dropped
        others = [None, None, query.shape[2], states[0].shape[2], 0.0, is_causal, state, state]
    found: tuple[Tensor, Tensor, Tensor] = kernel(*whole, *others, scale=scale)
    return found


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Of sums over tiles."""
    return torch.float32 if dtype.itemsize == 2 else dtype


Call = Callable[[Tensor, KeysSoFar], Tensor]
"""Runs an attention on (B, L, H) tokens of a tile."""


@dataclass(frozen=True)
class TiledAttention:
    """An attention that runs in tiles of queries, as ``in_tiles`` takes it.

    Args:
        module: holds its weights, those of its norm included.
        call: runs it.
        num_tokens: of a tile, in each row.
        lengths: of the documents of each row.
        on_backward: is called when its backward begins.
    """

    module: nn.Module
    call: Call
    num_tokens: int
    lengths: Sequence[Sequence[int]] | None
    on_backward: Callable[[], object] = lambda: None

    def compute(self, tokens: Tensor) -> Tensor:
        """(B, T, H) to the same."""
        so_far, output = KeysSoFar(tokens.shape[1], self.lengths), torch.empty(0)
        for rows in self._tiles(tokens, so_far):
            made = self.call(rows, so_far)
            if not so_far.start:
                output = made.new_empty((*tokens.shape[:2], made.shape[-1]))
            self._tile(output, so_far).copy_(made)
        return output

    def differentiate(self, tokens: Tensor, gradient: Tensor, weights: Weights, of_tokens: Tensor | None) -> None:
        """As ``Tiled``: rule 3 of the NOTE."""
        self.on_backward()
        so_far = self._collected(tokens)
        for rows in self._tiles(tokens, so_far, backwards=True):
            rows = rows.detach().requires_grad_(of_tokens is not None)
            weights.backward(weights.call(self.call, rows, so_far), self._tile(gradient, so_far))
            if of_tokens is not None and rows.grad is not None:
                self._tile(of_tokens, so_far).copy_(rows.grad)

    def _collected(self, tokens: Tensor) -> KeysSoFar:
        """All keys and values, and no gradients of them yet."""
        so_far = KeysSoFar(tokens.shape[1], self.lengths, only_collects=True)
        for rows in self._tiles(tokens, so_far):
            with torch.no_grad(), suppress(Collected):
                self.call(rows, so_far)
        so_far.gradients = [torch.zeros_like(one, dtype=_precise(one.dtype)) for one in so_far.states]
        so_far.only_collects = False
        return so_far

    def _tiles(self, tokens: Tensor, so_far: KeysSoFar, *, backwards: bool = False) -> Iterator[Tensor]:
        starts = range(0, tokens.shape[1], self.num_tokens)
        for so_far.start in reversed(starts) if backwards else starts:
            yield self._tile(tokens, so_far)

    def _tile(self, tokens: Tensor, so_far: KeysSoFar) -> Tensor:
        return tokens[:, so_far.start : so_far.start + self.num_tokens]
