"""Attention by document in one call for all documents: on a CPU by a stand-in of CUDA's kernel, on a GPU by itself."""

from types import SimpleNamespace

import pytest
import torch
from packed_rows import (
    LENGTHS,
    NAMES,
    by_document,
    causal_model,
    gradients,
    gradients_of,
    on_cuda,
    packed,
    varlen_on_cpu,
)
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from workloads import estimate_on_target, workload_of

from memsave_recipes.core.activations import plan_blocks
from memsave_recipes.core.costs.estimate import cuda_kernels, fake_batch, fake_model
from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.models import packed_attention
from memsave_recipes.models.causal_lm import CausalLMLoss

aten = torch.ops.aten
is_here = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0)
needs_kernel = pytest.mark.skipif(not is_here, reason="needs an NVIDIA GPU from Ampere on")


@pytest.fixture
def calls():
    """The bounds of each call of the stand-in."""
    packed_attention._bounds_on.cache_clear()
    with varlen_on_cpu() as bounds:
        yield bounds


def num_copies():
    """Of bounds to the device, so far."""
    return packed_attention._bounds_on.cache_info().misses


def logits_of(model, batch):
    with torch.no_grad():
        return model.eval()(**batch | {"labels": None}, use_cache=False).logits


@pytest.mark.parametrize("model_type", NAMES)
def test_logits_and_gradients_are_those_by_masks(model_type, calls):
    model = causal_model(model_type)
    one = by_document(model)
    by_masks, ours = gradients(model, packed()), gradients(one, packed())
    assert calls
    assert (ours - by_masks).abs().max() <= 1e-12 * by_masks.abs().max()
    by_masks, ours = logits_of(model, packed()), logits_of(one, packed())
    assert (ours - by_masks).abs().max() <= 1e-12 * by_masks.abs().max()


