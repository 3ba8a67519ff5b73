"""The average of the weights is torch's, a model has it for as long as it is applied, and a resumed one is the same."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from memsave_recipes.training.weight_average import WeightAverage

DECAY = 0.9


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 16, 5))
    model[0].bias.requires_grad_(False)
    return model


def train(model, *averages, steps=5, seed=1):
    torch.manual_seed(seed)
    optimizer = SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 6, 6)).square().mean().backward()
        optimizer.step()
        for average in averages:
            average()


def same(one, other):
    return all(torch.equal(one[name], tensor) for name, tensor in other.items())


def test_it_is_that_of_torch():
    model = build()
    ours = WeightAverage(model, DECAY)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    train(model, ours.update, lambda: theirs.update_parameters(model))
    assert len(ours.tensors) == 7  # without the frozen bias and the count of BatchNorm
    assert same(theirs.module.state_dict(), ours.tensors)
    assert not same(model.state_dict(), ours.tensors)


def test_a_number_by_hand():
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    average = WeightAverage(model, 0.75)
    for weight in (1.0, 2.0, 6.0):
        nn.init.constant_(model.weight, weight)
        average.update()
    assert average.tensors["weight"].item() == 0.75 * (0.75 * 1 + 0.25 * 2) + 0.25 * 6


def test_a_model_has_it_while_it_is_applied_and_its_weights_again_afterwards():
    model = build()
    average = WeightAverage(model, DECAY)
    train(model, average.update)
    weights, averages = deepcopy(model.state_dict()), deepcopy(average.tensors)
    with average.applied():
        assert same(model.state_dict(), averages)
    assert same(model.state_dict(), weights)
    with average.applied():
        average.take_off()
        assert same(model.state_dict(), weights)
    assert same(model.state_dict(), weights)
    assert same(average.tensors, averages)
    average.apply()
    average.apply()
    assert same(model.state_dict(), averages)


def test_it_goes_on_where_it_was():
    model = build()
    average = WeightAverage(model, DECAY)
    train(model, average.update, steps=3)
    saved, weights = deepcopy(average.state_dict()), deepcopy(model.state_dict())
    train(model, average.update, steps=2, seed=2)
    other = build()
    other.load_state_dict(weights)
    resumed = WeightAverage(other, DECAY)
    resumed.load_state_dict(saved)
    train(other, resumed.update, steps=2, seed=2)
    assert same(average.tensors, resumed.tensors)


def test_that_of_another_model_is_refused():
    with pytest.raises(ValueError, match="of other weights"):
        WeightAverage(nn.Linear(2, 2), DECAY).load_state_dict(WeightAverage(build(), DECAY).state_dict())
