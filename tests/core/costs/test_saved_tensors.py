import gc
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.costs.memory import SavedTensors
from memsave_recipes.run.memory_watch import ForwardMeter

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


def test_only_the_first_forward_counts():
    model = chain([4, 8])
    with ForwardMeter(model) as meter:
        model(torch.randn(3, 4)).sum().backward()
        model(torch.randn(30, 4)).sum().backward()
    assert meter.num_bytes == 3 * 4 * 4 + 3 * 8 * 4
    assert not model._forward_hooks


def test_a_forward_that_fails_is_known_as_far_as_it_came():
    model = chain([4, 8, 8, 8])

    def fail(*_):
        raise torch.OutOfMemoryError("no memory")

    model[2].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError), ForwardMeter(model) as meter:
        model(torch.randn(3, 4))
    assert meter.num_bytes == 3 * 4 * 4 + 2 * 3 * 8 * 4
    with SavedTensors(model) as saved:  # its hooks are gone
        model[0](torch.randn(3, 4))
    assert saved.num_bytes


@pytest.mark.parametrize("name", ["vgg_small", "densenet_small", "vit", "gpt2"])
def test_an_applied_plan_knows_its_blocks(make_case, name):
    model = make_case(name).model
    plan = plan_blocks(model, "full")
    with apply_plan(model, plan) as handle:
        assert tuple(block.name for block in handle.blocks) == plan.blocks
