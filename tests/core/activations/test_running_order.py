"""Blocks that run in another order than they are registered, or whose forward the model calls by itself."""

import pytest
import torch
from torch import nn

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner import StaticMemory, make_plan
from memsave_recipes.core.plans import Plan
from memsave_recipes.core.text import GIB

WIDTH = 32
ENCODER, MIDDLE, DECODER = ([f"{name}.{index}" for index in range(2)] for name in ("encoder", "middle", "decoder"))


def layer():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))


class UNet(nn.Module):
    """Registers its decoder before its middle, as those of diffusers do."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(layer() for _ in range(2))
        self.decoder = nn.ModuleList(layer() for _ in range(2))
        self.middle = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x):
        skips = []
        for block in self.encoder:
            x = block(x)
            skips.append(x)
        for block in self.middle:
            x = block(x)
        for block in self.decoder:
            x = block(x) + skips.pop()
        return x.square().mean()


@pytest.fixture
def unet():
    torch.manual_seed(0)
    return UNet()


@pytest.fixture
def x():
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))


def train_step(model, x):
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(x)
    loss.backward()
    return [loss.detach(), torch.get_rng_state(), *(p.grad.clone() for p in model.parameters())]


def budget_plan(model, x, gib):
    return make_plan(model, x, strategy="budget:bitwise", budget_gib=gib, static=StaticMemory())


def test_a_budget_is_planned_in_the_order_of_the_forward(unet, x):
    expected = train_step(unet, x)
    roomy = budget_plan(unet, x, 1.0)
    assert list(roomy.blocks) == [*ENCODER, *MIDDLE, *DECODER]
    budget_bytes = 0.8 * roomy.prediction.peak_bytes
    tight = budget_plan(unet, x, budget_bytes / GIB)
    assert tight.prediction.peak_bytes <= budget_bytes
    with apply_plan(unet, tight) as handle:
        assert all(map(torch.equal, train_step(unet, x), expected))
        assert handle.runs.again >= set(tight.recomputed)


def test_the_last_segment_is_the_one_that_runs_last(unet, x):
    plan = make_plan(unet, x, strategy="segments:3")
    assert list(plan.recomputed) == [*ENCODER, *MIDDLE]


@pytest.mark.parametrize("strategy", ["full", "selective", "segments:2"])
def test_a_plan_file_has_the_order_of_the_forward(unet, x, strategy):
    expected = train_step(unet, x)
    plan = Plan.from_json(make_plan(unet, x, strategy=strategy).to_json())
    with apply_plan(unet, plan):
        assert all(map(torch.equal, train_step(unet, x), expected))


def test_without_a_batch_the_order_is_that_of_registration(unet):
    assert list(plan_blocks(unet, "full").blocks) == [*ENCODER, *DECODER, *MIDDLE]


class InTurns(UNet):
    def forward(self, x):
        for _ in range(2):
            for block in self.encoder:
                x = block(x)
        return x.square().mean()


def test_blocks_that_run_twice_are_still_refused_under_a_budget(x):
    with pytest.raises(InputError, match="does not run its 2 blocks once each, in every step"):
        budget_plan(InTurns(), x, 1.0)


class CallsForward(nn.Module):
    """As SqueezeBERT does: no hook of the layers runs."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        for block in self.layers:
            x = block.forward(x)
        return x.square().mean()


def test_layers_whose_forward_the_model_calls_are_seen_to_run(x):
    torch.manual_seed(0)
    model = CallsForward()
    before = [dict(vars(module)) for module in model.modules()]
    plan = make_plan(model, x, strategy="full")
    assert set(plan.blocks) >= {f"layers.{index}" for index in range(3)}
    assert [dict(vars(module)) for module in model.modules()] == before
    expected = train_step(model, x)
    with apply_plan(model, plan) as handle:
        assert all(map(torch.equal, train_step(model, x), expected))
        assert handle.runs.again == set(plan.blocks)
