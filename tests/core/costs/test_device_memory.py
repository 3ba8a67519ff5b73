"""Device memory is what torch says; the diary of CUDA's allocator begins and ends where it is told."""

import os
import weakref
from types import SimpleNamespace

import psutil
import pynvml
import pytest
import torch

from memsave_recipes.core.costs.memory import empty_cache, read_device_use
from memsave_recipes.run.memory_watch import read_device_memory

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_figures_of_an_accelerator(monkeypatch):
    statistics = {"allocated_bytes.all.peak": 5, "reserved_bytes.all.peak": 8, "num_alloc_retries": 2, "num_ooms": 1}
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: statistics)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (30, 40))
    assert read_device_memory(torch.device("cuda", 0)) == {
        "peak_allocated_bytes": 5,
        "peak_reserved_bytes": 8,
        "device_used_bytes": 10,
        "num_alloc_retries": 2,
        "num_ooms": 1,
    }


def test_what_reference_cycles_hold_is_freed():
    tensor = torch.ones(1)
    gone, cycle = weakref.ref(tensor), [tensor]
    cycle.append(cycle)
    del tensor, cycle
    empty_cache(torch.device("cpu"))
    assert gone() is None


@needs_cuda
def test_on_cuda_the_peaks_are_torchs():
    device = torch.device("cuda", 0)
    torch.accelerator.reset_peak_memory_stats(device)
    torch.empty(10_000_000, device=device)
    found = read_device_memory(device)
    assert found["peak_allocated_bytes"] == torch.cuda.max_memory_allocated(device)
    assert found["peak_reserved_bytes"] == torch.cuda.max_memory_reserved(device)
    assert found["peak_allocated_bytes"] >= 40_000_000
    torch.accelerator.reset_peak_memory_stats(device)
    assert read_device_memory(device)["peak_allocated_bytes"] == torch.cuda.memory_allocated(device)


@pytest.mark.parametrize(
    ("processes", "outside"),
    [
        ({os.getpid(): 12, 1: 15}, (7, 18)),
        ({os.getpid(): 32, 1: 0}, (25, 0)),  # more than the driver says is in use, as read a moment later
        ({1: 15}, (25, 0)),  # of a container
        ({os.getpid(): None}, (25, 0)),  # a driver that does not tell
    ],
)
def test_memory_of_other_processes_is_told_from_ones_own(monkeypatch, processes, outside):
    def running(handle):
        assert handle == "GPU-of-this-test"
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes.items()]

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda name: name)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", running)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="of-this-test"))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (10, 40))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 5)
    assert use_of_first_device() == (40, *outside)


def test_without_nvml_all_is_ones_own(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (10, 40))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert use_of_first_device() == (40, 25, 0)


def use_of_first_device():
    return tuple(vars(read_device_use(torch.device("cuda", 0))).values())


def test_of_a_cpu_nobody_holds_anything():
    use = read_device_use(torch.device("cpu"))
    assert (use.outside_torch_bytes, use.others_bytes) == (0, 0)
    assert use.total_bytes == psutil.virtual_memory().total


@needs_cuda
@pytest.mark.skipif("STANDIN" in os.environ, reason="the stand-in has no NVML")
def test_on_cuda_the_context_is_not_the_other_processes():
    total, context, others = use_of_first_device()
    assert 0 < context < 2**30
    assert 0 <= others < total
