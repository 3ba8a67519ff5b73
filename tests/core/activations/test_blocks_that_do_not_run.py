"""Blocks that a training does not reach: left out of plans, and named where a plan has little effect."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner import make_plan

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}


@pytest.fixture
def gemma3():
    """Its language model with its tower for images, as ``AutoModelForCausalLM`` gives a multimodal checkpoint."""
    torch.manual_seed(0)
    vision = {"model_type": "siglip_vision_model", **SHAPE, "image_size": 32, "patch_size": 8}
    text = {"model_type": "gemma3_text", "vocab_size": 64, **SHAPE}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, use_cache=False)
    return AutoModelForCausalLM.from_config(config).train()


@pytest.fixture
def batch():
    tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def train_step(model, batch):
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("strategy", ["full", "segments:2", "budget:bitwise"])
def test_a_tower_that_does_not_run_is_left_out(gemma3, batch, strategy):
    expected = train_step(gemma3, batch)
    plan = make_plan(gemma3, batch, strategy=strategy, budget_gib=0.0012)
    assert plan.blocks == tuple(f"model.language_model.layers.{index}" for index in range(4))
    told = []
    with apply_plan(gemma3, plan) as handle:
        record = train_step(gemma3, batch)
        handle.check_first_step(told.append)
    assert all(torch.equal(record[name], gradient) for name, gradient in expected.items())
    assert handle.runs.again >= set(plan.recomputed)
    assert not told


def test_a_plan_of_what_does_not_run_says_so_once(gemma3, batch):
    told = []
    with apply_plan(gemma3, plan_blocks(gemma3, "segments:2")) as handle:
        for _ in range(2):
            train_step(gemma3, batch)
            handle.check_first_step(told.append)
    (line,) = told
    assert "segments:2: 0 of 4 blocks ran again" in line
    assert "layers.0 to model.vision_tower" in line
    assert line.endswith("never ran)")


def test_a_plan_of_what_does_not_train_says_so(gemma3, batch):
    gemma3.requires_grad_(False)
    gemma3.lm_head.weight = nn.Parameter(gemma3.lm_head.weight.clone())
    plan = make_plan(gemma3, batch, strategy="full")
    with apply_plan(gemma3, plan) as handle:
        train_step(gemma3, batch)
        with pytest.warns(UserWarning, match="0 of 4 blocks ran again .*nothing before or in"):
            handle.check_first_step()


@pytest.fixture
def wav2vec2():
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "wav2vec2",
        **{name: value for name, value in SHAPE.items() if name not in ("num_key_value_heads", "head_dim")},
        layerdrop=0.5,
        conv_dim=[16] * 7,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
    )
    return AutoModel.from_config(config).train()


@pytest.mark.parametrize("seed", range(2))
def test_layers_that_are_left_out_at_random_have_costs(wav2vec2, seed):
    torch.manual_seed(seed)
    sound = torch.randn(2, 2000)
    plan = make_plan(wav2vec2, sound, strategy="budget:bitwise", budget_gib=1.0)
    assert [name for name in plan.blocks if "encoder.layers" in name] == [f"encoder.layers.{i}" for i in range(4)]
    assert wav2vec2.config.layerdrop == 0.5


class SkipsEverySecondTime(nn.Module):
    """A layer is left out in a way of the model's own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        for number, layer in enumerate(self.layers):
            x = x if number == 1 and self.num_calls % 4 == 0 else layer(x)
        return x.sum()


def test_layers_that_run_now_and_then_have_none():
    with pytest.raises(InputError, match="does not run its 3 blocks once each"):
        make_plan(SkipsEverySecondTime(), torch.randn(2, 4), strategy="budget:bitwise", budget_gib=1.0)
