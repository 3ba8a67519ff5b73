"""Layers that a loop takes by number: one for all depths (ALBERT), or the halves of a layer in two lists (XLM)."""

import pytest
import torch
from torch import nn
from transformers import AlbertConfig, AlbertForMaskedLM, XLMConfig, XLMWithLMHeadModel

from memsave_recipes.core.activations import apply_plan, block_names, find_stacks, plan_blocks
from memsave_recipes.core.costs.memory import SavedTensors
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner import make_plan

SHARED = "albert.encoder.albert_layer_groups.0"


def albert():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "embedding_size": 16, "intermediate_size": 48, "num_attention_heads": 4}
    noise = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return AlbertForMaskedLM(AlbertConfig(vocab_size=64, num_hidden_layers=4, **shape, **noise)).train()


def xlm():
    torch.manual_seed(0)
    return XLMWithLMHeadModel(XLMConfig(vocab_size=64, emb_dim=32, n_layers=3, n_heads=4)).train()


@pytest.fixture
def batch():
    tokens = torch.randint(6, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def train_step(model, batch):
    model.zero_grad()
    torch.manual_seed(7)
    with SavedTensors(model) as saved:
        loss = model(**batch).loss
    saved_bytes = saved.num_bytes
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), torch.get_rng_state(), *gradients], saved_bytes


@pytest.mark.parametrize("strategy", ["full", "every:1", "selective"])
def test_each_call_of_a_shared_layer_recomputes(batch, strategy):
    model = albert()
    assert block_names(find_stacks(model)) == [[SHARED]]
    expected, plain_bytes = train_step(model, batch)
    calls = []
    model.get_submodule(f"{SHARED}.albert_layers.0.ffn").register_forward_hook(lambda *_: calls.append(1))
    with apply_plan(model, make_plan(model, batch, strategy=strategy)):
        calls.clear()
        record, saved_bytes = train_step(model, batch)
    assert all(map(torch.equal, record, expected))
    assert saved_bytes < plain_bytes
    assert len(calls) == 2 * 4


@pytest.mark.parametrize(
    ("strategy", "words"),
    [("segments:2", "a whole number from 1 to 1"), ("budget:bitwise", "does not run its 1 blocks once each")],
)
def test_plans_that_tell_calls_apart_are_refused(batch, strategy, words):
    with pytest.raises(InputError, match=words):
        make_plan(albert(), batch, strategy=strategy, budget_gib=1.0)


@pytest.mark.parametrize("strategy", ["full", "segments:2", "selective", "budget:bitwise"])
def test_the_halves_of_layers_in_two_lists(batch, strategy):
    model = xlm()
    expected, plain_bytes = train_step(model, batch)
    plan = make_plan(model, batch, strategy=strategy, budget_gib=1.0)
    assert set(plan.blocks) == {f"transformer.{half}.{i}" for half in ("attentions", "ffns") for i in range(3)}
    if strategy == "budget:bitwise":
        assert [name.split(".")[1] for name in plan.blocks] == ["attentions", "ffns"] * 3
    with apply_plan(model, plan):
        record, saved_bytes = train_step(model, batch)
    assert all(map(torch.equal, record, expected))
    assert saved_bytes < plain_bytes or strategy == "budget:bitwise"


class OneLayer(nn.Module):
    """A list of a single layer that nobody calls in a loop."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh())])
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        return self.head(self.layers[0](x)).sum()


def test_a_list_of_one_layer_outside_of_loops_is_as_before():
    assert plan_blocks(OneLayer(), "full").blocks == ("layers.0.0", "layers.0.1", "head.0", "head.1")
