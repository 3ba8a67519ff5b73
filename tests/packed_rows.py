"""Small decoders and rows of several documents for them; a stand-in of CUDA's kernel for these on a CPU."""

import copy
from contextlib import contextmanager
from itertools import pairwise
from unittest.mock import patch

import torch
from torch.library import _scoped_library
from transformers import AutoConfig, AutoModelForCausalLM

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.models import packed_attention
from memsave_recipes.models.causal_lm import CausalLMLoss
from memsave_recipes.models.packed_attention import attend_by_document

LENGTHS = ((20, 11, 1), (5, 27))
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
SHARED_KEYS = {"num_key_value_heads": 1, "head_dim": 16}
MODELS = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 32},
    "llama": SHARED_KEYS,
    "qwen3": SHARED_KEYS,
    "mistral": {**SHARED_KEYS, "sliding_window": 12},  # shorter than some documents
    "gemma": SHARED_KEYS,
    "gemma3_text": {**SHARED_KEYS, "sliding_window": 9, "num_hidden_layers": 6},  # of two kinds
}
NAMES = sorted(MODELS)


def causal_model(model_type, *, dropout=0.0, dtype=torch.float64, **changes):
    torch.manual_seed(0)
    shape = {**SHAPE, **MODELS.get(model_type, {}), **changes}
    tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **shape, **tokens)
    for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop", "summary_first_dropout", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, dropout)
    return AutoModelForCausalLM.from_config(config).to(dtype).train()


def by_document(model):
    model = copy.deepcopy(model)
    assert attend_by_document(model) is None
    return model


def packed(lengths=LENGTHS, vocab_size=64):
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    tokens = torch.randint(vocab_size, positions.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions, "document_lengths": lengths}


def on_cuda(model):
    """The model and packed rows for it, there."""
    batch = packed().items()
    return model.cuda(), {name: part.cuda() if isinstance(part, torch.Tensor) else part for name, part in batch}


def random_documents(draw, num_rows=2, num_tokens=32):
    """The lengths of the documents of each row."""
    cuts = (sorted(draw.sample(range(1, num_tokens), draw.randrange(8))) for _ in range(num_rows))
    return tuple(tuple(b - a for a, b in pairwise([0, *row, num_tokens])) for row in cuts)


def gradients(model, batch, plan="none"):
    return gradients_of(CausalLMLoss(model), batch, plan)


def gradients_of(module, batch, plan="none"):
    with apply_plan(module.model, plan_blocks(module.model, plan)):
        torch.manual_seed(2)
        module(**batch).backward()
    found = torch.cat([parameter.grad.flatten() for parameter in module.model.parameters()])
    module.model.zero_grad()
    return found


@contextmanager
def varlen_on_cpu():
    """Inside, attention by document takes one call for all documents; yields the bounds of each call."""
    calls = []

    def forward(query, key, value, bounds, *others, **options):
        calls.append(bounds)
        return _attended(query, key, value, bounds, *others, **options)

    with _scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", _gradients, "CPU")
        with patch.object(packed_attention, "_has_varlen", lambda query, key, value, dropout: not dropout):
            yield calls


def flash_3_by_definition(calls):
    """The forward and the backward of FlashAttention-3, as torch calls them; ``calls`` counts these."""

    def forward(query, key, value, *others):
        bounds, longest, scale, left, right = (others[at] for at in (4, 9, 20, 22, 23))
        calls["forward"] += 1
        options = {"scale": scale, "window_size_left": left, "window_size_right": right}
        output, sums, *_ = _attended(
            query, key, value, bounds, bounds, longest, longest, 0.0, left == -1, False, **options
        )
        return output, sums, None, None

    def backward(gradient, query, key, value, output, sums, *others):
        bounds, scale, left, right = (others[at] for at in (3, 9, 11, 12))
        calls["backward"] += 1
        options = {"scale": scale, "window_size_left": left, "window_size_right": right}
        found = _gradients(gradient, query, key, value, output, sums, bounds, **options)
        for target, made in zip(others[:3], found, strict=True):
            target.copy_(made)

    return forward, backward


def _attended(query, key, value, bounds, _, longest, *others, **options):
    """(tokens, H, D) and the log-sum-exps (H, tokens), by what the kernel asks for and by the definition."""
    assert others == (longest, 0.0, options["window_size_left"] == -1, False)  # no dropout, causal, no scores wanted
    assert bounds.dtype == torch.int32
    assert bounds[-1] == len(query) == len(key) == len(value)
    assert bounds.diff().max() == longest
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    found = [
        (torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype), sums)
        for weights, sums, _, _, v in _weighted(query, key, value, bounds, **options)
    ]
    output, sums = (torch.cat(parts, dim=dim) for dim, parts in enumerate(zip(*found, strict=True)))
    return output, sums.float(), *(torch.zeros(shape, dtype=torch.uint64) for shape in (2, (), 0))


def _gradients(gradient, query, key, value, output, sums, bounds, *_, scale=None, **window):
    """Those of query, key and value; of a softmax in closed form, as in the paper on flash attention."""
    found, groups = [], query.shape[1] // key.shape[1]
    weighted = _weighted(query, key, value, bounds, scale=scale, **window)
    for (start, stop), (weights, _, q, k, v) in zip(pairwise(bounds.tolist()), weighted, strict=True):
        g, out = (states[start:stop].to(q.dtype) for states in (gradient, output))
        of_value = torch.einsum("hqk,qhd->khd", weights, g)
        of_weights = torch.einsum("qhd,khd->hqk", g, v) - (g * out).sum(-1).T[..., None]
        of_scores = (scale or query.shape[-1] ** -0.5) * weights * of_weights
        of_query = torch.einsum("hqk,khd->qhd", of_scores, k)
        of_key = torch.einsum("hqk,qhd->khd", of_scores, q)
        shared = [one.unflatten(1, (-1, groups)).sum(2) for one in (of_key, of_value)]
        found.append([one.to(query.dtype) for one in (of_query, *shared)])
    return tuple(map(torch.cat, zip(*found, strict=True)))


def _weighted(query, key, value, bounds, *, window_size_left, window_size_right, scale=None):
    """Of each document weights (H, L, L), log-sum-exps (H, L), and query, key, value of all heads; at least float32."""
    groups = query.shape[1] // key.shape[1]
    assert window_size_right == 0
    for start, stop in pairwise(bounds.tolist()):
        q, k, v = (states[start:stop] for states in (query, key, value))
        k, v = (states.repeat_interleave(groups, dim=1) for states in (k, v))
        q, k, v = (states.to(torch.promote_types(states.dtype, torch.float32)) for states in (q, k, v))
        seen = torch.ones(stop - start, stop - start, dtype=torch.bool, device=query.device).tril()
        seen = seen if window_size_left < 0 else seen.triu(-window_size_left)
        scores = (scale or query.shape[-1] ** -0.5) * torch.einsum("qhd,khd->hqk", q, k)
        scores = scores.masked_fill(~seen, -torch.inf)
        yield scores.softmax(-1), scores.logsumexp(-1), q, k, v
