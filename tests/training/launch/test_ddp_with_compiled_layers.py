"""Compiled layers, accumulation and DDP on two real ranks: the plain gradients within rounding, the same on both."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from memsave_recipes.core.activations import apply_plan, plan_blocks

SIZES = [(2, 2, 1), (2, 1, 1)]  # samples of every micro-batch, on either rank


def accumulated_step(make_case, strategy, accelerator):
    """One step; the gradients after it, and how many graphs it took."""
    before = counters["stats"]["unique_graphs"]  # of the process that this rank was forked from
    case = make_case("gpt2")
    apply_plan(case.model, plan_blocks(case.model, strategy))
    model = accelerator.prepare(case.model)
    torch.manual_seed(accelerator.process_index)
    sizes = SIZES[accelerator.process_index]
    for position, size in enumerate(sizes):
        with nullcontext() if position == len(sizes) - 1 else accelerator.no_sync(model):
            accelerator.backward(case.loss_of(model, case.batch[:size]))
    gradients = {name: parameter.grad.numpy() for name, parameter in case.model.named_parameters()}
    return gradients, counters["stats"]["unique_graphs"] - before


@pytest.mark.slow  # half a minute
def test_compiled_layers_under_ddp_with_accumulation(run_on_ranks, make_case):
    (plain, none), _ = run_on_ranks(partial(accumulated_step, make_case, "none"), 2, timeout_s=120)
    (ours, num_graphs), (theirs, _) = run_on_ranks(partial(accumulated_step, make_case, "compiled"), 2, timeout_s=240)
    assert none == 0
    assert num_graphs == 2  # for both sizes
    for name, gradient in plain.items():
        assert (ours[name] == theirs[name]).all()
        assert ours[name] == pytest.approx(gradient, rel=1e-3, abs=1e-6 + 1e-5 * float(abs(gradient).max()))
