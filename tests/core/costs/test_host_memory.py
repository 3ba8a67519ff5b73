"""The peak of a step on the host is exact: by hand, and against the bytes that live on."""

import subprocess
import sys

import torch
from torch import nn
from workloads import peak_bytes

from memsave_recipes.core.costs.breakdown import storages_of
from memsave_recipes.core.costs.memory import resident_bytes

MEGA = 1_000_000


def test_the_peak_by_hand():
    kept = []

    def step():
        first = torch.empty(MEGA, dtype=torch.uint8)
        second = torch.empty(2 * MEGA, dtype=torch.uint8)
        del first
        kept.append(torch.empty(3 * MEGA, dtype=torch.uint8))
        del second
        kept.append(torch.empty(MEGA, dtype=torch.uint8))

    assert peak_bytes(step) == 5 * MEGA
    assert peak_bytes(lambda: None) == 0


def test_what_was_there_before_does_not_count():
    held = [torch.empty(5 * MEGA, dtype=torch.uint8)]
    assert peak_bytes(lambda: held[0].fill_(1)) == 0
    assert peak_bytes(held.clear) == 0


def test_resident_bytes_are_parameters_buffers_gradients_and_state():
    model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parameters, buffers = (100 + 10 + 10 + 10) * 4, (10 + 10) * 4 + 8
    assert resident_bytes(model, optimizer) == parameters + buffers
    model(torch.randn(4, 10)).sum().backward()
    assert resident_bytes(model, optimizer) == 2 * parameters + buffers
    optimizer.step()
    assert resident_bytes(model, optimizer) == 3 * parameters + buffers


def test_a_shared_storage_counts_once():
    tensor = torch.zeros(10)
    assert sum(storages_of([tensor, tensor[2:], tensor.view(2, 5)]).values()) == 40


GROWING = """
import torch
from memsave_recipes.run.memory_watch import peak_rss_bytes, rss_bytes
before = rss_bytes()
block = torch.ones(300_000_000, dtype=torch.uint8)
during = rss_bytes()
del block
print(before, during, rss_bytes(), peak_rss_bytes())
"""


def test_the_resident_set_grows_and_its_peak_stays():
    """In a process of its own: this one has freed memory lying about that would be used again."""
    done = subprocess.run([sys.executable, "-c", GROWING], capture_output=True, text=True, check=True)
    before, during, after, peak = map(int, done.stdout.split())
    assert during > before + 290 * MEGA
    assert after < during - 290 * MEGA
    assert peak > before + 290 * MEGA
