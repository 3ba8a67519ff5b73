"""Under an autocast that remembers its casts, a plan keeps no copy of the weights and changes no bit."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AlbertConfig, AlbertForMaskedLM, LlamaConfig, LlamaForCausalLM

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.errors import InputError


class Tied(nn.Module):
    """Layers of a loop, the first and third of which have the same weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))
        self.layers[2][0].weight = self.layers[0][0].weight

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def llama():
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=4, attention_dropout=0.1, use_cache=False))


def albert():
    shape = {"hidden_size": 32, "embedding_size": 16, "intermediate_size": 48, "num_attention_heads": 4}
    return AlbertForMaskedLM(AlbertConfig(vocab_size=64, num_hidden_layers=4, **shape))


def loss_of(model):
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, Tied):
        return model(torch.randn(8, 16, generator=generator))
    tokens = torch.randint(6, 64, (2, 12), generator=generator)
    return model(input_ids=tokens, labels=tokens).loss


def step(model):
    model.zero_grad()
    torch.manual_seed(7)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


class CastsOf(TorchDispatchMode):
    """The casts of ``weights`` that are still there."""

    def __init__(self, weights):
        super().__init__()
        self.weights = {id(weight) for weight in weights}
        self.casts = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self.weights:
            self.casts.append(weakref.ref(output))
        return output

    def alive(self):
        return sum(cast() is not None for cast in self.casts)


def casts_at_the_end_of_the_forward(model):
    weights = [weight for layer in model.model.layers for weight in layer.parameters()]
    torch.manual_seed(7)
    with torch.autocast("cpu", torch.bfloat16), CastsOf(weights) as seen:
        loss_of(model)  # its graph is gone, and so is what it saved
        return seen.alive(), len(seen.casts)


def test_recomputed_blocks_leave_no_casts_behind():
    model = llama().train()
    of_all = 4 * 7  # projections
    assert casts_at_the_end_of_the_forward(model) == (of_all, of_all)
    for strategy, num_kept in (("full", 0), ("selective", 0), ("segments:2", of_all // 2)):
        with apply_plan(model, plan_blocks(model, strategy)):
            assert casts_at_the_end_of_the_forward(model)[0] == num_kept, strategy


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        *((make, strategy) for make in (llama, Tied) for strategy in ("full", "every:2", "segments:2", "full_offload")),
        (llama, "selective"),
        (albert, "full"),
        (albert, "every:1"),
    ],
)
def test_gradients_are_those_of_plain(make, strategy):
    torch.manual_seed(0)
    model = make().train()
    expected = step(model)
    with apply_plan(model, plan_blocks(model, strategy)):
        record = step(model)
    assert len(record) == len(expected)
    assert all(map(torch.equal, record, expected))


def test_selective_refuses_a_weight_that_another_block_has_cast_or_is_right():
    """torch 2.11 compares the operators of both runs only where their outputs are kept."""
    torch.manual_seed(0)
    model = Tied().train()
    expected = step(model)
    refused = ""
    with apply_plan(model, plan_blocks(model, "selective")):
        try:
            record = step(model)
        except InputError as refusal:
            refused = str(refusal)
    assert "no weight twice under one autocast" in refused or all(map(torch.equal, record, expected))
