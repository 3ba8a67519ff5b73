"""Attention by document in compiled layers: one operator with the bits of the others, few graphs for all documents."""

import random

import pytest
import torch
from packed_rows import (
    LENGTHS,
    NAMES,
    by_document,
    causal_model,
    gradients,
    gradients_of,
    packed,
    random_documents,
    varlen_on_cpu,
)
from samples import sample
from torch.utils.flop_counter import FlopCounterMode

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.plans import Action, Plan, Span
from memsave_recipes.models import packed_attention
from memsave_recipes.models.causal_lm import CausalLMLoss
from memsave_recipes.models.packed_attention import Documents, attention_by_document

OPERATOR = torch.ops.memsave.attention_by_document


def in_the_operator(monkeypatch, model, batch, found=gradients):
    """Gradients with the operator in place of the kernels themselves."""
    with monkeypatch.context() as patched:
        patched.setattr(packed_attention, "is_compiling", lambda: True)
        return found(model, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("model_type", NAMES)
def test_the_operator_has_the_bits_of_the_kernels(model_type, dtype, monkeypatch):
    model = by_document(causal_model(model_type, dtype=dtype))
    assert torch.equal(in_the_operator(monkeypatch, model, packed()), gradients(model, packed()))
    rows = packed(((32,), (32,)))
    without = rows | {"document_lengths": None}
    monkeypatch.setattr("memsave_recipes.models.causal_lm.Documents", lambda lengths: lengths)
    monkeypatch.setattr("memsave_recipes.models.causal_lm.attends_by_document", lambda model: False)
    assert torch.equal(in_the_operator(monkeypatch, model, without), gradients(model, rows))


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral"])
def test_the_operator_has_the_bits_of_one_call_for_all(model_type, monkeypatch):
    model = by_document(causal_model(model_type, dtype=torch.bfloat16))
    with varlen_on_cpu() as calls:
        plain, num_calls = gradients(model, packed()), len(calls)
        assert torch.equal(in_the_operator(monkeypatch, model, packed()), plain)
        assert len(calls) == 2 * num_calls > 0


def states(lengths, *, dtype=torch.float32):
    tokens = sum(lengths[0])
    query, key, value = (torch.randn(len(lengths), heads, tokens, 16, dtype=dtype) for heads in (4, 2, 2))
    return tuple(one.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for one in (query, key, value))


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_shapes_are_known_without_running_it(dtype, window):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    args = (*states(LENGTHS, dtype=dtype), Documents(LENGTHS).ends, 0.3, window)
    torch.library.opcheck(OPERATOR, args, test_utils=checks)


def test_it_counts_the_operations_of_whole_rows():
    query, key, value = states(((32,), (32,)))
    with FlopCounterMode(display=False) as counter:
        OPERATOR(query, key, value, None, None, None)
    assert counter.get_total_flops() == 2 * (2 * 4) * 32 * 32 * (
        16 + 16
    )  # (B * H) products of (T, D) and (D, T), twice


def test_the_ends_of_documents_are_of_few_sizes():
    assert Documents(LENGTHS).ends.tolist() == [20, 31, 32, 37, *[64] * 60]
    assert list(Documents(LENGTHS)) == list(LENGTHS)
    assert len(Documents([[1] * 65]).ends) == 128


def test_documents_that_do_not_fill_their_rows_are_refused():
    for wrong in (((20, 11), (5, 27)), ((20, 11, 1), (5, 28))):
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            OPERATOR(*states(LENGTHS), Documents(wrong).ends, None, None)


def test_dropout_is_not_compiled(monkeypatch):
    monkeypatch.setattr(packed_attention, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match="dropout"):
        attention_by_document(torch.nn.Module(), *states(LENGTHS), None, dropout=0.1)


# Compiled


@pytest.mark.usefixtures("kernels_can_be_compiled")
@pytest.mark.parametrize(
    ("model_type", "kinds"),
    sample([], [("llama", 1), ("mistral", 1), ("gemma3_text", 2)]),
)
def test_all_documents_share_graphs(model_type, kinds, graphs):
    """Also beside layers that recompute."""
    model = by_document(causal_model(model_type, **({"num_hidden_layers": 3} if kinds == 1 else {})))
    module, names = CausalLMLoss(model), plan_blocks(model, "none").blocks
    actions = [Action.COMPILE, Action.RECOMPUTE, *[Action.COMPILE] * (len(names) - 2)]
    ratios = {Action.COMPILE: 0.3}
    spans = [Span(start=i, stop=i + 1, action=action, ratio=ratios.get(action)) for i, action in enumerate(actions)]
    draw = random.Random(0)
    batches = [packed(random_documents(draw)) for _ in range(200)]
    plain = [gradients_of(module, batch) for batch in batches[:3]]
    with apply_plan(model, Plan(strategy="mixed", blocks=names, spans=tuple(spans), compiled=True)):
        for number, batch in enumerate(batches):
            module(**batch).backward()
            ours = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            model.zero_grad()
            if number < len(plain):
                assert (ours - plain[number]).abs().max() <= 1e-6 * plain[number].abs().max()
    assert 0 < graphs() <= 3 * kinds


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, or its stand-in")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral"])
def test_on_a_gpu_the_operator_computes_what_the_kernels_do_without_a_wait(model_type, dtype, monkeypatch):
    model = by_document(causal_model(model_type, dtype=dtype)).cuda()
    model.config.pad_token_id = None  # which GPT-2 looks for in its input
    batch = {name: part.cuda() if isinstance(part, torch.Tensor) else part for name, part in packed().items()}
    module, plain = CausalLMLoss(model), gradients(model, batch)
    in_the_operator(monkeypatch, module, batch, gradients_of)  # workspaces
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = in_the_operator(monkeypatch, module, batch, gradients_of)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (ours - plain).norm() <= 4 * torch.finfo(dtype).eps * plain.norm()
