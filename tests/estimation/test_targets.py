"""Targets: words for devices that need not be here, with the figures of their vendors."""

from types import SimpleNamespace

import pytest
import torch

from memsave_recipes.errors import InputError
from memsave_recipes.estimation.targets import SHEETS, find_target, known_targets
from memsave_recipes.text import GIB


@pytest.mark.parametrize("word", SHEETS)
def test_every_sheet_is_of_a_device_whose_flops_are_known(word):
    target = find_target(word)
    assert target.device == torch.device("cuda")
    assert {"float32", "float16"} <= target.flops_per_s.keys()
    assert target.flops_per_s["float16"] >= target.flops_per_s["float32"] > target.bytes_per_s > target.host_bytes_per_s


def test_an_unknown_word_is_refused_with_those_that_are_known():
    with pytest.raises(InputError, match="target tpu") as refusal:
        find_target("tpu")
    assert all(word in str(refusal.value) for word in known_targets())


def test_short_words_in_any_case():
    assert find_target("A100").name == find_target("a100-80gb").name == "NVIDIA A100-SXM4-80GB"


def test_cuda_without_a_device_is_a_named_one_and_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    target = find_target("cuda")
    assert target.name == "NVIDIA A100-SXM4-80GB"
    assert "no CUDA device is here" in target.remark


def put_device(monkeypatch, name, memory_gib):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    properties = SimpleNamespace(total_memory=int(memory_gib * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)


def test_cuda_is_the_device_that_is_here_with_its_own_memory(monkeypatch):
    put_device(monkeypatch, "NVIDIA A100-SXM4-40GB", 39.4)
    target = find_target("cuda")
    assert (target.word, target.memory_bytes) == ("a100-40gb", int(39.4 * GIB))
    assert target.bytes_per_s == 1555e9


def test_a_device_without_figures_is_refused(monkeypatch):
    put_device(monkeypatch, "NVIDIA GeForce GTX 1080", 8)
    with pytest.raises(InputError, match="no figures of the NVIDIA GeForce GTX 1080 that is here"):
        find_target("cuda")


def test_the_cpu_is_measured():
    target = find_target("cpu")
    assert target.device == torch.device("cpu")
    assert target.flops_per_s["float32"] > 1e8
    assert target.bytes_per_s > 1e8


def test_rates_by_precision():
    rates, mm, convolution = find_target("a100").rates, torch.ops.aten.mm, torch.ops.aten.convolution
    assert rates.seconds(mm, torch.bfloat16, 312e12, 0) == 1
    assert rates.seconds(mm, torch.float32, 19.5e12, 0) == 1
    assert rates.seconds(convolution, torch.float32, 156e12, 0) == 1  # cuDNN rounds the factors to TF32
    assert rates.seconds(mm, torch.bfloat16, 0, int(2039e9)) == 1
    assert rates.seconds(mm, torch.bfloat16, 1, 1) == find_target("a100").kernel_s
    without_bfloat16 = find_target("t4").rates
    assert without_bfloat16.seconds(mm, torch.bfloat16, 8.1e12, 0) == 1
