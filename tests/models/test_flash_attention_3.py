"""FlashAttention-3 in the place of torch's flash attention: on which GPUs, for which models, and in what memory."""

import importlib.machinery
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import pytest
import torch
from packed_rows import by_document, causal_model, flash_3_by_definition, gradients, on_cuda
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from memsave_recipes.core.costs.estimate import cuda_workspace
from memsave_recipes.models.language_model import take_flash_attention_3

PACKAGE = "flash_attn_interface"
aten = torch.ops.aten
is_hopper = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not is_hopper, reason="needs a GPU of the Hopper family")


@pytest.fixture
def package(monkeypatch):
    """The package, its kernels as they are defined; their calls. torch's own are back afterwards."""
    calls, module = Counter(), ModuleType(PACKAGE)
    module.__spec__ = importlib.machinery.ModuleSpec(PACKAGE, None)
    monkeypatch.setitem(sys.modules, PACKAGE, module)
    for name, kernel in zip(("fwd", "bwd"), flash_3_by_definition(calls), strict=True):
        monkeypatch.setattr(torch.ops.flash_attn_3, name, kernel, raising=False)
    yield calls
    restore_flash_attention_impl(_raise_warn=False)


def on_a(capability, monkeypatch, model=None):
    """The model, as if it were on a GPU of this capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    there = SimpleNamespace(device=torch.device("cuda"))
    return SimpleNamespace(config=(model or causal_model("llama")).config, parameters=lambda: iter([there]))


def test_it_is_taken_on_hopper_alone(package, monkeypatch):
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert take_flash_attention_3(on_a(capability, monkeypatch)) is None
    assert take_flash_attention_3(causal_model("llama")) is None  # on the CPU
    assert current_flash_attention_impl() is None
    line = take_flash_attention_3(on_a((9, 0), monkeypatch))
    assert line == "flash attention: FlashAttention-3; --fused_ops none leaves torch's own"
    assert current_flash_attention_impl() == "FA3"


def test_a_model_with_dropout_keeps_torchs(package, monkeypatch):
    model = causal_model("gpt2", dropout=0.1)
    assert take_flash_attention_3(on_a((9, 0), monkeypatch, model)) is None
    assert current_flash_attention_impl() is None


def test_so_does_a_machine_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    assert take_flash_attention_3(on_a((9, 0), monkeypatch)) is None


@pytest.mark.parametrize(("heads", "heads_of_keys", "size", "padded"), [(4, 4, 64, 64), (4, 1, 72, 96)])
def test_the_workspace_of_its_backward_is_known(heads, heads_of_keys, size, padded, package, monkeypatch):
    """As hopper/flash_api.cpp allocates it: sums of the query's gradients, two numbers a row, and sums of shared heads.

    ``rows`` are those of all documents and, for each of them, a block.
    """
    query, key = (torch.empty(64, count, size, dtype=torch.bfloat16) for count in (heads, heads_of_keys))
    bounds = torch.empty(6, dtype=torch.int32)
    args = (query, query, key, key, query, torch.empty(heads, 64), bounds, bounds)
    take_flash_attention_3(on_a((9, 0), monkeypatch))
    rows = 64 + 5 * 128
    of_shared = 2 * 4 * rows * heads_of_keys * padded if heads_of_keys < heads else 0
    expected = query.nbytes + 2 * key.nbytes + 4 * rows * heads * (padded + 2) + of_shared
    assert cuda_workspace(aten._flash_attention_backward.default, args, {}).peak_bytes == expected


@needs_hopper
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral"])
def test_gradients_are_as_near_to_float64_as_with_torchs(model_type, package):
    exact = gradients(*on_cuda(causal_model(model_type)))
    model, batch = on_cuda(by_document(causal_model(model_type, dtype=torch.bfloat16)))
    torchs = gradients(model, batch)
    assert take_flash_attention_3(model)
    ours = gradients(model, batch)
    assert package["backward"] == model.config.num_hidden_layers <= package["forward"]
    assert 0 < (ours - exact).norm() < 1.5 * (torchs - exact).norm()


@needs_hopper
def test_the_package_itself_computes_the_same():
    pytest.importorskip(PACKAGE)
    model, batch = on_cuda(by_document(causal_model("llama", dtype=torch.bfloat16)))
    torchs = gradients(model, batch)
    try:
        assert take_flash_attention_3(model)
        ours = gradients(model, batch)
    finally:
        restore_flash_attention_impl(_raise_warn=False)
    assert (ours - torchs).norm() < 0.02 * torchs.norm()
