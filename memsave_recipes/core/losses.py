"""Losses: of labelled samples, and of a language model's head in chunks of rows, without the full logits.

The gradient is made in the forward, as in Liger Kernel's fused linear cross-entropy, there with Triton kernels
(https://arxiv.org/abs/2410.10989). Limits: no second derivative; the head is one whole tensor, not quantized, and
gathered where it is in shards.

Notes: ``docs/design/losses.md``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from memsave_recipes.core.text import MIB

WORDS = 64
"""A multiple of it has the head in products of half precision: 128 bytes, a line of the cache."""

IGNORED_LABEL = -100  # of what does not count, as everywhere in torch and transformers


def default_chunk_bytes(device: torch.device) -> int:
    """Return the bytes of the float32 logits of one chunk: 32 MiB on a CPU, 512 MiB on other devices.

    A chunk costs a pass over the head's gradient, so its products must outweigh that. Measured on a CPU (float32, width
    512, vocabulary 128k, against the full path's time): 16 rows x1.6, 32 rows x1.1, 64 rows, which are 32 MiB, x1.0,
    128 rows x0.85. The size for accelerators is computed from an H200's 790 TFLOP/s and 4.8 TB/s, not measured.
    """
    return 32 * MIB if device.type == "cpu" else 512 * MIB


def num_chunks(num_rows: int, vocab_size: int, chunk_bytes: int) -> int:
    """Return how many chunks of at most ``chunk_bytes`` the float32 logits take. With one there is little to save."""
    rows_that_fit = max(1, chunk_bytes // (torch.float32.itemsize * vocab_size))
    return ceil(num_rows / rows_that_fit)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_bytes: int | None = None,
    tied: "TiedGradient | None" = None,
    compiles: bool = False,
) -> Tensor:
    """Sum the cross-entropies of all rows with a label, with only a few rows of logits in memory at a time.

    Logits are ``logit_scale * (hidden @ weight.T + bias)``, with ``softcap`` then ``softcap * tanh(logits / softcap)``.
    Loss and gradients are those of ``F.cross_entropy`` on all logits at once, up to the order of sums. Under autocast
    the products are in its dtype, everything else in float32. The host never waits for the device.

    Args:
        hidden: (N, D), the output of the last layer.
        weight: (V, D), the head; it may also be the embedding (tied weights).
        labels: (N,) already shifted; rows with -100 do not count.
        bias: (V,).
        chunk_bytes: how large the float32 logits of one chunk may be, by default ``default_chunk_bytes``. At the peak a
            chunk takes one such tensor, half as much again in bfloat16, twice as much with ``softcap``.
        tied: of the ``tied_gradient`` that ``hidden`` was made in; ``weight`` is the embedding.
        compiles: whether ``torch.compile`` fuses what is between the products, if gradients are needed.

    Returns:
        A scalar in float32, or in float64 where the inputs are.

    Raises:
        ValueError: the shapes do not fit.
        RuntimeError: a label is outside the vocabulary (on CUDA a device-side assertion, as with torch's own loss).

    Source: NOTE [ the gradient in the forward ], NOTE [ padded words ], NOTE [ tied weights ].
    """
    if hidden.ndim != 2 or labels.shape != hidden.shape[:1]:
        shapes = f"{tuple(hidden.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"hidden must be (N, D) and labels (N,), they are {shapes}: flatten both")
    count = num_chunks(len(hidden), len(weight), chunk_bytes or default_chunk_bytes(hidden.device))
    autocasts = torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64
    settings = _Settings(
        rows=max(1, ceil(len(hidden) / max(1, count))),
        softcap=softcap,
        logit_scale=logit_scale,
        matmul_dtype=torch.get_autocast_dtype(hidden.device.type) if autocasts else None,
        compiles=compiles and torch.__version__ >= "2.13",  # inductor of 2.11 fails on ``_fused``
    )
    apply: Callable[..., Tensor] = _LinearCrossEntropy.apply
    waiting = tied if tied is not None and tied.is_behind(hidden) else None
    return apply(hidden, weight, bias, labels, settings, torch.is_grad_enabled(), waiting)


class _Settings(NamedTuple):
    """The arguments of a call besides its tensors; ``matmul_dtype`` is autocast's."""

    rows: int
    softcap: float | None
    logit_scale: float
    matmul_dtype: torch.dtype | None
    compiles: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        settings: _Settings,
        grad_enabled: bool,
        tied: "TiedGradient | None",
    ) -> Tensor:
        tensors = hidden, weight, bias, labels
        ctx.settings, ctx.tied = settings, tied
        ctx.wanted = [needed and grad_enabled for needed in ctx.needs_input_grad[:3]]
        ctx.dtypes = [tensor.dtype if tensor is not None else None for tensor in tensors[:3]]
        ctx.save_for_backward(*tensors)  # for a second backward
        loss, ctx.gradients = _run_chunks(*tensors, settings, ctx.wanted)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            hidden, weight, bias, labels = ctx.saved_tensors
            _, ctx.gradients = _run_chunks(hidden, weight, bias, labels, ctx.settings, ctx.wanted)
        gradients, ctx.gradients = ctx.gradients, None  # no other reference: autograd takes the tensors as they are
        for gradient in filter(torch.is_tensor, gradients):
            gradient.mul_(factor)
        if ctx.tied is not None:
            ctx.tied.of_head, gradients[1] = gradients[1], None
        pairs = zip(gradients, ctx.dtypes, strict=True)
        rounded = [gradient.to(dtype) if gradient is not None else None for gradient, dtype in pairs]
        return *rounded, None, None, None, None


