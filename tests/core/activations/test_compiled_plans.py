"""Plans around compiled layers: the bits of compiled layers that keep everything, and no graph more."""

import pytest
import torch
from samples import sample
from transformers import GPT2Config, GPT2LMHeadModel

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.costs.memory import SavedTensors
from memsave_recipes.core.planner import make_plan
from memsave_recipes.core.proof import verify

pytestmark = pytest.mark.usefixtures("kernels_can_be_compiled")

TOKENS = torch.randint(0, 96, (6, 64), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": TOKENS, "labels": TOKENS}
ONE_GRAPH = [("fp32", ("full", "offload"), len(TOKENS))]
STRATEGIES = ("full", "every:2", "segments:2", "nested:2", "offload", "full_offload")


def gpt2(dropout):
    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_layer=4, n_head=4, n_embd=64, **drops, **tokens)).train()


def step(model, precision, rows):
    """Loss and gradients of two micro-batches, the second one of ``rows``, and the bytes that the first one saved."""
    torch.manual_seed(5)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        with SavedTensors(model) as saved:
            loss = model(**BATCH).loss
        loss.backward()
        second = model(TOKENS[:rows], labels=TOKENS[:rows]).loss
    second.backward()
    return [loss.detach(), second.detach(), *(p.grad.clone() for p in model.parameters())], saved.num_bytes


@pytest.mark.parametrize(
    ("precision", "strategies", "rows"),
    sample(ONE_GRAPH, [*ONE_GRAPH, ("fp32", STRATEGIES, 3), ("bf16", STRATEGIES, 3)]),
)
def test_every_plan_has_the_bits_of_compiled_layers_that_keep_everything(precision, strategies, rows, graphs):
    model = gpt2(dropout=0.1)
    with apply_plan(model, plan_blocks(model, "none").on_compiled_layers()):
        kept, kept_bytes = step(model, precision, rows)
    num_graphs = graphs()
    for strategy in strategies:
        with apply_plan(model, plan_blocks(model, strategy).on_compiled_layers()):
            planned, saved_bytes = step(model, precision, rows)
        assert all(map(torch.equal, planned, kept)), strategy
        assert graphs() <= num_graphs, strategy
        assert (saved_bytes < kept_bytes) is (strategy != "offload"), strategy
    eager, _ = step(model, precision, rows)
    assert not all(map(torch.equal, eager, kept)), "nothing was compiled"


def test_a_plan_is_predicted_and_solved_on_compiled_layers_and_proven():
    model = gpt2(dropout=0.0)
    named = make_plan(model, BATCH, strategy="full", predict=True, compiled=True)
    budget_gib = 1.02 * named.prediction.peak_bytes / 2**30
    plan = make_plan(model, BATCH, strategy="budget:bitwise", budget_gib=budget_gib, compiled=True)
    assert plan.compiled
    assert plan.is_bitwise
    assert plan.recomputed
    verdict = verify(model, plan, lambda: backward_of(model))
    assert verdict.status == "as exact as plain"
    assert verdict.note.startswith("identical")


def backward_of(model):
    loss = model(**BATCH).loss
    loss.backward()
    return loss
