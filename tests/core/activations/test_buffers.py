"""Modules that change a buffer in every forward: BatchNorm's statistics count once, others are refused by name."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm
from transformers import IBertConfig, IBertForMaskedLM

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Action, Plan, Span

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
def test_a_buffer_that_the_forward_writes_on_is_named_in_the_first_forward(strategy):
    model, words = model_of(spectral), "Linear writes on its buffer weight_u"
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
@pytest.mark.parametrize("make", [Reading, Counting, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))])
def test_buffers_that_are_read_and_statistics_give_plain_bit_for_bit(make, strategy):
    def train_step(model):
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(1))).sum().backward()
        return [*(parameter.grad for parameter in model.parameters()), *model.buffers()]

    expected, model = train_step(model_of(make)), model_of(make)
    with apply_plan(model, plan_blocks(model, strategy)):
        assert all(map(torch.equal, train_step(model), expected))


@pytest.mark.parametrize("strategy", WAYS)
def test_ibert_keeps_the_ranges_that_it_has_seen(strategy):
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = IBertForMaskedLM(IBertConfig(vocab_size=32, **shape, quant_mode=True)).train()
    twin, batch = copy.deepcopy(model), torch.arange(12).view(2, 6)
    with apply_plan(model, plan_blocks(model, strategy)):
        for one in (model, twin):
            torch.manual_seed(0)
            for _ in range(2):
                one(batch, labels=batch).loss.backward()
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(one.grad is other.grad is None or torch.equal(one.grad, other.grad) for one, other in pairs)


class Counts(nn.BatchNorm1d):
    def forward(self, x):
        if self.training:
            self.num_batches_tracked += 1
        return batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum)


class OfConstantMomentum(nn.BatchNorm1d):
    def forward(self, x):
        return batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1)


class WithBuffer(nn.BatchNorm1d):
    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += self.training
        return super().forward(x) * self.steps


@pytest.mark.parametrize("strategy", [*WAYS, "nested:1"])
@pytest.mark.parametrize("kind", [Counts, OfConstantMomentum, WithBuffer])
def test_batchnorms_with_a_forward_of_their_own_count_once(kind, strategy):
    model = model_of(lambda: nn.Sequential(nn.Linear(8, 8), kind(8), nn.ReLU()))
    twin = copy.deepcopy(model)
    with apply_plan(model, plan_blocks(model, strategy)):
        for one in (model, twin):
            for seed in range(3):
                one(torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(model.parameters(), twin.parameters(), strict=True))


def test_two_threads_may_run_backwards_of_one_model():
    model = model_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()))
    with apply_plan(model, plan_blocks(model, "full")):
        losses = [model(torch.randn(16, 8)).sum() for _ in range(40)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(torch.Tensor.backward, losses))
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm1d)]
    assert [(norm.momentum, int(norm.num_batches_tracked)) for norm in norms] == [(0.1, 40)] * 3
