"""``memsave.prepare`` in loops of one's own: plain PyTorch, Accelerate, and several ranks."""

from functools import partial

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from integrations.trainings import differing, llama, own_forwards, padded, rows, weights_of
from samples import sample
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adafactor, Adam, AdamW
from transformers import GPT2Config, GPT2LMHeadModel

import memsave_recipes as memsave
from memsave_recipes.core.costs.breakdown import break_down_peak
from memsave_recipes.core.step.memory import state_bytes_of
from memsave_recipes.core.text import GIB

BUDGET_GIB = 0.0055
BATCHES = [padded(rows([48] * 4).to_list()) for _ in range(5)]

OPTIMIZERS = {
    "adamw": AdamW,
    "amsgrad": partial(Adam, amsgrad=True),
    "momentum": partial(SGD, momentum=0.9),
    "sgd": SGD,
    "adafactor": Adafactor,
}


@pytest.fixture(autouse=True)
def a_precision_of_its_own():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def trained(settings=None, precision="no", batches=BATCHES, optimizer_of=AdamW, accumulation=1):
    """The weights, and the peaks of the steps from the fourth on: the third forward ends our own window."""
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=accumulation, cpu=True)
    torch.manual_seed(0)
    bare = llama().train()
    model, optimizer = accelerator.prepare(bare, optimizer_of(bare.parameters(), lr=1e-3))
    handle, peaks = None, []
    if settings:
        handle = memsave.prepare(model, batches[0], optimizer, accumulation_steps=accumulation, **settings)
    for number, batch in enumerate(batches):
        window = break_down_peak(bare, optimizer.optimizer, torch.device("cpu")) if number >= 3 else None
        peak = window.__enter__() if window and accumulation == 1 else None
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if peak:
            window.__exit__(None, None, None)
            peaks.append(peak.breakdown.total_bytes + sum(tensor.nbytes for tensor in batch.values()))
    if handle:
        handle.remove()
        assert not own_forwards(bare) - ({""} if precision != "no" else set())
        assert not bare._forward_pre_hooks
        assert not optimizer.optimizer._optimizer_step_post_hooks
    return weights_of(bare), peaks, handle


@pytest.mark.parametrize("precision", sample(["no"], ["no", "bf16"]))
def test_accelerate(precision, capsys):
    plain, _, _ = trained(precision=precision)
    for settings in ({"strategy": "none"}, {"strategy": "full"}, {"budget_gib": BUDGET_GIB}):
        weights, peaks, handle = trained(settings, precision)
        assert not differing(plain, weights)
        assert max(peaks) <= (1.01 if precision == "no" else 1.02) * handle.plan.prediction.peak_bytes
        assert f"memsave: {handle.plan}" in capsys.readouterr().out
        if "budget_gib" in settings:
            assert max(peaks) <= BUDGET_GIB * GIB


@pytest.mark.slow
@pytest.mark.usefixtures("kernels_can_be_compiled")
def test_plans_around_compiled_layers_end_in_the_same_weights():
    compiled, _, _ = trained({"strategy": "none", "compiled": True})
    weights, peaks, handle = trained({"strategy": "full", "compiled": True})
    assert not differing(compiled, weights)
    assert handle.plan.compiled
    assert max(peaks) <= 1.01 * handle.plan.prediction.peak_bytes


def test_the_second_step_is_compared_in_a_plain_loop(capsys):
    model = llama().train()
    optimizer = AdamW(model.parameters(), fused=True)
    with memsave.prepare(model, BATCHES[0], optimizer, budget_gib=BUDGET_GIB) as handle:
        for batch in BATCHES:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not own_forwards(model)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "peak of step" in line]
    assert line.startswith("memsave: peak of step 2: ")
    assert handle.plan.prediction.peak_bytes <= BUDGET_GIB * GIB


def test_it_says_which_operators_could_be_fused(capsys):
    """A CPU has a kernel for GELU, and none for RMSNorm."""
    plain, fused = (GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32)) for _ in range(2))
    memsave.fuse_operators(fused)
    for model, told in ((plain, True), (fused, False), (llama(), False)):
        with memsave.prepare(model, BATCHES[0], AdamW(model.parameters()), strategy="full"):
            said = capsys.readouterr().out
        assert ("are several operators each" in said) is told
        assert ("a NewGELUActivation saves 25% of its bytes for the backward" in said) is told


def test_gradients_that_accumulate_count():
    plain, _, _ = trained(accumulation=2)
    weights, _, handle = trained({"strategy": "full"}, accumulation=2)
    assert not differing(plain, weights)
    once = trained({"strategy": "full"})[2].plan.prediction
    assert handle.plan.prediction.peak_bytes > once.peak_bytes


def test_a_larger_batch_than_the_planned_one_is_told(capsys):
    longer = padded(rows([64] * 4).to_list())
    trained({"budget_gib": BUDGET_GIB}, batches=[BATCHES[0], longer, longer])
    assert capsys.readouterr().out.count("elements, 576 were planned for: its step may take more than predicted") == 1


def test_the_loss_is_the_scripts():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 8))
    labels = torch.zeros(256, dtype=torch.int64)
    handle = memsave.prepare(
        model,
        [torch.ones(256, 64)],
        SGD(model.parameters(), lr=0.1),
        strategy="segments:2",
        loss_fn=lambda logits: cross_entropy(logits, labels),
    )
    assert handle.plan.recomputed
    handle.remove()
    handle.remove()
    assert not own_forwards(model)


@pytest.mark.parametrize("optimizer_of", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_state_of_the_optimizer_is_known_before_its_first_step(optimizer_of):
    model = llama()
    optimizer = optimizer_of(model.parameters(), lr=1e-3)
    expected = state_bytes_of(optimizer)
    assert not optimizer.state
    model(**BATCHES[0]).loss.backward()
    optimizer.step()
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    assert expected == sum(tensor.nbytes for tensor in state)
    assert state_bytes_of(optimizer) == expected


def test_wrapped_models_are_refused():
    model = llama()
    optimizer = AdamW(model.parameters())
    with pytest.raises(memsave.InputError, match=r"torch\.compile has wrapped it"):
        memsave.prepare(torch.compile(model), BATCHES[0], optimizer, strategy="full")
    with pytest.raises(memsave.InputError, match="DataParallel runs copies of it"):
        memsave.prepare(nn.DataParallel(model), BATCHES[0], optimizer, strategy="full")