@dataclass(eq=False)
class TiedGradient:
    """The gradient, (V, D), of a weight that is embedding and head, and the lookup's node: NOTE [ tied weights ]."""

    of_head: Tensor | None = None
    lookup: Any = None

    def is_behind(self, hidden: Tensor) -> bool:
        """Tell whether ``hidden`` was computed from the lookup, whose backward then comes after the loss's."""
        seen: set[Any] = set()
        left = [hidden.grad_fn] if self.lookup is not None else []
        while left and self.lookup not in seen:
            node = left.pop()
            if node is not None and node not in seen:
                seen.add(node)
                left += [before for before, _ in node.next_functions]
        return self.lookup in seen


@contextmanager
def tied_gradient(embedding: nn.Embedding) -> Iterator[TiedGradient | None]:
    """Let the lookup of ``embedding`` wait, inside, for the gradient of a head with the same weight.

    Gives ``None`` where the embedding's gradient is sparse or scaled, or its rows renormalised.
    """
    if embedding.sparse or embedding.scale_grad_by_freq or embedding.max_norm is not None:
        yield None
        return
    tied, before = TiedGradient(), embedding.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Lookups(embedding.weight, tied):
            return before(*args, **kwargs)

    with forward_of(embedding, forward):
        yield tied


@contextmanager
def forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let ``module``, inside, run ``forward`` in place of its own."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


