"""Fused attention, which the CPU's kernels do not have by CUDA's names: computed in float32, rounded as the inputs are.

What a kernel saves for backward has the shapes and types that CUDA's has, so what is predicted can be compared.
Shapes: H heads, K heads of keys and values, D numbers a head, T tokens; varlen has all documents in one row.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cuda_standin.waits import as_one

HALF = (torch.float16, torch.bfloat16)
LIBRARY = torch.library.Library("aten", "IMPL")


def _seen(num_queries: int, num_keys: int, causal: bool, window: int | None) -> Tensor:
    """(T, T): which key each query sees; ``window``: no key further to the left than that."""
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
    shift = num_keys - num_queries
    seen = seen.tril(shift) if causal else seen
    return seen if window is None or window < 0 else seen.triu(shift - window)


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """q, k, v (..., H, T, D) in float32, bias (..., T, T): the output and the logarithm of the sums (..., H, T).

    A query that sees no key, as those of padding on the left, has 0: as on CUDA, and as torch's own safe softmax.
    """
    scores = q @ k.transpose(-1, -2) * _scale(q, scale) + bias
    return torch.ops.aten._safe_softmax(scores, -1) @ v, scores.logsumexp(-1)


def _backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None) -> tuple[Tensor, ...]:
    factor = _scale(q, scale)
    weights = torch.ops.aten._safe_softmax(q @ k.transpose(-1, -2) * factor + bias, -1)
    of_weights = g @ v.transpose(-1, -2)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * factor
    return of_scores @ k, of_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ g


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _bias(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)


def _host(*tensors: Tensor) -> Iterator[Tensor]:
    return (torch.ops.standin.on_host(tensor) for tensor in tensors)


def _to_device(value: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    made = torch.empty(value.shape, dtype=dtype, device=like.device)
    torch.ops.standin.on_host(made).copy_(value)
    return made


# ---- varlen: (T, H, D), documents between bounds ----------------------------------------------------------------


def _documents(bounds_q: Tensor, bounds_k: Tensor) -> Iterator[tuple[slice, slice]]:
    q, k = (bounds.tolist() for bounds in _host(bounds_q, bounds_k))
    for (a, b), (c, d) in zip(pairwise(q), pairwise(k), strict=True):
        yield slice(a, b), slice(c, d)


def _heads(states: Tensor, num_heads: int) -> Tensor:
    """(T, K, D) to (H, T, D) in float32; heads of keys and values stand for several of the queries."""
    states = states.float().transpose(0, 1)
    return states.repeat_interleave(num_heads // states.shape[0], 0)


def _varlen_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, **_: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    if query.dtype not in HALF:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")  # torch's words
    q, k, v = _host(query, key, value)
    out, sums = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    causal = is_causal or window_size_right == 0
    for at_q, at_k in _documents(cum_seq_q, cum_seq_k):
        heads = (_heads(states, q.shape[1]) for states in (q[at_q], k[at_k], v[at_k]))
        seen = _seen(at_q.stop - at_q.start, at_k.stop - at_k.start, causal, window_size_left)
        attended, sums[:, at_q] = _forward(*heads, _bias(seen), scale)
        out[at_q] = attended.transpose(0, 1).to(out.dtype)
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused, scores = torch.empty((), dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    return _to_device(out, query, query.dtype), _to_device(sums, query, torch.float32), state, unused, scores


def _varlen_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None, **_: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    g, q, k, v = _host(grad_out, query, key, value)
    made = [torch.empty_like(states) for states in (q, k, v)]
    shared, causal = q.shape[1] // k.shape[1], is_causal or window_size_right == 0
    for at_q, at_k in _documents(cum_seq_q, cum_seq_k):
        heads = (_heads(states, q.shape[1]) for states in (g[at_q], q[at_q], k[at_k], v[at_k]))
        seen = _seen(at_q.stop - at_q.start, at_k.stop - at_k.start, causal, window_size_left)
        of_q, of_k, of_v = _backward(*heads, _bias(seen), scale)
        made[0][at_q] = of_q.transpose(0, 1).to(q.dtype)
        for target, of_heads in ((made[1], of_k), (made[2], of_v)):
            target[at_k] = of_heads.unflatten(0, (-1, shared)).sum(1).transpose(0, 1).to(q.dtype)
    return tuple(_to_device(gradient, query, query.dtype) for gradient in made)


# ---- scaled_dot_product_attention: (B, H, T, D) -----------------------------------------------------------------


def _rows(num_rows: int, length: int, like: Tensor) -> Tensor:
    return _to_device(torch.arange(0, (num_rows + 1) * length, length), like, torch.int32)


def _flat(states: Tensor) -> Tensor:
    return states.transpose(1, 2).flatten(0, 1)  # (B * T, H, D)


def _flash_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    rows, _, num_q, _ = query.shape
    num_k = key.shape[2]
    bounds = _rows(rows, num_q, query), _rows(rows, num_k, query)
    flat = (_flat(states) for states in (query, key, value))
    out, sums, *state = _varlen_forward(*flat, *bounds, num_q, num_k, dropout_p, is_causal, False, scale=scale)
    sums = sums.unflatten(1, (rows, num_q)).transpose(0, 1).contiguous()  # (B, H, T)
    none = torch.empty(0, dtype=torch.int32, device=query.device)
    return out.unflatten(0, (rows, num_q)).transpose(1, 2), sums, none, none.clone(), num_q, num_k, *state[:2], state[2]


def _flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, seed, offset,
    *, scale=None
) -> tuple[Tensor, ...]:  # fmt: skip
    rows = len(query)
    bounds = _rows(rows, query.shape[2], query), _rows(rows, key.shape[2], query)
    flat = (_flat(states) for states in (grad_out, query, key, value, out))
    made = _varlen_backward(*flat, None, *bounds, max_q, max_k, 0.0, is_causal, seed, offset, scale=scale)
    return tuple(gradient.unflatten(0, (rows, -1)).transpose(1, 2) for gradient in made)


def _bias_of(query: Tensor, key: Tensor, attn_bias: Tensor | None, causal: bool) -> Tensor:
    bias = _bias(_seen(query.shape[2], key.shape[2], causal, None))
    return bias if attn_bias is None else bias + next(_host(attn_bias)).float()


def _efficient_forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
) -> tuple[Tensor, ...]:  # fmt: skip
    q, k, v = (states.float() for states in _host(query, key, value))
    out, sums = _forward(q, k, v, _bias_of(query, key, attn_bias, is_causal), scale)
    made = _to_device(out.transpose(1, 2).contiguous(), query, query.dtype).transpose(1, 2)
    saved = sums if compute_log_sumexp else sums[..., :0]
    state = torch.zeros((), dtype=torch.int64, device=query.device)
    return made, _to_device(saved, query, torch.float32), state, state.clone()


def _efficient_backward(
    grad_out, query, key, value, attn_bias, out, logsumexp, seed, offset, dropout_p, grad_input_mask, is_causal=False,
    *, scale=None
) -> tuple[Tensor | None, ...]:  # fmt: skip
    g, q, k, v = (states.float() for states in _host(grad_out, query, key, value))
    made = _backward(g, q, k, v, _bias_of(query, key, attn_bias, is_causal), scale)
    return *(_to_device(gradient, query, query.dtype) for gradient in made), None


def install() -> None:
    """Register the kernels for the devices; the library lives as long as the process."""
    kernels = {
        "_flash_attention_forward": _varlen_forward,
        "_flash_attention_backward": _varlen_backward,
        "_scaled_dot_product_flash_attention": _flash_forward,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_efficient_attention": _efficient_forward,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    }
    for name, kernel in kernels.items():
        LIBRARY.impl(name, as_one(kernel), "CUDA")
