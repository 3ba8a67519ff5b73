"""docs/platforms.md on Apple's GPUs: what shows on Linux, with a stand-in for them."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bits import different
from lives import rows_of
from safetensors.torch import load_file
from torch import nn
from workloads import workload_of

from memsave_recipes.core.activations.compiled import check_compiler
from memsave_recipes.core.activations.offload import SideStream
from memsave_recipes.core.activations.streaming import place
from memsave_recipes.core.costs.breakdown import break_down_peak
from memsave_recipes.core.costs.trace_events import DeviceInstruments
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.budget import FRAGMENTATION, plans_to_measure
from memsave_recipes.core.plans.chain import CUDA
from memsave_recipes.core.plans.plan import offloads
from memsave_recipes.run.run_plan import budget_of
from memsave_recipes.training.launch.start import synchronize_batchnorm

ROOT = Path(__file__).parents[1]
MPS = torch.device("mps")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_recipes_need_no_float64_on_the_device(on_devices, tmp_path):
    """A run in two lives without it is, bit for bit, that of a device that has it."""
    script, runs = ROOT / "tests" / "recipes" / "without_float64.py", {}
    for has_it in (0, 1):
        environment = on_devices(FLOAT64=has_it, POISON=1)
        folder = tmp_path / str(has_it)
        runs[folder] = subprocess.Popen(
            [sys.executable, script, folder],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    printed = {folder.name: process.communicate()[0] for folder, process in runs.items()}
    assert [process.returncode for process in runs.values()] == [0, 0], printed
    assert printed["0"].count("going on after 2 steps") == 3
    for recipe in ("image_classification", "language_modeling", "text_classification"):
        one, other = (folder / recipe for folder in runs)
        for key in ("train/loss", "eval/loss"):
            losses, others = ([row[key] for row in rows_of(run) if key in row] for run in (one, other))
            assert losses == others
        assert not different(*(load_file(run / "final" / "model.safetensors") for run in (one, other)))


@pytest.mark.slow
def test_the_stand_in_refuses_float64_as_apples_gpus_do(on_devices):
    code = "import torch; torch.ones(1, device='cuda').double()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=on_devices(FLOAT64=0), capture_output=True, text=True, check=False
    )
    assert "TypeError: Cannot convert a MPS Tensor to float64 dtype" in done.stderr


def test_what_is_refused_on_an_apple_gpu():
    with pytest.raises(InputError, match="dtype float64 does not work on an Apple GPU"):
        place(nn.Linear(1, 1).double(), MPS)
    with pytest.raises(InputError, match="leave out offload_optimizer, stream_weights"):
        SideStream(MPS)
    with pytest.raises(InputError, match="--batchnorm sync"):
        synchronize_batchnorm(nn.BatchNorm2d(1), MPS)
    on_mps = SimpleNamespace(parameters=lambda: [SimpleNamespace(device=MPS)])
    with pytest.raises(InputError, match="strategy compiled is not for an Apple GPU"):
        check_compiler(on_mps)


def test_no_plan_offloads_on_an_apple_gpu():
    model, values = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)

    def moves(device):
        workload = workload_of(model, lambda model, x: model(x), values, device=device)
        return any(offloads(plan.strategy) for plan in plans_to_measure("budget", workload))

    assert (moves(MPS), moves(CUDA)) == (False, True)


def test_the_budget_of_an_apple_gpu_is_what_metal_recommends(monkeypatch):
    recommended, used = 12 * 2**30, 2**30
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (recommended - used, recommended))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: used)
    assert budget_of(SimpleNamespace(budget_bytes=None), MPS) == int((1 - FRAGMENTATION) * recommended)


def test_an_apple_gpu_has_no_breakdown():
    model = nn.Linear(1, 1)
    with break_down_peak(model, torch.optim.SGD(model.parameters()), MPS) as peak:
        model(torch.ones(1, 1)).sum().backward()
    assert peak.breakdown is None


def test_seconds_of_an_apple_gpu_are_the_hosts_after_a_wait(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    assert len(DeviceInstruments(MPS).read_clock(lambda meter: [meter.mark() for _ in range(3)])) == 2
    assert waited == [MPS] * 3
