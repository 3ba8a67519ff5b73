import gc
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.costs.breakdown import break_down_peak
from memsave_recipes.core.costs.memory import ForwardMeter, SavedTensors

CPU = torch.device("cpu")


def test_by_hand():
    """A linear layer saves its input, a ReLU its output, which is the next layer's input and counts once."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with SavedTensors(model) as saved:
        loss = model(torch.randn(3, 4)).sum()
    assert saved.num_bytes == 3 * 4 * 4 + 3 * 8 * 4
    loss.backward()
    assert model[0].weight.grad is not None


def test_parameters_do_not_count():
    model = nn.Linear(4, 4)
    with SavedTensors(model) as saved:
        (model.weight * model.weight).sum()
    assert saved.num_bytes == 0


def test_a_forward_without_a_backward_leaves_nothing_behind():
    """A ReLU saves its own output; handed back as it is, it would hold its graph, and the parameters, for ever."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    weight = weakref.ref(model[0].weight)
    with SavedTensors(model):
        model(torch.randn(3, 4))
    del model
    gc.collect()
    assert weight() is None


def chain(widths):
    """Linear layers and ReLUs. A ReLU saves its output, which is what the next layer saves, and enters the next one."""
    pairs = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
    return nn.Sequential(*(nn.Sequential(*pair) for pair in pairs))


def blocks_of(model):
    with apply_plan(model, plan_blocks(model, "none")) as handle:
        return handle.blocks


def test_only_the_first_forward_counts():
    model = chain([4, 8])
    with ForwardMeter(model) as meter:
        model(torch.randn(3, 4)).sum().backward()
        model(torch.randn(30, 4)).sum().backward()
    assert meter.num_bytes == 3 * 4 * 4 + 3 * 8 * 4
    assert meter.freed_by_recomputation_bytes is None
    assert not model._forward_hooks


def test_recomputation_frees_what_the_blocks_save_but_their_inputs_and_one_of_them():
    model = chain([4, 8, 8, 2])
    with ForwardMeter(model, blocks_of(model)) as meter:
        model(torch.randn(3, 4)).sum().backward()
    image, wide, narrow = 3 * 4 * 4, 3 * 8 * 4, 3 * 2 * 4
    assert meter.num_bytes == image + 2 * wide + narrow
    assert meter.freed_by_recomputation_bytes == 0  # but for one ReLU's output, which comes back, all enters a block

    inner = [nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(3)]
    model = nn.Sequential(*inner)
    with ForwardMeter(model, blocks_of(model)) as meter:
        model(torch.randn(3, 8)).sum().backward()
    assert meter.freed_by_recomputation_bytes == 2 * 3 * 64 * 4


def test_a_forward_that_fails_is_known_as_far_as_it_came():
    model = chain([4, 8, 8, 8])

    def fail(*_):
        raise torch.OutOfMemoryError("no memory")

    model[2].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError), ForwardMeter(model, blocks_of(model)) as meter:
        model(torch.randn(3, 4))
    assert meter.num_bytes == 3 * 4 * 4 + 2 * 3 * 8 * 4
    assert meter.freed_by_recomputation_bytes is None  # it frees nothing so far, which may change
    with SavedTensors(model) as saved:  # its hooks are gone
        model[0](torch.randn(3, 4))
    assert saved.num_bytes


@pytest.mark.parametrize("name", ["vgg_small", "densenet_small", "vit", "gpt2"])
def test_an_applied_plan_knows_its_blocks(make_case, name):
    model = make_case(name).model
    plan = plan_blocks(model, "full")
    with apply_plan(model, plan) as handle:
        assert tuple(block.name for block in handle.blocks) == plan.blocks


@pytest.mark.parametrize("name", ["densenet_small", "vit", "gpt2"])
def test_the_prediction_is_what_full_recomputation_frees(make_case, name):
    """A forecast for the activations alone: where they dominate, the peak falls by as much, to a quarter."""
    peaks = {}
    for strategy in ("none", "full"):
        case = make_case(name)
        case.batch = case.batch.repeat(16, *[1] * (case.batch.ndim - 1)) if name == "gpt2" else case.batch
        case.batch = case.batch.repeat(1, 1, 2, 2) if name == "densenet_small" else case.batch
        plan = plan_blocks(case.model, strategy)
        optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)

        def loss(case=case):
            return case.loss_of(case.model, case.batch)

        if strategy == "none":
            with ForwardMeter(case.model, blocks_of(case.model)) as meter:
                loss().backward()
            optimizer.zero_grad()
        with apply_plan(case.model, plan), break_down_peak(case.model, optimizer, CPU) as peak:
            loss().backward()
        peaks[strategy] = peak.breakdown
    freed = peaks["none"].activations_bytes - peaks["full"].activations_bytes
    assert meter.freed_by_recomputation_bytes == pytest.approx(freed, rel=0.25)
