"""A plan changes nothing: loss, gradients, buffers and RNG state are bitwise those of the plain model."""

import copy
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from bits import different, train_step
from samples import sample
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from memsave_recipes.core.activations import apply_plan, block_names, find_stacks, plan_blocks
from memsave_recipes.core.errors import InputError


@dataclass
class Case:
    """As in tests/conftest.py."""

    model: nn.Module
    batch: torch.Tensor
    loss_of: Any


LARGE_STRATEGIES = ["full", "every:2", "every:3", "segments:1", "segments:2", "segments:5", "segments:8", "nested:6"]
SMALL_MODELS = ["vgg_small", "densenet_small", "vit", "gpt2"]
LARGE_MODELS = ["densenet121", "resnet50", "vgg16", "vgg16_bn", "gpt2_124m"]


def planned_step(case, strategy, *, bf16=False):
    with apply_plan(case.model, plan_blocks(case.model, strategy)):
        return train_step(case, bf16=bf16)


def all_strategies(case):
    num_blocks = sum(len(names) for names in block_names(find_stacks(case.model)))
    return ["full", *(f"{name}:{k}" for name in ("every", "segments", "nested") for k in range(1, num_blocks + 1))]


FAST = [("vgg_small", "float32"), ("vit", "bf16"), ("gpt2", "float32")]


@pytest.mark.parametrize(("name", "precision"), sample(FAST, product(SMALL_MODELS, ("float32", "bf16"))))
def test_every_strategy_with_every_k(make_case, name, precision):
    bf16 = precision == "bf16"
    expected = train_step(make_case(name), bf16=bf16)
    for strategy in all_strategies(make_case(name)):
        assert not different(planned_step(make_case(name), strategy, bf16=bf16), expected)


@pytest.mark.parametrize("bf16", sample([False], [False, True]), ids=["float32", "bf16"])
@pytest.mark.parametrize("name", sample(LARGE_MODELS[:1], LARGE_MODELS))
def test_models_of_full_size(make_case, name, bf16):
    case = make_case(name)
    original = copy.deepcopy(case.model.state_dict())
    expected = train_step(case, bf16=bf16)
    for strategy in LARGE_STRATEGIES:
        case.model.load_state_dict(original)  # the statistics of BatchNorm, back to where they were
        case.model.zero_grad(set_to_none=True)
        assert not different(planned_step(case, strategy, bf16=bf16), expected)


@pytest.mark.parametrize("name", ["densenet_small", "densenet121"])
def test_the_bottleneck_checkpoint_of_densenet(make_case, name):
    expected = train_step(make_case(name))
    assert not different(planned_step(make_case(name), "bottleneck"), expected)


def test_dropout_is_really_on(make_case):
    case = make_case("vit")
    first = train_step(case)["losses"]
    torch.manual_seed(8)
    assert case.loss_of(case.model, case.batch) != first


def test_batch_statistics_would_be_counted_twice_without_care(make_case):
    """The negative control: torch's checkpoint alone moves the statistics of BatchNorm twice."""
    case = make_case("vgg_small")
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    torch.utils.checkpoint.checkpoint(model, case.batch, use_reentrant=False).sum().backward()
    assert model[1].num_batches_tracked == 2


@pytest.mark.parametrize("strategy", ["full", "segments:2", "selective", "bottleneck"])
def test_synchronised_batch_statistics_are_counted_once(make_case, strategy):
    """Outside a process group SyncBatchNorm runs on a CPU too."""

    def synchronised():
        case = make_case("densenet_small")
        return Case(nn.SyncBatchNorm.convert_sync_batchnorm(case.model), case.batch, case.loss_of)

    expected = train_step(synchronised())
    assert not different(planned_step(synchronised(), strategy), expected)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_remove_restores_the_model_exactly(make_case, name):
    case = make_case(name)
    before = {module: dict(module.__dict__) for module in case.model.modules()}
    keys = list(case.model.state_dict())
    handle = apply_plan(case.model, plan_blocks(case.model, "segments:3"))
    assert list(case.model.state_dict()) == keys
    assert any(dict(module.__dict__) != attributes for module, attributes in before.items())
    handle.remove()
    handle.remove()
    assert {module: dict(module.__dict__) for module in case.model.modules()} == before


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_second_plan_is_refused(make_case, name):
    model = make_case(name).model
    before = {module: dict(module.__dict__) for module in model.modules()}
    plan = plan_blocks(model, "full")
    with apply_plan(model, plan), pytest.raises(InputError, match=r"^model: a plan is applied to .* already: call"):
        apply_plan(model, plan)
    assert {module: dict(module.__dict__) for module in model.modules()} == before


