"""Plans that compile stay below their budget, although torch's ratio does not bound the memory of a step."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from accelerate import Accelerator
from chains import block, option
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
)
from workloads import peak_bytes, workload_of

from memsave_recipes.core.activations import apply_plan
from memsave_recipes.core.costs.block_costs import measure
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner import StaticMemory, make_plan, trial_step
from memsave_recipes.core.planner.budget import least_memory, plans_to_measure
from memsave_recipes.core.planner.task import Task
from memsave_recipes.core.plans import Action, plan_for
from memsave_recipes.core.plans.chain import Chain
from memsave_recipes.core.plans.simulate import keep_all, simulate
from memsave_recipes.core.step.batch_layout import SampleOrder
from memsave_recipes.core.text import GIB
from memsave_recipes.run import run_plan
from memsave_recipes.run.step_on_device import StepOnDevice
from memsave_recipes.training.arguments import OptimizerArguments, RunArguments
from memsave_recipes.training.batching import GlobalBatches

NO_STATE = StaticMemory()
NUM_LAYERS, WIDTH, LENGTH = 4, 128, 128
BUDGET_BYTES = 7500  # enough for the stated layers compiled with a ratio of 0.3, not with 0.5 nor recomputed


@dataclass(frozen=True)
class Costs:
    """A measurement of two compiled layers as it is stated: bytes and seconds under each ratio."""

    of_ratio: dict
    workload: object = None

    @property
    def running(self):
        return {"layers.0": True, "layers.1": True}

    @property
    def traces(self):
        plans = [plan_for(f"compiled:{ratio}", [list(self.running)]) for ratio in self.of_ratio]
        return [(plan, None) for plan in plans]

    def chain_under(self, plan):
        return self.chain(saves_part=bool(plan.ratios))

    def chain(self, *, saves_part=False, **_):
        options = [option(saved=10_000, forward=10_000, saves="i")]
        if saves_part:
            options += [compiled(ratio, **costs) for ratio, costs in self.of_ratio.items()]
        blocks = tuple(block(name, *options, output=100) for name in self.running)
        return Chain(blocks=blocks, resident_bytes=0, compiled=True)


def compiled(ratio, saved, transient, added_s):
    kept = option(Action.COMPILE, added_s=added_s, saved=saved, forward=saved, backward=transient, saves="i")
    return replace(kept, ratio=ratio)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs):
        return torch.tanh(self.linear(inputs))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


class Stated:
    """Layers that save ``10,000 * ratio`` bytes each, and trial steps that need ``needed(ratio, predicted)`` bytes."""

    def __init__(self, needed):
        self.needed, self.measured, self.tried = needed, [], []

    def measure(self, workload, plans, *_, **__):
        ratios = [plan.ratios[0] for plan in plans if plan.ratios]
        self.measured.append(ratios)
        costs = {ratio: {"saved": int(10_000 * ratio), "transient": 0, "added_s": -ratio} for ratio in ratios}
        return Costs(costs, workload)

    def step(self, found):
        self.tried.append(found.plan.ratios[-1])
        return self.needed(self.tried[-1], found.peak.total_bytes)


@pytest.fixture
def make_plan_on(monkeypatch, kernels_can_be_compiled):
    """``make_plan`` for such layers."""

    def make(stated):
        module = sys.modules[make_plan.__module__]  # the package has the function by its name
        monkeypatch.setattr(trial_step, "measure_in_groups", stated.measure)
        monkeypatch.setattr(module, "step_bytes", lambda found, *_: stated.step(found))
        return make_plan(
            Layers(), torch.ones(1, 4), strategy="budget", budget_gib=BUDGET_BYTES / GIB, static=NO_STATE, compiled=True
        )

    return make


class Rows(torch.utils.data.Dataset):
    def __getitem__(self, key):
        return {"inputs": torch.ones(4)}


@pytest.fixture
def plan_run_on(monkeypatch, kernels_can_be_compiled):
    """``plan_run`` for such layers, in micro-batches of 4; returns its plan, layout and words."""

    def plan(stated):
        monkeypatch.setattr(trial_step, "measure_in_groups", stated.measure)
        monkeypatch.setattr(run_plan, "run_trial_step", lambda candidate, *_: stated.step(candidate.forecast))
        accelerator, model, said, shown = Accelerator(cpu=True), Layers(), [], []
        monkeypatch.setattr(accelerator, "print", said.append)
        monkeypatch.setattr(run_plan, "show_choice", shown.append)
        run = RunArguments(
            output_dir="out",
            global_batch_size=8,
            micro_batch_size=4,
            activation_checkpointing="budget",
            memory_budget_gib=BUDGET_BYTES / GIB,
            compile="regions",
        )
        batches = GlobalBatches(
            accelerator,
            Rows(),
            order=SampleOrder(num_samples=8, global_batch_size=8, seed=0),
            layout=run.layout(1),
            num_steps=1,
            seed=0,
        )
        task = Task(
            run=run,
            optim=OptimizerArguments(optimizer="sgd"),
            build_model=Layers,
            loss_of=lambda model, batch: model(batch["inputs"]).sum(),
            micro_batch=lambda size: {"inputs": torch.ones(size, 4)},
        )
        step = StepOnDevice(accelerator, model, batches, model, lambda batch: task.loss_of(model, batch))
        found = run_plan.plan_run(task, step)
        assert found.plan is shown[-1].chosen.forecast.plan
        return found, batches.layout, said

    return plan


def more_than_predicted(ratio, predicted):
    return predicted + 3000 * (ratio > 0.2)


def more_than_the_budget(ratio, predicted):
    return BUDGET_BYTES + 1


def test_where_a_step_peaks_above_the_budget_a_smaller_ratio_is_measured(make_plan_on):
    stated = Stated(more_than_predicted)
    plan = make_plan_on(stated)
    assert stated.tried == [0.3, 0.15]
    assert stated.measured == [[0.3, 0.5, 0.7], [0.3, 0.5, 0.7, 0.15]]
    assert plan.ratios == (0.15,)
    assert plan.prediction.peak_bytes <= BUDGET_BYTES


def test_after_four_trial_steps_the_budget_is_refused_in_one_line(make_plan_on):
    stated = Stated(more_than_the_budget)
    with pytest.raises(InputError, match=r"^budget_gib [^\n]* none of the 4 plans [^\n]*$"):
        make_plan_on(stated)
    assert stated.tried == [0.3, 0.15, 0.075, 0.0375]
    assert len(stated.measured) == 4


def test_a_run_measures_a_smaller_ratio_before_it_takes_smaller_micro_batches(plan_run_on):
    stated = Stated(more_than_predicted)
    found, layout, said = plan_run_on(stated)
    assert stated.tried == [0.3, 0.15]
    assert stated.measured == [[0.3, 0.5, 0.7], [0.3, 0.5, 0.7, 0.15]]
    assert found.plan.ratios == (0.15,)
    assert found.predicted_peak_bytes <= BUDGET_BYTES
    assert layout.micro_batch_size == 4
    assert len(said) == 1
    assert said[0].endswith(": measuring the layers compiled with a ratio of 0.15")


def test_a_run_takes_smaller_micro_batches_where_no_ratio_fits_and_is_refused_at_last(plan_run_on):
    stated = Stated(more_than_the_budget)
    with pytest.raises(InputError, match=r"^[^\n]* the micro-batch cannot be halved: raise --memory_budget_gib$"):
        plan_run_on(stated)
    assert stated.tried == [0.3, 0.15, 0.075, 0.0375, 0.3, 0.3]


def gpt2():
    config = GPT2Config(vocab_size=256, n_layer=NUM_LAYERS, n_head=4, n_embd=WIDTH, n_positions=LENGTH)
    config.use_cache = False
    tokens = torch.randint(0, 256, (8, LENGTH), generator=torch.Generator().manual_seed(1))
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def peak_of_step(plan, workload):
    """What lives at the peak of a forward and backward, the model and the batch included."""
    with apply_plan(workload.model, plan):
        workload.forward().backward()  # compiles
        workload.model.zero_grad()
        return workload.resident_bytes + peak_bytes(lambda: workload.forward().backward())


@pytest.mark.slow  # compiles three times, and once for every plan
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("kernels_can_be_compiled")
def test_measured_peaks_are_below_the_budget_and_rise_with_it(monkeypatch):
    torch.manual_seed(0)
    model, batch = gpt2()
    workload = workload_of(model.train(), lambda model, batch: model(**batch).loss, batch)
    measured = measure(workload, plans_to_measure("budget", workload, compiled=True))
    monkeypatch.setattr(trial_step, "measure_in_groups", lambda *_, **__: measured)
    baseline = simulate(measured.chain(), keep_all(measured.chain())).peak_bytes
    smallest = least_memory(measured, NO_STATE)
    least = smallest.peak.total_bytes + smallest.reserve_bytes
    budgets = [least + (baseline - least) * step // 4 for step in range(5)]
    planned = partial(make_plan, model, batch, strategy="budget", static=NO_STATE, compiled=True)
    plans = [planned(budget_gib=budget / GIB) for budget in budgets]
    peaks = [peak_of_step(plan, workload) for plan in plans]
    assert any(not plan.is_bitwise for plan in plans)
    assert all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True))
    assert all(less <= more for less, more in pairwise(peaks))
    with pytest.raises(InputError, match=r"^budget_gib .* is too small for any plan: [^\n]*$"):
        planned(budget_gib=0.98 * least / GIB)
