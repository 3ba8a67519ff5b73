"""What the planner of a run does where memory runs out: while it measures, and where a prediction was wrong.

All ranks do the same: plan by estimates, fall back to smaller micro-batches, or refuse together.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from memory_budget import Budget
from samples import sample
from torch import nn

from memsave_recipes.core.activations import apply_plan
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner import trial_step
from memsave_recipes.core.planner.budget import WORKSPACES
from memsave_recipes.core.planner.search import Candidate, SearchSpace
from memsave_recipes.core.planner.task import Task
from memsave_recipes.core.step.batch_layout import SampleOrder
from memsave_recipes.core.text import GIB
from memsave_recipes.run import run_plan, step_on_device
from memsave_recipes.run.run_plan import plan_run
from memsave_recipes.run.step_on_device import StepOnDevice
from memsave_recipes.training.arguments import OptimizerArguments, RunArguments
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.optimizers import make_optimizer

WIDTH, LAYERS, SAMPLES, GLOBAL_BATCH = 64, 6, 64, 32
ROWS = 64  # of a sample, so that a layer keeps 16 KiB for each


class Rows(torch.utils.data.Dataset):
    def __getitem__(self, key):
        generator = torch.Generator().manual_seed(key.index)
        return {"inputs": torch.randn(ROWS, WIDTH, generator=generator)}


def understated(self, measurement, layout, loss=None):
    """Candidates that say a quarter of what each block saves."""
    for one in _candidates(self, measurement, layout, loss):
        chain = one.forecast.chain
        blocks = [
            replace(
                b,
                options=tuple(
                    replace(o, saved_bytes=o.saved_bytes // 4, backward_transient_bytes=0) for o in b.options
                ),
            )
            for b in chain.blocks
        ]
        blocks = [replace(block, output_bytes=block.output_bytes // 4) for block in blocks]
        yield replace(one, forecast=replace(one.forecast, chain=replace(chain, blocks=tuple(blocks))))


_candidates = SearchSpace.candidates


def build_model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def no_memory_to_measure(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")


def within(num_bytes, forward):
    """``forward`` on a device that has so much memory for it."""

    def limited(*args):
        with Budget(num_bytes):
            return forward(*args)

    return limited


def planned(
    accelerator,
    *,
    budget_bytes,
    strategy="none",
    lying=False,
    hard_limit=None,
    measures=True,
    measuring_limit=None,
    workspaces=None,
):
    """The micro-batch and the peak of a run that is planned, then trained for two steps."""
    torch.manual_seed(0)
    model = build_model()
    run = RunArguments(
        output_dir="out",
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size="auto",
        activation_checkpointing=strategy,
        memory_budget_gib=budget_bytes / GIB,
    )
    optim = OptimizerArguments(optimizer="sgd")
    batches = GlobalBatches(
        accelerator,
        Rows(),
        order=SampleOrder(num_samples=SAMPLES, global_batch_size=GLOBAL_BATCH, seed=0),
        layout=run.layout(accelerator.num_processes),
        num_steps=2,
        seed=0,
    )
    trained, optimizer = accelerator.prepare(model, make_optimizer(optim, model))
    said = []
    accelerator.print = said.append
    # Larger micro-batches are always faster here, whatever this machine has to do besides.
    Candidate.step_s = property(lambda self: float(self.layout.accumulation_steps))
    if lying:
        SearchSpace.candidates = lambda *args: list(understated(*args))
    if not measures and accelerator.process_index == accelerator.num_processes - 1:
        trial_step.measure_in_groups = no_memory_to_measure
    if measuring_limit:
        measured = trial_step.measure_in_groups
        trial_step.measure_in_groups = lambda workload, *args, **kwargs: measured(
            replace(workload, forward=within(measuring_limit, workload.forward)), *args, **kwargs
        )
    if workspaces is not None:
        of_this_rank = workspaces[accelerator.process_index]
        step_on_device.workspaces_of_device = lambda device, known_bytes: {WORKSPACES: of_this_rank}
    emptied = []
    run_plan.empty_cache = lambda device: emptied.append(len(said))
    if hard_limit:
        tried_out = run_plan.run_trial_step

        def within_limits(candidate, step):  # of one rank alone, the last one
            if accelerator.process_index < accelerator.num_processes - 1:
                return tried_out(candidate, step)
            return tried_out(candidate, replace(step, loss_of=within(hard_limit, step.loss_of)))

        run_plan.run_trial_step = within_limits

    def summed_loss(trained, micro_batch):
        return trained(micro_batch["inputs"]).square().sum()

    task = Task(
        run=run,
        optim=optim,
        build_model=build_model,
        loss_of=summed_loss,
        micro_batch=lambda size: {"inputs": torch.empty(size, ROWS, WIDTH, device="meta")},
    )
    loss_of = partial(summed_loss, trained)
    try:
        found = plan_run(task, StepOnDevice(accelerator, model, batches, trained, loss_of))
    except InputError as refused:
        return {"refused": refused.one_line, "said": said}
    losses = []
    with apply_plan(model, found.plan):
        for batch in batches:
            for micro_batch in batch.forwards(trained):
                loss_sum = loss_of(micro_batch)
                batch.accelerator.backward(loss_sum, gradient=batch.share_of(loss_sum))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(batch.loss, "sum")))
    return {
        "micro_batch_size": batches.layout.micro_batch_size,
        "predicted": found.predicted_peak_bytes,
        "said": said,
        "emptied": emptied,
        "losses": losses,
    }


SAVED_A_SAMPLE = 2 * LAYERS * ROWS * WIDTH * 4  # every layer and its GELU keep what they are given
NEEDED_A_SAMPLE = 18 * ROWS * WIDTH * 4  # with the loss and what lives for a moment in the backward
ROOM = 500_000  # for weights, gradients, momentum, and the buckets of two ranks
EIGHT = 8 * NEEDED_A_SAMPLE + ROOM  # samples of a micro-batch


@pytest.mark.parametrize("num_ranks", sample([2], [1, 2]))
def test_a_prediction_that_holds_is_kept(run_on_ranks, num_ranks):
    results = run_on_ranks(partial(planned, budget_bytes=EIGHT), num_ranks)
    assert {result["micro_batch_size"] for result in results} == {8}
    assert not any("falling back" in line for line in results[0]["said"])


@pytest.mark.parametrize("num_ranks", sample([2], [1, 2]))
def test_a_planted_wrong_prediction_falls_back_to_what_fits(run_on_ranks, num_ranks):
    budget = 4 * NEEDED_A_SAMPLE + ROOM
    honest = run_on_ranks(partial(planned, budget_bytes=budget), num_ranks)
    lied_to = run_on_ranks(partial(planned, budget_bytes=budget, lying=True), num_ranks)
    assert [result["micro_batch_size"] for result in lied_to] == [result["micro_batch_size"] for result in honest]
    said = [line for line in lied_to[0]["said"] if "falling back" in line]
    assert said
    assert "the prediction of" in said[0]
    assert f"{GLOBAL_BATCH} samples = " in said[0]
    assert not any("falling back" in line for line in honest[0]["said"])
    assert lied_to[0]["losses"] == honest[0]["losses"]


@pytest.mark.parametrize("num_ranks", sample([2], [1, 2]))
def test_one_rank_without_memory_makes_all_fall_back(run_on_ranks, num_ranks):
    results = run_on_ranks(partial(planned, budget_bytes=EIGHT, hard_limit=3 * SAVED_A_SAMPLE), num_ranks)
    assert {result["micro_batch_size"] for result in results} == {2}
    said = [line for line in results[0]["said"] if "falling back" in line]
    assert len(said) == 2
    assert all("a rank had no memory left" in line for line in said)


@pytest.mark.parametrize("num_ranks", sample([2], [1, 2]))
def test_where_not_even_one_sample_fits_all_ranks_refuse_in_one_line(run_on_ranks, num_ranks):
    results = run_on_ranks(partial(planned, budget_bytes=EIGHT, hard_limit=SAVED_A_SAMPLE // 4), num_ranks)
    assert all("cannot be halved" in result["refused"] for result in results)
    too_small = run_on_ranks(partial(planned, budget_bytes=1000), num_ranks)
    assert all("the smallest that works is" in result["refused"] for result in too_small)


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "size"), sample([(2, "none", 8)], [(2, "none", 8), (1, "budget:bitwise", 16)])
)
def test_one_rank_that_cannot_measure_makes_all_plan_on_paper(run_on_ranks, num_ranks, strategy, size):
    measured = run_on_ranks(partial(planned, budget_bytes=EIGHT, strategy=strategy), num_ranks)
    on_paper = run_on_ranks(partial(planned, budget_bytes=EIGHT, strategy=strategy, measures=False), num_ranks)
    assert not any("planning by estimates" in line for line in measured[0]["said"])
    assert any("no memory to measure a micro-batch of 1" in line for line in on_paper[0]["said"])
    for one, other in zip(measured, on_paper, strict=True):
        assert one["micro_batch_size"] == other["micro_batch_size"] == size
        assert other["predicted"] == pytest.approx(one["predicted"], rel=0.01)
        assert one["losses"] == other["losses"]


UNIT = ROWS * WIDTH * 4  # of a sample; plain keeps two of them for a layer, one that recomputes keeps one


@pytest.mark.parametrize("num_ranks", sample([1], [1, 2]))
def test_where_plain_does_not_fit_larger_micro_batches_are_measured_in_groups(run_on_ranks, num_ranks):
    """Eight samples: 12 units plain, 9 where every other layer recomputes. Sixteen do not fit in any way."""
    limit = int(8 * 11.5 * UNIT)
    plans = partial(planned, budget_bytes=7 * NEEDED_A_SAMPLE + ROOM, measuring_limit=limit)
    plain = run_on_ranks(partial(plans, strategy="none"), num_ranks)
    assert {result["micro_batch_size"] for result in plain} == {4}
    results = run_on_ranks(partial(plans, strategy="budget:bitwise"), num_ranks)
    assert {result["micro_batch_size"] for result in results} == {8}
    assert not any("planning by estimates" in line for line in results[0]["said"])


@pytest.mark.parametrize("num_ranks", sample([2], [1, 2]))
def test_workspaces_are_part_of_the_budget_and_of_the_predicted_peak(run_on_ranks, num_ranks):
    """Those of the rank with the most."""
    without = run_on_ranks(partial(planned, budget_bytes=EIGHT), num_ranks)
    workspaces = [5 * NEEDED_A_SAMPLE, 6 * NEEDED_A_SAMPLE][-num_ranks:]
    results = run_on_ranks(partial(planned, budget_bytes=EIGHT, workspaces=workspaces), num_ranks)
    assert {result["micro_batch_size"] for result in without} == {8}
    assert {result["micro_batch_size"] for result in results} == {2}
    small = run_on_ranks(partial(planned, budget_bytes=2 * NEEDED_A_SAMPLE + ROOM), num_ranks)
    assert results[0]["predicted"] == small[0]["predicted"] + 6 * NEEDED_A_SAMPLE


def test_the_cache_of_the_allocator_is_emptied_after_planning_and_after_every_failure(run_on_ranks):
    assert run_on_ranks(partial(planned, budget_bytes=EIGHT), 1)[0]["emptied"] == [0]
    (found,) = run_on_ranks(partial(planned, budget_bytes=EIGHT, hard_limit=3 * SAVED_A_SAMPLE), 1)
    assert found["emptied"] == [0, 1, 2]  # before the line that says so, twice, and at the end
