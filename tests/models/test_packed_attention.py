"""Attention by document: the logits of each document alone, the gradients of masks, the memory of one document."""

import copy
import re
from itertools import accumulate, pairwise

import pytest
import torch
from packed_rows import LENGTHS, NAMES, SHARED_KEYS, by_document, causal_model, gradients, packed
from samples import sample
from workloads import estimate_on_target, peak_bytes, workload_of

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.costs.estimate import fake_batch, fake_model
from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import plan_for
from memsave_recipes.core.plans.simulate import simulate
from memsave_recipes.models.causal_lm import CausalLMLoss
from memsave_recipes.models.packed_attention import (
    attend_by_document,
    attends_by_document,
    attention_by_document,
    set_packed_attention,
)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("model_type", NAMES)
def test_logits_of_a_document_are_those_of_it_alone(model_type, dtype, tolerance):
    model = causal_model(model_type, dtype=dtype).eval()
    batch = packed()
    del batch["labels"]
    with torch.no_grad():
        together = by_document(model)(**batch, use_cache=False).logits
        for row, lengths in enumerate(LENGTHS):
            for start, stop in pairwise(accumulate(lengths, initial=0)):
                alone = model(batch["input_ids"][row : row + 1, start:stop], use_cache=False).logits[0]
                assert (together[row, start:stop] - alone).abs().max() <= tolerance * alone.abs().max()


@pytest.mark.parametrize("model_type", NAMES)
def test_gradients_are_those_by_masks(model_type):
    model = causal_model(model_type)
    by_masks, ours = gradients(model, packed()), gradients(by_document(model), packed())
    assert (ours - by_masks).abs().max() <= 1e-12 * by_masks.abs().max()


@pytest.mark.parametrize("plan", ["full", "every:2", "segments:2", "selective"])
@pytest.mark.parametrize(("model_type", "dropout"), [("gpt2", 0.1), ("llama", 0.0), ("mistral", 0.0)])
def test_plans_change_no_bit(model_type, dropout, plan):
    model = by_document(causal_model(model_type, dropout=dropout, dtype=torch.float32))
    plain = gradients(model, packed())
    assert torch.equal(gradients(model, packed(), plan), plain)
    if dropout:
        assert not torch.equal(gradients(by_document(causal_model(model_type, dtype=torch.float32)), packed()), plain)


def test_half_precision_by_autocast():
    model = causal_model("llama", dtype=torch.float32)
    exact = gradients(model, packed())
    errors = []
    for one in (model, by_document(model)):
        with torch.autocast("cpu", torch.bfloat16):
            errors.append((gradients(one, packed()) - exact).norm() / exact.norm())
    assert 0 < errors[1] < 1.5 * errors[0]


