"""Attention and MLP of a layer as blocks of their own: the plain gradients within rounding, from two inputs."""

import copy
from itertools import product

import pytest
import torch
from decoders import (
    MODELS,
    TOKENS,
    assert_float64_rounding,
    causal_model,
    layers_of,
    offloading_engine,
    record,
    without_dropout,
)
from samples import sample
from torch import nn

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.activations.spans import RUN
from memsave_recipes.core.activations.sublayers import NormLater, Unnormed, find_sublayers
from memsave_recipes.core.plans import Action

IN_SUBLAYERS = ("llama", "qwen3", "mistral", "gemma", "gpt_neox")
STRATEGY = "full_tiled_offload:16"


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    engine = offloading_engine()
    monkeypatch.setitem(RUN, Action.OFFLOAD, engine.run)
    return engine


@pytest.mark.parametrize("model_type", MODELS)
def test_which_layers_have_them(model_type):
    for layer in layers_of(causal_model(model_type)):
        parts = find_sublayers(layer)
        assert (parts is not None) == (model_type in IN_SUBLAYERS)
        assert parts is None or parts.mlp is layer.mlp
        assert parts is None or parts.attention is getattr(layer, "self_attn", getattr(layer, "attention", None))
    plain = without_dropout(causal_model("gpt2"))
    assert all(find_sublayers(layer).attention is layer.attn for layer in layers_of(plain))


TILES = (1, 32, 4096)
FAST = {*product(["llama"], TILES), *product(MODELS, [32])}


@pytest.mark.parametrize(("model_type", "tile"), sample(FAST, product(MODELS, TILES)))
def test_the_gradients_of_plain_in_float64(model_type, tile):
    model = without_dropout(causal_model(model_type, torch.float64))
    expected, generator = record(model)
    found, generator_after = record(model, f"full_tiled_offload:{tile}")
    assert torch.equal(generator, generator_after)
    assert_float64_rounding(model_type, found, expected)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("model_type", IN_SUBLAYERS)
def test_as_exact_as_plain(model_type, autocast, assert_three_way):
    model = without_dropout(causal_model(model_type))
    exact, _ = record(copy.deepcopy(model).double())
    plain, _ = record(model, autocast=autocast)
    found, _ = record(model, STRATEGY, autocast=autocast)
    if autocast:  # its rounding of activations is plain's, whose sums over the tokens are longer
        for name, gradient in plain.items():
            assert (found[name] - gradient).abs().max() <= 0.02 * gradient.abs().max(), name
    else:
        assert_three_way(found, plain, exact)


def test_dropout_of_attention_draws_the_numbers_of_plain():
    model = causal_model("llama", attention_dropout=0.2)
    expected, generator = record(model)
    found, generator_after = record(model, STRATEGY)
    assert torch.equal(generator, generator_after)
    assert all(torch.allclose(found[name], gradient, atol=1e-6) for name, gradient in expected.items())


def test_every_block_of_the_plan_runs_again_and_no_third_time():
    model = causal_model("llama")
    calls = {"attention": 0, "mlp": 0}
    layer = layers_of(model)[0]
    with apply_plan(model, plan_blocks(model, "full_tiled_offload:100")) as handle:
        for name, linear in (("attention", layer.self_attn.q_proj), ("mlp", layer.mlp.gate_proj)):
            linear.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        assert handle.runs.again == set(handle.plan.blocks)
    assert calls == {"attention": 2, "mlp": 2}


class Rescaled(nn.Module):
    """A layer that reads the norm of its input in its own way too."""

    def __init__(self):
        super().__init__()
        self.norm, self.after = nn.LayerNorm(8), nn.LayerNorm(8)
        self.mixer = nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        normed = self.norm(x)
        x = x + self.mixer(normed) * normed.mean() + normed[..., :1].relu()
        return x + self.mlp(self.after(x))


def test_whoever_takes_an_unnormed_tensor_gets_its_norm():
    torch.manual_seed(0)
    layers = nn.ModuleList([Rescaled(), Rescaled()]).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model()

    def gradients(plan):
        model.zero_grad()
        with apply_plan(model, plan_blocks(model, plan)):
            model(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    assert find_sublayers(layers[0]) is not None
    for one, other in zip(gradients("full_tiled_offload:3"), gradients("none"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_an_unnormed_tensor_is_the_normed_one_to_every_operator():
    norm = nn.LayerNorm(4)
    x = torch.randn(3, 4)
    unnormed = Unnormed.of(x, NormLater(norm, norm.forward))
    expected = norm(x)
    assert isinstance(unnormed, torch.Tensor)
    assert (unnormed.shape, unnormed.dtype, unnormed.requires_grad) == (expected.shape, expected.dtype, True)
    assert torch.equal(unnormed + 0, expected)
    assert torch.equal(x @ unnormed.T, x @ expected.T)
    assert torch.equal(torch.cat([unnormed, x]), torch.cat([expected, x]))
    assert torch.equal(unnormed[1], expected[1])
    assert type(unnormed * 1) is torch.Tensor
