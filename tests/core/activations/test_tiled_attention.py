"""Attention in tiles of queries: the plain gradients within rounding, for packed rows and one document."""

import copy
from itertools import product

import pytest
import torch
from decoders import assert_float64_rounding, causal_model, layers_of, offloading_engine, without_dropout
from samples import sample
from workloads import estimate_on_target, workload_of

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.activations.spans import RUN
from memsave_recipes.core.activations.tiled_attention import KeysSoFar, flash
from memsave_recipes.core.costs.estimate import fake_batch, fake_model
from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.plans import Action, plan_for
from memsave_recipes.models.causal_lm import CausalLMLoss
from memsave_recipes.models.packed_attention import set_packed_attention

LENGTHS = {"one": ((40,), (40,)), "packed": ((3, 21, 16), (39, 1)), "as tiles": ((8,) * 5, (16, 24))}
MODELS = ("llama", "qwen3", "gemma", "gpt_neox", "gpt2")
TILES = (1, 8, 13, 39)


@pytest.fixture(autouse=True)
def on_host(monkeypatch):
    monkeypatch.setitem(RUN, Action.OFFLOAD, offloading_engine().run)


@pytest.fixture
def calls(monkeypatch):
    """How often keys and values of a tile came."""
    found = []
    attend = KeysSoFar.attend

    def counted(self, query, *args, **options):
        found.append(query.shape[2])
        return attend(self, query, *args, **options)

    monkeypatch.setattr(KeysSoFar, "attend", counted)
    return found


def by_document(model_type, dtype=torch.float32, **changes):
    model = without_dropout(causal_model(model_type, dtype, **changes))
    set_packed_attention(model, "document")
    return model


def record(model, lengths, plan="none", autocast=False):
    model.zero_grad()
    tokens = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    with apply_plan(model, plan_blocks(model, plan)) as handle:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = CausalLMLoss(model, "full")(tokens, tokens, position_ids=positions, document_lengths=lengths)
        loss.backward()
        assert plan == "none" or handle.runs.again == set(handle.plan.blocks)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {"loss": loss.detach()}


FAST = {*product(["llama"], TILES, LENGTHS), *product(MODELS, [13], ["packed"])}


@pytest.mark.parametrize(("model_type", "tile", "lengths"), sample(FAST, product(MODELS, TILES, LENGTHS)))
def test_the_gradients_of_plain_in_float64(model_type, tile, lengths, calls):
    model = by_document(model_type, torch.float64)
    expected = record(model, LENGTHS[lengths])
    found = record(model, LENGTHS[lengths], f"full_tiled_offload:{tile}")
    num_tiles = -(-40 // tile)
    assert len(calls) == 3 * num_tiles * model.config.num_hidden_layers
    assert_float64_rounding(model_type, found, expected)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("model_type", MODELS)
def test_as_exact_as_plain(model_type, autocast, assert_three_way):
    model = by_document(model_type)
    exact = record(copy.deepcopy(model).double(), LENGTHS["packed"])
    plain = record(model, LENGTHS["packed"], autocast=autocast)
    found = record(model, LENGTHS["packed"], "full_tiled_offload:8", autocast)
    if autocast:
        for name, gradient in plain.items():
            assert (found[name] - gradient).abs().max() <= 0.03 * gradient.abs().max(), name
    else:
        assert_three_way(found, plain, exact)


def test_a_row_of_one_tile_recomputes(calls):
    model = by_document("llama")
    record(model, LENGTHS["packed"], "full_tiled_offload:40")
    assert calls == []


@pytest.mark.parametrize("changes", [{"attention_dropout": 0.1}])
def test_what_tiles_do_not_compute_recomputes(changes, calls):
    model = by_document("llama")
    for layer in layers_of(model):
        layer.self_attn.attention_dropout = 0.1
    torch.manual_seed(3)
    expected = record(model, LENGTHS["packed"], "full_tiled:8")
    torch.manual_seed(3)
    found = record(model, LENGTHS["packed"], "full_tiled_offload:8")
    assert len(calls) == len(layers_of(model))  # each found out once
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_a_window_recomputes(calls):
    model = by_document("mistral", torch.float64, sliding_window=5)
    expected = record(model, LENGTHS["packed"])
    found = record(model, LENGTHS["packed"], "full_tiled_offload:8")
    assert len(calls) == len(layers_of(model))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_with_a_cache_of_keys_it_recomputes(model_type, calls):
    """Each tile would add its keys to those of the tiles before it."""
    model = by_document(model_type, torch.float64)
    tokens, found = torch.arange(40)[None], []
    for plan in ("none", "full_tiled_offload:8"):
        model.zero_grad()
        with apply_plan(model, plan_blocks(model, plan)):
            model(input_ids=tokens, labels=tokens, document_lengths=[[40]], use_cache=True).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert calls == []
    assert all(map(torch.allclose, *found))


def test_shared_keys_of_a_tile_are_those_of_the_whole_row():
    torch.manual_seed(0)
    query = torch.randn(1, 4, 12, 8, dtype=torch.float64)
    key, value = (torch.randn(1, 2, 12, 8, dtype=torch.float64) for _ in range(2))
    expected, _ = flash(query, [key, value], True, None)
    so_far = KeysSoFar(12, None)
    found = []
    for so_far.start in range(0, 12, 5):
        tile = slice(so_far.start, so_far.start + 5)
        states = (one[:, :, tile] for one in (query, key, value))
        found.append(so_far.attend(*states, dropout=0.0, scale=None, window=None))
    torch.testing.assert_close(torch.cat(found, 1).transpose(1, 2), expected)


ON_A100 = [("a100", torch.bfloat16, True)]


@pytest.mark.parametrize(
    ("card", "precision", "has_tiles"),
    sample(ON_A100, [*ON_A100, ("t4", torch.float16, False), ("a100", None, False)]),
)
def test_an_estimate_has_tiles_where_the_device_has_the_kernel(card, precision, has_tiles, calls):
    model = fake_model(lambda: by_document("llama", max_position_embeddings=2048))
    tokens = fake_batch(model, {"tokens": torch.empty(1, 64, dtype=torch.long, device="meta")})["tokens"]
    module = CausalLMLoss(model, "full")
    workload = workload_of(model, lambda _, tokens: module(tokens, tokens, document_lengths=[[64]]), tokens)
    plans = [plan_for(word, workload.stacks) for word in ("none", "full_tiled_offload:16")]
    measured = estimate_on_target(workload, plans, find_target(card), autocast_dtype=precision)
    assert [plan.strategy for plan, _ in measured.traces] == ["none", "full_tiled_offload:16"]
    assert (len(calls) > len(layers_of(model))) == has_tiles
