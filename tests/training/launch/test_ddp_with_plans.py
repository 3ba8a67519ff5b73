"""Checkpointing, accumulation and DDP together, on two real ranks: the plain gradients, synchronised once a step."""

import hashlib
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from host_copies import LateCopies, moving_everything
from samples import sample
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from memsave_recipes.core.activations import apply_plan, plan_blocks

MICRO_BATCHES = 3


def digest(tensors):
    return {name: hashlib.sha256(tensor.float().numpy().tobytes()).hexdigest() for name, tensor in tensors}


def step_with_inputs_on_the_host(make_case, name, accelerator):
    """As ``accumulated_step`` under ``full_offload``, with an engine that moves everything."""
    with moving_everything(copies := LateCopies()):
        found = accumulated_step(make_case, name, "full_offload", accelerator)
    assert copies.bytes_out
    return found


def forward_and_backward(case, model, accelerator):
    """Three micro-batches that differ between ranks, and synchronise in the last."""
    for micro_batch in range(MICRO_BATCHES):
        torch.manual_seed(accelerator.process_index * MICRO_BATCHES + micro_batch)
        batch = torch.roll(case.batch, 5 * accelerator.process_index + micro_batch, dims=-1)
        with nullcontext() if micro_batch == MICRO_BATCHES - 1 else accelerator.no_sync(model):
            accelerator.backward(case.loss_of(model, batch))


def accumulated_step(make_case, name, strategy, accelerator):
    """One step of three micro-batches that differ between ranks; what it did to the gradients, and how often."""
    case = make_case(name)
    apply_plan(case.model, plan_blocks(case.model, strategy))
    model = accelerator.prepare(case.model)
    last_buckets = []

    def count_and_reduce(state, bucket):
        last_buckets.append(bucket.is_last())
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, count_and_reduce)
    forward_and_backward(case, model, accelerator)
    return {
        "gradients": digest((name, parameter.grad) for name, parameter in case.model.named_parameters()),
        "buffers": digest(case.model.named_buffers()),
        "synchronisations": sum(last_buckets),
        "rng": torch.get_rng_state().sum().item(),
    }


SMALL, LARGE = ("densenet_small", "vit"), ("densenet121", "vgg16", "vgg16_bn", "gpt2_124m")


@pytest.mark.parametrize("name", sample(SMALL, [*SMALL, *LARGE]))
def test_plans_under_ddp_with_accumulation(run_on_ranks, make_case, name):
    plain = run_on_ranks(partial(accumulated_step, make_case, name, "none"), 2, timeout_s=120)
    assert plain[0]["gradients"] == plain[1]["gradients"]
    for strategy in ("full", "segments:3"):
        planned = run_on_ranks(partial(accumulated_step, make_case, name, strategy), 2, timeout_s=120)
        assert planned == plain
        assert [rank["synchronisations"] for rank in planned] == [1, 1]


@pytest.mark.parametrize("name", sample(["vgg_small", "llama"], ["vgg_small", "vit", "gpt2", "llama"]))
def test_inputs_on_the_host_under_ddp_with_accumulation(run_on_ranks, make_case, name):
    plain = run_on_ranks(partial(accumulated_step, make_case, name, "none"), 2, timeout_s=120)
    assert run_on_ranks(partial(step_with_inputs_on_the_host, make_case, name), 2, timeout_s=120) == plain


def gradients_of_a_step(make_case, strategy, accelerator):
    """Of three micro-batches on every rank, and how often a parameter's hook ran."""
    case = make_case("llama")
    apply_plan(case.model, plan_blocks(case.model, strategy))
    model, hooks = accelerator.prepare(case.model), []
    for parameter in case.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: hooks.append(1))
    forward_and_backward(case, model, accelerator)
    gradients = {name: parameter.grad.tolist() for name, parameter in case.model.named_parameters()}
    return {"gradients": gradients, "hooks": len(hooks) / len(gradients)}


def test_mlps_in_tiles_under_ddp_with_accumulation(run_on_ranks, make_case):
    plain = run_on_ranks(partial(gradients_of_a_step, make_case, "none"), 2, timeout_s=120)
    tiled = run_on_ranks(partial(gradients_of_a_step, make_case, "full_tiled:16"), 2, timeout_s=120)
    assert tiled[0]["gradients"] == tiled[1]["gradients"]
    assert tiled[0]["hooks"] == plain[0]["hooks"] == MICRO_BATCHES
    for name, expected in plain[0]["gradients"].items():
        expected = torch.tensor(expected)
        found = torch.tensor(tiled[0]["gradients"][name])
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max(), name