class _Lookups(TorchFunctionMode):
    """Makes the first lookup in ``weight`` that of ``tied``."""

    def __init__(self, weight: Tensor, tied: TiedGradient) -> None:
        super().__init__()
        self.weight = weight
        self.tied = tied

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.embedding or args[1] is not self.weight or self.tied.lookup is not None:
            return func(*args, **(kwargs or {}))
        padding_idx = args[2] if len(args) > 2 else (kwargs or {}).get("padding_idx")
        rows = _Lookup.apply(self.weight, args[0], padding_idx, self.tied)  # type: ignore[no-untyped-call]
        self.tied.lookup = rows.grad_fn
        return rows


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, padding_idx: int | None, tied: TiedGradient) -> Tensor:
        """(V, D) and (...) to (..., D)."""
        ctx.save_for_backward(tokens)
        ctx.num_rows, ctx.dtype, ctx.padding_idx, ctx.tied = len(weight), weight.dtype, padding_idx, tied
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """(..., D) to the sum with the head's (V, D)."""
        (tokens,) = ctx.saved_tensors
        total, ctx.tied.of_head = ctx.tied.of_head, None
        if total is None:  # of a backward without the loss
            padding_idx = -1 if ctx.padding_idx is None else ctx.padding_idx
            return torch.ops.aten.embedding_dense_backward(gradient, tokens, ctx.num_rows, padding_idx, False), *[
                None
            ] * 3
        tokens, rows = tokens.flatten(), gradient.flatten(0, -2).to(total.dtype)
        if ctx.padding_idx is not None:
            rows = rows.masked_fill((tokens == ctx.padding_idx)[:, None], 0)
        total.index_put_((tokens,), rows, accumulate=True)  # on CUDA sorted first, so that the order is always the same
        return total.to(ctx.dtype), None, None, None


def _run_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: _Settings, wanted: list[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss, and its gradients for hidden, weight and bias where ``wanted``, in ``_precise`` dtypes."""
    num_words, dtype = len(weight), settings.matmul_dtype
    hidden, weight = hidden.to(dtype or hidden.dtype), _padded(weight, dtype or weight.dtype)
    bias = None if bias is None else _padded(bias, dtype or bias.dtype)
    precise = _precise(hidden.dtype)
    loss = torch.zeros((), dtype=precise, device=hidden.device)
    gradients = [
        torch.zeros(tensor.shape, dtype=precise, device=tensor.device) if tensor is not None and needed else None
        for tensor, needed in zip((hidden, weight, bias), wanted, strict=True)
    ]
    with torch.autocast(hidden.device.type, enabled=False):
        for first in range(0, len(hidden), settings.rows):
            chunk = slice(first, first + settings.rows)
            logits = F.linear(hidden[chunk], weight, bias)  # (rows, V), or padded
            if settings.compiles and any(wanted):
                some, logits = _compiled()(logits, labels[chunk], settings.logit_scale, settings.softcap, num_words)
                loss += some
            else:
                logits = logits.to(precise)
                loss += _to_gradient(logits, labels[chunk], settings, num_words, wanted=any(wanted))
            _add_gradients(gradients, logits, hidden, weight, chunk)
            del logits  # or two chunks would be there while the next one is made
    for position, gradient in enumerate(gradients[1:], start=1):
        if gradient is not None and len(gradient) > num_words:
            gradients[position] = gradient[:num_words]
    return loss, gradients


def _padded(head: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weight (V, D) or bias (V,) of a head in ``dtype``, with rows of zeros: NOTE [ padded words ]."""
    if not _pads(head, dtype):
        return head.to(dtype)
    num_words = len(head)
    padded = head.new_empty((num_words + -num_words % WORDS, *head.shape[1:]), dtype=dtype)
    padded[:num_words] = head
    padded[num_words:] = 0
    return padded


def pads_words(head: Tensor) -> bool:
    """Return whether the loss pads the words of a head (V, D), in the precision that it computes in now."""
    device = head.device.type
    return _pads(head, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.dtype)


def _pads(head: Tensor, dtype: torch.dtype) -> bool:
    return head.is_cuda and dtype in (torch.bfloat16, torch.float16) and len(head) % WORDS > 0


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_fused)


