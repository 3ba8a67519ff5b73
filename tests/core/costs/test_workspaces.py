"""Workspaces: what the kernels of this CPU allocate, from runs of single operators."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from memsave_recipes.core.costs import fake_step
from memsave_recipes.core.costs.fake_step import Workspaces
from memsave_recipes.core.costs.trace_events import DeviceInstruments

aten = torch.ops.aten


@pytest.fixture
def fake():
    with FakeTensorMode():
        yield


def test_a_kernel_allocates_its_result_and_what_it_needs_besides(fake):
    left, right = torch.empty(64, 32), torch.empty(64, 1, dtype=torch.bfloat16)
    run = Workspaces().of(aten.add.Tensor, (left, right), {})
    assert run.peak_bytes >= left.nbytes
    assert [(result.shape, result.dtype, result.device.type) for result in run.results] == [
        (left.shape, torch.float32, "meta")
    ]


def test_what_writes_in_place_allocates_nothing(fake):
    assert Workspaces().of(aten.relu_.default, (torch.empty(64, 32),), {}).peak_bytes == 0


def test_each_shape_runs_once(fake, monkeypatch):
    runs, read = [], DeviceInstruments.read_memory
    monkeypatch.setattr(DeviceInstruments, "read_memory", lambda *step: runs.append(step) or read(*step))
    known = Workspaces()
    for shape in ((4, 4), (4, 4), (8, 4)):
        known.of(aten.relu.default, (torch.empty(shape),), {})
    assert len(runs) == 2


def test_what_is_large_is_not_run(fake):
    too_many = fake_step.LARGEST_BYTES // 4 + 1
    assert Workspaces().of(aten.relu.default, (torch.empty(too_many),), {}) is None


def test_random_numbers_stay_as_they_were():
    before = torch.random.get_rng_state()
    with FakeTensorMode():
        Workspaces().of(aten.bernoulli_.float, (torch.empty(16), 0.5), {})
    assert torch.equal(before, torch.random.get_rng_state())