@pytest.mark.parametrize("name", ["vgg_small", "densenet_small", "gpt2"])
def test_a_deep_copy_runs_its_own_modules(make_case, name):
    case = make_case(name)
    apply_plan(case.model, plan_blocks(case.model, "segments:2"))
    clone = copy.deepcopy(case.model)
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.zero_()
    case.loss_of(clone, case.batch).backward()
    assert all(parameter.grad is None for parameter in case.model.parameters())
    assert all(parameter.grad is not None for parameter in clone.parameters())


def test_evaluation_and_generation_ignore_the_plan(make_case):
    case = make_case("gpt2")
    case.model.eval()
    case.model.generation_config.pad_token_id = 0
    expected = case.model.generate(case.batch, max_new_tokens=5, do_sample=False)
    apply_plan(case.model, plan_blocks(case.model, "segments:2"))
    assert torch.equal(case.model.generate(case.batch, max_new_tokens=5, do_sample=False), expected)


def test_a_span_may_begin_in_place():
    """VGG16 with 5 or 8 equal segments of modules begins two of them with an in-place ReLU."""
    model = torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True))
    inputs = torch.randn(2, 4)

    def gradient():
        model.zero_grad()
        model(inputs.clone()).sum().backward()
        return model[1].weight.grad.clone()

    expected = gradient()
    with apply_plan(model, plan_blocks(model, "full")):
        assert torch.equal(gradient(), expected)
    assert model[0].inplace


def test_blocks_of_a_model_that_loops_over_its_sequentials(make_case):
    """As the ResNets of transformers do: a forward put in place of the Sequential's would never be called."""
    stacks = block_names(find_stacks(make_case("resnet50").model))
    assert stacks[0] == ["resnet.embedder"]
    assert [len(names) for names in stacks[1:]] == [3, 4, 6, 3, 2]
    assert stacks[1][0] == "resnet.encoder.stages.0.layers.0"


class LoopedLayers(nn.Module):
    """As people write transformers of their own: a list of layers in a dictionary of modules, and a loop over it."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear, self.dropout = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.3)

        def forward(self, x):
            return x + self.dropout(self.linear(self.norm(x)).tanh())

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict({"embed": nn.Linear(4, 8), "h": nn.ModuleList(self.Layer() for _ in range(3))})
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])  # no layers: nothing inside to recompute

    def forward(self, x):
        x = self.body.embed(x)
        for layer in self.body.h:
            x = layer(x)
        return sum(head(x).sum() for head in self.heads)


def test_layers_of_ones_own_in_a_list():
    torch.manual_seed(0)
    case = Case(LoopedLayers(), torch.randn(5, 4), lambda model, batch: model(batch))
    assert block_names(find_stacks(case.model)) == [["body.h.0"], ["body.h.1"], ["body.h.2"]]
    expected = train_step(case)
    for strategy in ("full", "every:2", "segments:3", "selective"):
        case.model.zero_grad(set_to_none=True)
        assert not different(planned_step(case, strategy), expected)
    recomputed = FlopCounterMode(display=False)
    with recomputed, apply_plan(case.model, plan_blocks(case.model, "full")):
        case.loss_of(case.model, case.batch).backward()
    assert recomputed.get_total_flops() > _flops(case)


class LoopedElsewhere(LoopedLayers):
    """As timm's models: the loop stands in another method, and a stem beside the layers is called by itself."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.body["h"] = nn.ModuleList(nn.ModuleList(self.Layer() for _ in range(depth)) for depth in (2, 1))

    def forward(self, x):
        return self.head_of(self.features_of(x))

    def features_of(self, x):
        x = self.body.embed(self.stem(x))
        for stage in self.body.h:
            for layer in stage:
                x = layer(x)
        return x

    def head_of(self, x):
        return sum(head(x).sum() for head in self.heads)


def test_layers_in_lists_of_lists_that_another_method_loops_over():
    torch.manual_seed(0)
    case = Case(LoopedElsewhere(), torch.randn(5, 4), lambda model, batch: model(batch))
    names = [name for names in block_names(find_stacks(case.model)) for name in names]
    assert names == ["body.h.0.0", "body.h.0.1", "body.h.1.0", "stem.0", "stem.1"]
    expected = train_step(case)
    case.model.zero_grad(set_to_none=True)
    with apply_plan(case.model, plan_blocks(case.model, "full")) as handle:
        assert not different(train_step(case), expected)
    assert handle.runs.again == set(names)


def _flops(case):
    with FlopCounterMode(display=False) as counter:
        case.loss_of(case.model, case.batch).backward()
    return counter.get_total_flops()
