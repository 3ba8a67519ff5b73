"""GPT-2 written out, in the manner of build-nanogpt, and the loops by hand that recipes are measured beside."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from gpu_day.plain_loop import add_gradients, train_step
from gpu_day.step_figures import figures_of


class Block(nn.Module):
    """Causal attention, then an MLP, each added to its input."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        width, self.num_heads = config.n_embd, config.n_head
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Of (B, T, width)."""
        parts = self.queries_keys_values(self.norm_1(hidden)).chunk(3, dim=-1)
        queries, keys, values = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.project(attended.transpose(1, 2).flatten(2))
        result: Tensor = hidden + self.mlp(self.norm_2(hidden))
        return result


class WrittenOut(nn.Module):
    """Tokens in, their mean loss out; the head is the embedding."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.n_embd)
        self.places = nn.Embedding(config.n_positions, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Of (B, T): each token is asked for the next."""
        hidden = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits = F.linear(self.norm(hidden), self.words.weight)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class OfTransformers(nn.Module):
    """The same with the model of transformers."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        """The mean loss of (B, T)."""
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


PEERS: Mapping[str, Callable[[GPT2Config], nn.Module]] = {
    "torch.compile by hand": OfTransformers,
    "build-nanogpt's model, compiled": WrittenOut,
}


def peer_figures(
    name: str,
    sizes: Mapping[str, Any],
    batch: tuple[int, int, int],
    compiler: Callable[[nn.Module], Callable[[Tensor], Tensor]] = torch.compile,
) -> dict[str, Any]:
    """What steps of one of ``PEERS`` take, without dropout.

    Args:
        batch: micro-batches of a step, their rows, and the tokens of a row.
    """
    micro_batches, size, length = batch
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with harness.this_device():
        model = PEERS[name](GPT2Config(**{**sizes, **no_dropout, "use_cache": False})).train()
        rows = torch.randint(sizes["vocab_size"], (micro_batches * size, length))
    optimizer, loss_of = torch.optim.AdamW(model.parameters(), fused=True), compiler(model)
    step = partial(train_step, loss_of, optimizer, rows, size)
    return figures_of(step, partial(add_gradients, loss_of, rows[:size], 1 / micro_batches), micro_batches)
