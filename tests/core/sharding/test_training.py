"""What else a run does with shards: the chunked loss, adapters, precisions, optimizers, steps that are left out."""

from functools import partial

import pytest
import torch
from small_runs import Training, largest_difference, trained_weights

ROUNDING = 1e-12


def chunked_and_full(kinds, accelerator):
    """The weights after two steps with all logits and without, by model and loss."""
    return {
        (kind, loss): trained_weights(kind, "full", accelerator, loss=loss, num_steps=2)[0]
        for kind in kinds
        for loss in ("full", "chunked")
    }


@pytest.mark.parametrize("kinds", [("llama", "gpt2"), pytest.param(("tied_llama",), marks=pytest.mark.slow)])
def test_the_chunked_loss_is_the_full_one(run_on_ranks, kinds):
    found = run_on_ranks(partial(chunked_and_full, kinds), 2, timeout_s=200)[0]
    for kind in kinds:
        assert largest_difference(found[kind, "chunked"], found[kind, "full"]) < ROUNDING, kind


def with_adapters(flag, accelerator):
    return trained_weights("llama", flag, accelerator, lora=True, num_steps=5)[0]


@pytest.mark.slow
def test_adapters_train_and_frozen_weights_stay(run_on_ranks):
    one = run_on_ranks(partial(with_adapters, "none"), 1)[0]
    two = run_on_ranks(partial(with_adapters, "full"), 2)[0]
    assert any("lora" in name for name in two)
    assert largest_difference(two, one) < ROUNDING
    frozen = [name for name in one if "lora" not in name]
    assert all(torch.equal(one[name], two[name]) for name in frozen)


def in_bfloat16(flag, accelerator):
    weights, norms, _ = trained_weights("llama", flag, accelerator, dtype=torch.bfloat16, num_steps=5)
    return {name: tensor.double() for name, tensor in weights.items()}, norms


@pytest.mark.slow
def test_weights_in_bfloat16(run_on_ranks):
    one, norms = run_on_ranks(partial(in_bfloat16, "none"), 1)[0]
    two, norms_of_two = run_on_ranks(partial(in_bfloat16, "full"), 2)[0]
    differences = torch.cat([(two[name] - one[name]).flatten() for name in one])
    assert differences.square().mean().sqrt() < 2e-3  # of steps of 1e-2, in a precision of 8 bits
    assert norms_of_two == pytest.approx(norms, rel=0.05)


def with_a_bad_step(flag, accelerator):
    """The norms of steps, of which the second has a loss that is not a number on the last rank alone."""
    training = Training(accelerator, "llama", flag, num_steps=4).train(1)
    loss_of, last = training.loss_of, accelerator.num_processes - 1
    training.loss_of = lambda batch: loss_of(batch) * (float("nan") if accelerator.process_index == last else 1.0)
    training.train(1)
    return training.norms


def test_a_step_that_is_not_finite_is_seen_by_every_rank(run_on_ranks):
    for norms in run_on_ranks(partial(with_a_bad_step, "full"), 2):
        assert norms[0] == norms[0]
        assert norms[1] != norms[1]


def parameters_after_an_evaluation(accelerator):
    """Whether all of them are in shards between two calls, and the loss without gradients and with them."""
    training = Training(accelerator, "gpt2", "full", loss="chunked")
    batch = next(iter(training.batches))
    micro_batch = batch.micro_batches[0]
    with torch.no_grad():
        evaluated = training.loss_of(micro_batch).item()
    are_shards = all(hasattr(parameter, "device_mesh") for parameter in training.trained.parameters())
    return are_shards, evaluated, training.loss_of(micro_batch).item()


def test_an_evaluation_leaves_nothing_gathered(run_on_ranks):
    for are_shards, evaluated, trained in run_on_ranks(parameters_after_an_evaluation, 2):
        assert are_shards
        assert evaluated == trained
