"""Micro-batches in lockstep, as the planner sees them: a step is one forward of all that a rank has."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from workloads import estimate_on_target, measured_peak_bytes, workload_of

from memsave_recipes.core.activations import plan_blocks
from memsave_recipes.core.activations.micro_batches import inner_tensors
from memsave_recipes.core.costs.block_costs import measure
from memsave_recipes.core.costs.estimate import fake_batch, fake_model
from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.costs.trace_events import DeviceInstruments
from memsave_recipes.core.planner.budget import StaticMemory, forecast, least_memory, plans_to_measure, static_memory_of
from memsave_recipes.core.planner.search import Candidate
from memsave_recipes.core.plans import Action
from memsave_recipes.core.plans.simulate import simulate
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.models.convnets import build_densenet, build_vgg
from memsave_recipes.training.arguments import OptimizerArguments, RunArguments
from memsave_recipes.training.exact.batch_layouts import IndexedLayout, LockstepLayout
from memsave_recipes.training.exact.global_batchnorm import global_batchnorm
from memsave_recipes.training.exact.lockstep import in_lockstep

CPU = torch.device("cpu")
SIZES = (4, 4, 4, 2)
MODELS = ["vgg_small_bn", pytest.param("densenet_small", marks=pytest.mark.slow)]
STRATEGIES = ["none", "full", "every:2", "segments:3", "selective"]


def build(name):
    torch.manual_seed(0)
    model = (build_vgg if name.startswith("vgg") else build_densenet)(name, num_classes=10)
    global_batchnorm(model)
    return model.train()


def workload_on(model, micro_batches):
    """A workload of one forward."""

    def loss_of(model, _):
        batch = in_lockstep(micro_batches)
        return F.cross_entropy(model(batch["pixels"]), batch["labels"], reduction="sum")

    inputs = inner_tensors(in_lockstep(micro_batches).values())
    return workload_of(model, loss_of, dict(enumerate(inputs)))


def micro_batches():
    generator = torch.Generator().manual_seed(1)
    return [
        {"pixels": torch.randn(size, 3, 32, 32, generator=generator), "labels": torch.arange(size)} for size in SIZES
    ]


@pytest.fixture(scope="module", params=MODELS)
def measured(request):
    workload = workload_on(build(request.param), micro_batches())
    plans = plans_to_measure("budget:bitwise", workload)
    return measure(workload, plans, instruments=DeviceInstruments(CPU, repetitions=1))


def test_predicted_peaks_are_those_that_are_measured(measured):
    chain, workload = measured.chain(), measured.workload
    errors = {}
    for strategy in STRATEGIES:
        plan = plan_blocks(workload.model, strategy)
        predicted = simulate(chain, plan).peak_bytes - chain.resident_bytes
        errors[strategy] = predicted / measured_peak_bytes(workload, plan) - 1
    assert 0 <= min(errors.values()) <= max(errors.values()) <= 0.05, errors


def test_the_batch_is_that_of_the_whole_share(measured):
    weights = measured.workload.weights_bytes
    assert measured.workload.resident_bytes - weights == sum(SIZES) * (3 * 32 * 32 * 4 + 8)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.7])
def test_a_budget_between_the_least_and_plain_is_kept(measured, part):
    static = StaticMemory()
    least = least_memory(measured, static)
    least_bytes, plain_bytes = least.peak.total_bytes + least.reserve_bytes, least.baseline_peak_bytes
    budget_bytes = least_bytes + int(part * (plain_bytes - least_bytes))
    found = forecast(measured, budget_bytes, static)
    needed_bytes = measured_peak_bytes(measured.workload, found.plan) + found.chain.resident_bytes
    assert found.plan.recomputed or found.plan.blocks_under(Action.RECOMPUTE_NESTED)
    assert needed_bytes <= found.peak.total_bytes <= budget_bytes < plain_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg_small_bn", "densenet_small"])
def test_on_paper_the_peaks_are_those_of_the_device(name):
    real = workload_on(build(name), micro_batches())
    model = fake_model(partial(build, name))
    fake = workload_on(model, [fake_batch(model, one) for one in micro_batches()])
    plans = [plan_blocks(real.model, strategy) for strategy in ("none", "selective")]
    chain = estimate_on_target(fake, plans, find_target("cpu")).chain()
    assert chain.resident_bytes == real.resident_bytes
    for strategy in ("none", "full", "selective"):
        plan = plan_blocks(real.model, strategy)
        predicted = simulate(chain, plan).peak_bytes - chain.resident_bytes
        assert predicted == pytest.approx(measured_peak_bytes(real, plan), rel=0.01), strategy


def test_the_largest_forward_is_that_of_the_rank_with_most_samples():
    assert BatchLayout.of(11, 2, 2).largest_forward(11) == [2]
    assert IndexedLayout.of(11, 2, 2).largest_forward(11) == [2]
    assert BatchLayout.of(11, 8, 1).largest_forward(5) == [5]
    sizes = {num_ranks: LockstepLayout.of(11, 2, num_ranks).largest_forward(11) for num_ranks in (1, 2, 3, 4, 6)}
    assert sizes == {1: [2, 2, 2, 2, 2, 1], 2: [2, 2, 2], 3: [2, 2], 4: [2, 2], 6: [2]}
    assert LockstepLayout.of(11, 2, 1).largest_forward(5) == [2, 2, 1]


def test_the_flags_give_the_layout():
    flags = {"output_dir": "run", "global_batch_size": 14, "micro_batch_size": 2, "report_to": ["none"]}
    layout = RunArguments(**flags, bitwise_topology=True, batchnorm="global").layout(2)
    assert layout == LockstepLayout.of(14, 2, 2)
    assert layout.describe() == "14 samples = 7 micro-batches of 2, on 2 ranks in lockstep"
    assert type(RunArguments(**flags, bitwise_topology=True).layout(2)) is IndexedLayout
    assert type(RunArguments(**flags, batchnorm="global").layout(2)) is BatchLayout


def candidate(measured, layout):
    static = static_memory_of(OptimizerArguments(), measured.workload.model, layout)
    return Candidate(
        layout=layout,
        loss=None,
        forecast=forecast(measured, 10**9, static),
        weights_bytes=measured.workload.weights_bytes,
        static=static,
        budget_bytes=10**9,
    )


def test_a_step_has_the_time_of_one_forward(measured):
    for kind, num_forwards in ((LockstepLayout, 1), (IndexedLayout, 4)):
        one = candidate(measured, kind.of(sum(SIZES), 4, 1))
        assert one.step_s == num_forwards * one.forecast.micro_batch_s
        assert one.noise_s == num_forwards * one.forecast.noise_s
        assert sum(one.parts.values()) == one.needed_bytes


def test_gradients_are_sums_of_the_forward_but_for_ranges_that_only_other_ranks_have():
    model = build("vgg_small_bn")
    trained_bytes = sum(parameter.nbytes for parameter in model.parameters())
    static_of = partial(static_memory_of, OptimizerArguments(), model)
    alone = static_of(LockstepLayout.of(7, 1, 1))
    assert (alone.sums_bytes, alone.communication_bytes, alone.gradients_resident) == (0, 0, False)
    assert alone.gradients_stay
    even, uneven = static_of(LockstepLayout.of(8, 1, 2)), static_of(LockstepLayout.of(6, 1, 3))
    assert (even.sums_bytes, uneven.sums_bytes) == (0, trained_bytes)  # of 4 micro-batches and of 1 + 1
    assert not even.gradients_stay
    assert even.buckets_bytes == trained_bytes
    assert even.exchange_bytes == static_of(IndexedLayout.of(2, 1, 2)).exchange_bytes > 0
    assert static_of(IndexedLayout.of(8, 1, 2)).exchange_bytes == 0  # the two sums that wait for the last give way
