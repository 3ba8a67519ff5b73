"""Kernels that can be repeated."""

import os

import pytest
import torch

from memsave_recipes.training.launch.start import (
    describe_float32,
    deterministic_kernels,
    matmul_precision,
    use_expandable_segments,
)

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}


def state():
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize("before", [(False, False), (True, False)])
def test_deterministic_kernels_are_taken_for_a_run_alone(monkeypatch, before):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        with deterministic_kernels(True):
            assert state() == (True, True)
            assert {name: os.environ[name] for name in VARIABLES} == VARIABLES
        assert state() == before
        with deterministic_kernels(False):
            assert state() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_users_own_workspace_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic_kernels(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_proof_finds_the_workspace_that_it_needs(monkeypatch):
    """cuBLAS reads the variable once, and may have done so when the proof begins."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = state()
    with deterministic_kernels(False, later=True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert state() == before


@pytest.mark.parametrize(("wanted", "within"), [(None, "highest"), ("high", "high"), ("medium", "medium")])
def test_the_precision_of_products_is_that_of_a_run_alone(wanted, within):
    with matmul_precision(wanted):
        assert torch.get_float32_matmul_precision() == within
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("capability", "dtype", "mixed_precision", "precision", "is_told"),
    [
        ((8, 0), torch.float32, "no", None, True),
        ((7, 5), torch.float32, "no", None, False),  # which has no TF32
        ((9, 0), torch.bfloat16, "no", None, False),
        ((9, 0), torch.float32, "bf16", None, False),
        ((9, 0), torch.float32, "no", "high", False),
    ],
)
def test_float32_without_tf32_is_told(monkeypatch, capability, dtype, mixed_precision, precision, is_told):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with matmul_precision(precision):
        line = describe_float32(torch.device("cuda"), {dtype}, mixed_precision)
    assert (line is not None and "--matmul_precision high" in line) == is_told


def test_on_a_cpu_there_is_nothing_to_tell():
    assert describe_float32(torch.device("cpu"), {torch.float32}, "no") is None


@pytest.mark.parametrize(
    ("cuda", "own", "expected"),
    [
        ("13.0", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("13.0", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
        ("13.0", {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}),
        (None, {}, {}),
    ],
    ids=["CUDA", "the user's", "the user's, by its old name", "no CUDA"],
)
def test_segments_grow_on_cuda_unless_the_user_has_set_the_allocator_up(monkeypatch, cuda, own, expected):
    environment = dict(own)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    use_expandable_segments()
    assert environment == expected
