"""Modules that change a buffer in every forward: BatchNorm's statistics count once, others are refused by name."""

import pytest
import torch
from torch import nn
from transformers import IBertConfig, IBertForMaskedLM

from memsave_recipes.activations import apply_plan, plan_blocks
from memsave_recipes.errors import InputError
from memsave_recipes.plans import Action, Plan, Span

WAYS = ["full", "segments:2", "selective"]


def spectral():
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Tanh())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return self.linear(x / self.largest)


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((), 2.0))

    def forward(self, x):
        return self.linear(x * self.scale)


def model_of(make):
    torch.manual_seed(0)
    return nn.Sequential(*(make() for _ in range(3)), nn.Linear(8, 2))


@pytest.mark.parametrize("strategy", WAYS)
@pytest.mark.parametrize(
    ("make", "words"), [(spectral, "Linear writes on its buffer weight_u"), (Counting, "Counting .* buffer largest")]
)
def test_a_buffer_that_the_forward_changes_is_named_in_the_first_forward(make, words, strategy):
    model = model_of(make)
    with apply_plan(model, plan_blocks(model, strategy)), pytest.raises(InputError, match=words) as error:
        model(torch.randn(4, 8))
    assert "use none" in error.value.one_line


@pytest.mark.parametrize("make", [spectral, Counting])
def test_blocks_that_keep_everything_may_change_buffers(make):
    model = model_of(make)
    spans = (Span(start=0, stop=3, action=Action.KEEP), Span(start=3, stop=4, action=Action.RECOMPUTE))
    with apply_plan(model, Plan(strategy="mine", blocks=plan_blocks(model, "full").blocks, spans=spans)):
        model(torch.randn(4, 8)).sum().backward()


@pytest.mark.parametrize("strategy", WAYS)
def test_a_forward_that_failed_leaves_nothing_behind(strategy):
    """While its exception is held, others train."""
    model, other = model_of(spectral), nn.Linear(8, 2)
    with apply_plan(model, plan_blocks(model, strategy)), pytest.raises(InputError) as error:
        model(torch.randn(4, 8))
    other(torch.randn(4, 8)).sum().backward()
    assert other.weight.grad is not None
    assert error.value.one_line


@pytest.mark.parametrize("strategy", WAYS)
@pytest.mark.parametrize("make", [Reading, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))])
def test_buffers_that_are_read_and_statistics_give_plain_bit_for_bit(make, strategy):
    def train_step(model):
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(1))).sum().backward()
        return [*(parameter.grad for parameter in model.parameters()), *model.buffers()]

    expected, model = train_step(model_of(make)), model_of(make)
    with apply_plan(model, plan_blocks(model, strategy)):
        assert all(map(torch.equal, train_step(model), expected))


def test_ibert_is_refused():
    """Its activations keep the range that they have seen."""
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = IBertForMaskedLM(IBertConfig(vocab_size=32, **shape)).train()
    with (
        apply_plan(model, plan_blocks(model, "full")),
        pytest.raises(InputError, match="QuantAct writes on its buffer"),
    ):
        model(torch.ones(1, 4, dtype=torch.long))