@pytest.mark.parametrize("autocast", [False, True], ids=["cast", "autocast"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral"])
def test_half_precision_is_as_near_to_float64_as_by_masks(model_type, autocast, calls):
    exact = [found(causal_model(model_type), packed()) for found in (gradients, logits_of)]
    model = causal_model(model_type, dtype=torch.float32 if autocast else torch.bfloat16)
    errors = []
    for one in (model, by_document(model)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = gradients(one, packed()), logits_of(one, packed())
        errors.append([(ours - true).norm() / true.norm() for ours, true in zip(found, exact, strict=True)])
    assert calls
    assert all(0 < ours < 1.5 * by_masks for by_masks, ours in zip(*errors, strict=True))


@pytest.mark.parametrize(("plan", "runs"), [("none", 1), ("selective", 1), ("full", 2)])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral"])
def test_one_call_a_layer_one_copy_a_micro_batch_and_the_same_bits(model_type, plan, runs, calls):
    module = CausalLMLoss(by_document(causal_model(model_type, dtype=torch.bfloat16)))
    plain = gradients_of(module, packed())
    for lengths in (((9, 23), (32,)), LENGTHS):
        calls.clear()
        before = num_copies()
        found = gradients_of(module, packed(lengths), plan)
        assert len(calls) == runs * module.model.config.num_hidden_layers
        assert num_copies() == before + 1
        assert len({bounds.data_ptr() for bounds in calls}) == 1
    assert torch.equal(found, plain)


def test_lengths_may_be_lists_and_a_row_without_them_is_one_document(calls):
    model = by_document(causal_model("llama"))
    rows = packed(((32,), (32,)))
    as_lists = gradients(model, rows | {"document_lengths": [[32], [32]]})
    assert torch.equal(logits_of(model, rows | {"document_lengths": None}), logits_of(model, rows))
    assert torch.equal(as_lists, gradients(model, rows))


def test_documents_that_do_not_fill_their_rows_are_refused(calls):
    """The kernel itself would leave the rest as it found it, or read beyond the end."""
    model = by_document(causal_model("llama"))
    for wrong in (((20, 11), (5, 27)), ((20, 11, 1), (5, 28))):
        with pytest.raises(ValueError, match=r"documents of 6[35] tokens in rows of 64"):
            logits_of(model, packed() | {"document_lengths": wrong})


def test_an_evaluation_in_inference_mode_leaves_nothing_that_training_cannot_save(calls):
    module = CausalLMLoss(by_document(causal_model("llama")))
    packed_attention._bounds_on.cache_clear()
    with torch.inference_mode():
        logits_of(module.model, packed())
    assert gradients_of(module, packed()).isfinite().all()
    assert num_copies() == 1


class Reads(TorchDispatchMode):
    """Keeps what a device would be waited for: numbers that are read from tensors, and tensors made of numbers."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.lift_fresh.default):
            self.found.append(func)
        return func(*args, **(kwargs or {}))


def without_check_of_padding(model):
    """GPT-2 looks for a padding token in its input once a forward, where it knows one."""
    model.config.pad_token_id = None
    return model


@pytest.mark.parametrize("plan", ["none", "full"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral"])
def test_no_layer_reads_a_number(model_type, plan, calls):
    model = without_check_of_padding(causal_model(model_type))
    batch, found = packed(), []
    for module in (CausalLMLoss(by_document(model)), CausalLMLoss(model)):
        with Reads() as reads:
            gradients_of(module, batch, plan)
        found.append(reads.found)
    assert found[0] == [aten.lift_fresh.default]  # where documents end: made once a batch, and on the host
    assert aten._local_scalar_dense.default in found[1]


# Which kernel, here and on paper


def states(dtype=torch.bfloat16, size=16, value_size=None, heads=(4, 2)):
    query, key = (torch.empty(2, count, 32, size, dtype=dtype, requires_grad=True) for count in heads)
    return query, key, torch.empty(2, heads[1], 32, value_size or size, dtype=dtype, requires_grad=True)


def attended(query, key, value, **options):
    module = torch.nn.Module()
    module.num_key_value_groups = query.shape[1] // key.shape[1]
    return packed_attention.attention_by_document(module, query, key, value, None, document_lengths=LENGTHS, **options)[
        0
    ]


def takes_one_call(target, *given, autocast=False, **options):
    """Whether such states (B, H, T, D) do on a device that is not here."""
    of_target = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with FakeTensorMode(), cuda_kernels(find_target(target)), of_target:
        out = attended(*states(*given), **options)
    return out.grad_fn.next_functions[0][0].name() == "FlashAttentionBackward0"


@pytest.mark.parametrize("target", ["a100", "h100", "rtx3090", "b200"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 12}, {"scaling": 0.5}])
def test_half_precision_takes_one_call_from_ampere_on(target, options):
    for dtype in (torch.bfloat16, torch.float16):
        assert takes_one_call(target, dtype, **options)
    assert takes_one_call(target, torch.float32, autocast=True, **options)


def test_what_the_kernel_does_not_take_goes_document_by_document():
    assert takes_one_call("a100")
    assert not takes_one_call("a100", torch.float32)
    assert not takes_one_call("a100", torch.bfloat16, 20)  # its heads are multiples of 8
    assert not takes_one_call("a100", torch.bfloat16, 264)
    assert not takes_one_call("a100", torch.bfloat16, 16, 8)
    assert not takes_one_call("a100", dropout=0.1)
    assert not takes_one_call("t4", torch.float16)
    assert not takes_one_call("mi300x")
    assert not packed_attention._has_varlen(*states(), 0.0)  # this CPU


@pytest.mark.parametrize(
    ("choice", "sizes", "hip", "expected"),
    [
        (SDPBackend.FLASH_ATTENTION, (128, 128), None, True),
        (SDPBackend.CUDNN_ATTENTION, (128, 128), None, True),  # first on Hopper
        (SDPBackend.CUDNN_ATTENTION, (192, 128), None, False),
        (SDPBackend.EFFICIENT_ATTENTION, (128, 128), None, False),
        (SDPBackend.FLASH_ATTENTION, (128, 128), "7.0", False),
    ],
)
def test_torchs_choice_on_a_device_decides(choice, sizes, hip, expected, monkeypatch):
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: choice.value)
    monkeypatch.setattr(torch.version, "hip", hip)
    query, value = (SimpleNamespace(shape=(2, 4, 32, size), is_cuda=True) for size in sizes)
    assert packed_attention._has_varlen(query, query, value, 0.0) == expected


def estimate(lengths=LENGTHS, target="a100"):
    """Of a plain step and of one that recomputes, without weights."""
    model = fake_model(lambda: by_document(causal_model("llama", dtype=torch.bfloat16)))
    module, batch = CausalLMLoss(model, "full"), fake_batch(model, packed(lengths))
    work = workload_of(model, lambda _, batch: module(**batch), batch)
    plans = [plan_blocks(model, strategy) for strategy in ("none", "selective")]
    return estimate_on_target(work, plans, find_target(target)).chain()


def test_an_estimate_keeps_no_bounds_and_takes_none_of_a_run(calls):
    first = estimate()
    assert num_copies() == 0
    model = by_document(causal_model("llama"))
    plain = gradients(model, packed())
    assert estimate() == first
    assert torch.equal(gradients(model, packed()), plain)


# On a GPU


@needs_kernel
@pytest.mark.parametrize("model_type", NAMES)
def test_on_a_gpu_half_precision_is_as_near_to_float64_as_by_masks(model_type, monkeypatch):
    exact = gradients(*on_cuda(causal_model(model_type)))
    num_calls, one_call = [], packed_attention._varlen
    monkeypatch.setattr(packed_attention, "_varlen", lambda *args: num_calls.append(1) or one_call(*args))
    model, batch = on_cuda(causal_model(model_type, dtype=torch.bfloat16))
    by_masks, ours = ((gradients(one, batch) - exact).norm() / exact.norm() for one in (model, by_document(model)))
    assert num_calls
    assert 0 < ours < 1.5 * by_masks


@needs_kernel
@pytest.mark.parametrize("plan", ["none", "full", "selective"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral"])
def test_on_a_gpu_no_layer_waits_for_it(model_type, plan):
    model, batch = on_cuda(without_check_of_padding(causal_model(model_type, dtype=torch.bfloat16)))
    module = CausalLMLoss(by_document(model))
    gradients_of(module, batch, plan)  # workspaces, and what transformers keeps
    packed_attention._bounds_on.cache_clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = gradients_of(module, batch, plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.isfinite().all()