def _fused(
    logits: Tensor, labels: Tensor, scale: float, softcap: float | None, num_words: int
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of ``logits`` (rows, V), and its gradient for ``_add_gradients``, in their place."""
    ignored, columns = (labels == IGNORED_LABEL)[:, None], torch.arange(logits.shape[1], device=logits.device)
    targets = labels[:, None].masked_fill(ignored, 0)
    values = scale * logits.to(_precise(logits.dtype))
    slope: Tensor | float = scale
    if softcap is not None:
        capped = (values / softcap).tanh()
        values, slope = softcap * capped, scale * (1 - capped.square())
    expected = values[:, :num_words].gather(1, targets)
    if logits.shape[1] > num_words:
        values = values.masked_fill(columns >= num_words, -torch.inf)
    totals = values.logsumexp(1, keepdim=True)
    loss = (totals - expected).masked_fill(ignored, 0).sum()
    gradient = (((values - totals).exp() - (columns == targets).to(values.dtype)) * slope).masked_fill(ignored, 0)
    fits = gradient.dtype == logits.dtype or _sums_come_out(logits)
    return loss, logits.copy_(gradient) if fits else gradient


def _to_gradient(logits: Tensor, labels: Tensor, settings: _Settings, num_words: int, *, wanted: bool) -> Tensor:
    """Return the summed loss of ``logits`` (rows, V), which then hold, if ``wanted``, its gradient."""
    slope = _transform(logits, settings, wanted=wanted)
    if logits.shape[1] > num_words:
        logits[:, num_words:] = -torch.inf
    ignored = labels == IGNORED_LABEL
    labels = labels.masked_fill(ignored, 0)
    logits -= logits.amax(1, keepdim=True)
    expected = logits[:, :num_words].gather(1, labels[:, None]).squeeze(1)  # refuses labels outside the vocabulary
    totals = logits.exp_().sum(1)
    loss = (totals.log() - expected).masked_fill_(ignored, 0).sum()
    if wanted:
        logits /= totals.masked_fill_(ignored, torch.inf)[:, None]  # rows that are ignored become zero on the way
        logits[torch.arange(len(labels), device=labels.device), labels] -= (~ignored).to(logits.dtype)
        if slope is not None:
            logits *= slope
    return loss


def _transform(logits: Tensor, settings: _Settings, *, wanted: bool) -> Tensor | float | None:
    """Scale and cap ``logits`` in place; return the derivative of that, if ``wanted`` and not one."""
    scale, softcap = settings.logit_scale, settings.softcap
    if scale != 1:
        logits *= scale
    if softcap is None:
        return scale if scale != 1 else None
    capped = logits.div_(softcap).tanh_()
    slope = capped.square().sub_(1).mul_(-scale) if wanted else None
    logits *= softcap
    return slope


def _add_gradients(
    gradients: list[Tensor | None], grad_logits: Tensor, hidden: Tensor, weight: Tensor, chunk: slice
) -> None:
    """Add the rows of ``chunk`` to the gradients for hidden, weight and bias."""
    grad_hidden, grad_weight, grad_bias = gradients
    rounded = grad_logits.to(weight.dtype)
    if grad_hidden is not None:
        grad_hidden[chunk] = rounded @ weight
    if grad_weight is not None and _sums_come_out(rounded):
        _add_product(grad_weight, rounded.t(), hidden[chunk])
    elif grad_weight is not None:
        torch.addmm(grad_weight, grad_logits.t(), hidden[chunk].to(grad_weight.dtype), out=grad_weight)
    if grad_bias is not None:
        grad_bias += grad_logits.sum(0, dtype=grad_bias.dtype)


def _sums_come_out(factor: Tensor) -> bool:
    """Tell whether a product of low precision can be added to a float32 tensor without a rounding in between.

    Matrix units sum in float32, but of the libraries behind torch only NVIDIA's hands those sums out. The
    FlopCounterMode of torch 2.13 fails on ``addmm`` with ``out_dtype`` and needs a ``custom_mapping`` for it.
    """
    return factor.is_cuda and factor.dtype in (torch.bfloat16, torch.float16) and torch.version.hip is None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``total``, whose dtype the sums have."""
    if isinstance(total, FakeTensor) and torch.__version__ < "2.13":  # no shapes of this addmm, and no values to add
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of softmax, loss and sums over chunks."""
    return torch.float64 if dtype == torch.float64 else torch.float32
