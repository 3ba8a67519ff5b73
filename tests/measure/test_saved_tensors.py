import gc
import weakref

import torch
from torch import nn

from memsave_recipes.measure.saved_tensors import SavedTensors


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
