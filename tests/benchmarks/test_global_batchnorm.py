"""The ways that the benchmark compares: three of them are one step, and local statistics are another one."""

import torch
from torch import nn


def test_ways_with_the_same_curve_have_the_same_gradient(load):
    benchmark = load("global_batchnorm")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Flatten(), nn.Linear(144, 5)
    ).double()
    images = torch.randn(6, 3, 8, 8).double()
    found = {}

    for way, step in benchmark.ways_of(model, images, 2):
        trained = step.args[0]
        total = torch.zeros_like(trained[0].weight)
        handle = trained[0].weight.register_hook(lambda gradient, total=total: total.add_(gradient))
        step()
        handle.remove()
        found[way] = total
        assert trained[0].weight.grad is None
    whole = found.pop("one forward")
    assert {way: torch.allclose(whole, one, rtol=1e-9) for way, one in found.items()} == {
        "accumulation": False,
        "recompute": True,
        "in micro-batches": True,
    }
