"""DDP's buckets are the same in every step of every life, so three ranks sum in the same order after a resume."""

import torch
from torch import nn

WIDTH = 48


class Crossed(nn.Module):
    """Its layers are called in another order than registered, so DDP's first buckets are not its later ones."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x):
        for index in (2, 0, 4, 1, 3):
            x = torch.tanh(self.layers[index](x))
        return x


def gradients_of_the_second_step(accelerator):
    """Of a model that has done one step before, and of one that begins with it."""
    torch.manual_seed(0)
    steps = torch.randn(2, accelerator.num_processes, 7, WIDTH)[:, accelerator.process_index]
    first = Crossed()
    states = first.state_dict()
    lives = [accelerator.prepare(first)]
    lives[0](steps[0]).sum().backward()
    lives[0].zero_grad()
    second = Crossed()
    second.load_state_dict(states)
    lives.append(accelerator.prepare(second))
    for model in lives:
        assert all(parameter.grad is None for parameter in model.parameters())
        model(steps[1]).square().sum().backward()
    return [[parameter.grad.tolist() for parameter in model.parameters()] for model in lives]


def test_a_life_begins_with_the_buckets_that_another_has(run_on_ranks):
    for one, other in run_on_ranks(gradients_of_the_second_step, 3):
        assert one == other