def test_autocast_brings_states_of_two_dtypes_to_the_kernel():
    """Rotated queries and keys are float32 there, values are not."""
    query, key, value = (torch.randn(2, 2, 32, 16, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = attention_by_document(torch.nn.Module(), query, key, value.bfloat16(), None, document_lengths=LENGTHS)
    assert out.dtype == torch.bfloat16
    assert out.grad_fn.name() == "_FlashOnCpuBackward"


# Memory

LENGTH = 2048
SMALL = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 1, "head_dim": 64}
SPLITS = {"4 documents": (512,) * 4, "1 document": (LENGTH,), "uneven": (LENGTH - 1, 1), "32 documents": (64,) * 32}


def peak_of(model, lengths, plan):
    module, batch = CausalLMLoss(model, "chunked", chunk_bytes=2**20), packed((lengths,))
    with apply_plan(model, plan_blocks(model, plan)):
        model.zero_grad()
        return peak_bytes(lambda: module(**batch).backward())


@pytest.mark.parametrize("plan", sample(["full"], ["none", "full"]))
def test_packed_rows_take_the_memory_of_one_document_of_their_length(plan):
    model = causal_model("llama", dtype=torch.float32, **SMALL)
    one_document = peak_of(model, (LENGTH,), plan)  # for which transformers makes no mask
    by_masks = peak_of(model, SPLITS["4 documents"], plan)
    model = by_document(model)
    peaks = {name: peak_of(model, lengths, plan) for name, lengths in SPLITS.items()}
    assert max(peaks.values()) <= 1.05 * one_document
    assert by_masks >= 1.5 * one_document


def predicted_and_measured(model_type, lengths, **changes):
    """Peaks of a plain step: on paper for one document a row, and measured for rows of ``lengths``."""

    def build():
        model = causal_model(model_type, dtype=torch.float32, **changes)
        assert attend_by_document(model) is None
        return model

    of_one = packed(tuple((sum(row),) for row in lengths))
    model = fake_model(build)
    on_paper, real = (
        workload_of(one, lambda model, batch: CausalLMLoss(model, "full")(**batch), batch)
        for one, batch in ((model, fake_batch(model, of_one)), (build(), packed(lengths)))
    )
    plan = plan_for("none", on_paper.stacks)
    predicted = simulate(estimate_on_target(on_paper, [plan], find_target("cpu")).chain(), plan).peak_bytes
    return predicted, real.resident_bytes + peak_bytes(lambda: real.forward().backward())


@pytest.mark.parametrize(
    ("model_type", "changes", "lengths"),
    [
        ("llama", {}, ((64,) * 4, (200, 56))),
        ("gpt2", {"dropout": 0.1}, ((255, 1),)),
        ("mistral", {"sliding_window": 100}, ((256,),)),
        *(pytest.param("llama", {}, lengths, marks=pytest.mark.slow) for lengths in (((256,),), ((255, 1),))),
    ],
)
def test_the_peak_on_paper_is_never_below_that_of_packed_rows(model_type, changes, lengths):
    predicted, measured = predicted_and_measured(model_type, lengths, **changes)
    assert measured <= 1.01 * predicted
    if model_type == "llama":  # without masks and probabilities, which shorter documents have less of
        assert measured >= 0.95 * predicted


# Who can, and who cannot


@pytest.mark.parametrize("model_type", NAMES)
def test_models_on_paper_attend_as_real_ones(model_type):
    with torch.device("meta"):
        model = causal_model(model_type)
    assert attend_by_document(model) is None
    assert attends_by_document(model)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gemma2", SHARED_KEYS, "its attention (is eager|takes softcap)"),  # by the version of transformers
        ("gpt_oss", {"num_local_experts": 2}, "its attention is eager"),  # has sinks
        ("falcon", {}, "its attention is its own"),
        (
            "llama4_text",
            {**SHARED_KEYS, "num_local_experts": 2, "intermediate_size_mlp": 32},
            "its masks are its own",
        ),  # of chunks
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}, "its logits would be others"),  # positions by the mask
    ],
)
def test_others_keep_their_masks_by_name(model_type, changes, reason):
    model = causal_model(model_type, dtype=torch.float32, **changes)
    before = model.config._attn_implementation
    kind, line = set_packed_attention(model, "auto")
    assert kind == "mask"
    assert re.fullmatch(rf"packed rows: attention with masks \({reason}\)", line)
    assert model.config._attn_implementation == before
    assert model.training
    with pytest.raises(InputError, match=f"cannot attend by document, because {reason}"):
        set_packed_attention(model, "document")


def test_masks_where_told_or_where_layers_with_dropout_are_compiled():
    assert set_packed_attention(causal_model("llama"), "mask")[0] == "mask"
    model = causal_model("llama", dropout=0.1)
    assert "compiled, with dropout" in set_packed_attention(model, "auto", compiles=True)[1]
    assert not attends_by_document(model)
    for one, compiles in ((model, False), (causal_model("llama"), True)):
        assert set_packed_attention(one, "auto", compiles=compiles)[0] == "document"
        assert attends_by_document(one)


def test_an_argument_that_attention_by_document_does_not_take_is_seen(monkeypatch):
    model = causal_model("llama")
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *args, **options: forward(*args, **options, s_aux=1.0))
    assert attend_by_document(model) == "its attention takes s_aux"


def test_a_window_that_only_the_mask_has_is_seen():
    """Also where it is longer than the documents of the trial, so that the logits do not tell."""
    model = causal_model("gemma3_text", sliding_window=4096)
    assert attend_by_document(copy.deepcopy(model)) is None
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert attend_by_document(model) == "its masks are its own"


def test_rows_without_the_lengths_of_their_documents_are_refused():
    batch = packed()
    del batch["document_lengths"]
    with pytest.raises(ValueError, match="document_lengths are missing"):
        CausalLMLoss(by_document(causal_model("llama")))(**batch)
