"""Plans from times that vary: nearly the best, no slower with more memory, and plain where nothing is surely faster."""

import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from workloads import workload_of

from memsave_recipes.core.costs.block_costs import MOST_ROUNDS, Measurement, Workload, measure, num_runs
from memsave_recipes.core.costs.step_trace import StepTrace
from memsave_recipes.core.costs.trace_events import DeviceInstruments, Ends, Part, Reading
from memsave_recipes.core.planner.budget import StaticMemory, forecast, reserve_bytes
from memsave_recipes.core.plans import Action, plan_for
from memsave_recipes.core.plans.simulate import keep_all, simulate
from memsave_recipes.core.plans.solver import smallest_feasible

pytestmark = pytest.mark.usefixtures("timed_as_in_a_run")

MIB = 2**20
STATIC = StaticMemory()


@dataclass(frozen=True)
class Layer:
    """Its true costs; ``selecting`` is the part of its forward that runs again where operators are selected."""

    forward_s: float
    saved_mib: float
    selecting: float = 0.5
    output_mib: float = 2.0


def resnet_like():
    """Stages that save less and less at the same time; the first layer of each is larger."""
    sizes = [(24, 3), (14, 4), (8, 6), (5, 3)]
    return [
        Layer(0.010 * (1.4 if not n else 1), mib * (1.5 if not n else 1)) for mib, count in sizes for n in range(count)
    ]


MODELS = {
    "resnet-like": resnet_like(),
    "dense": [Layer(0.002 + 0.0003 * (n % 12), 6 / (1 + n // 12) + 0.2 * (n % 12), 0.7) for n in range(36)],
    "equal": [Layer(0.010, 10.0)] * 12,
}


def trace(layers, selects):
    """A step of ``layers`` in a row: the true seconds of forwards and, from the last to the first, of backwards."""
    count = len(layers)
    parts = [
        Part(
            block=str(n),
            inputs={n: int(layers[n - 1].output_mib * MIB)} if n else {},
            forward=n,
            outputs={n + 1: int(layer.output_mib * MIB)},
            saved={1000 + n: int(layer.saved_mib * (0.6 if selects else 1) * MIB)},
            backward=2 * count - 1 - n,
        )
        for n, layer in enumerate(layers)
    ]
    again = [layer.selecting * layer.forward_s if selects else 0.0 for layer in layers]
    backwards = [2 * layer.forward_s + added for layer, added in zip(layers, again, strict=True)]
    seconds = [layer.forward_s for layer in layers] + backwards[::-1]
    return StepTrace(
        parts=parts, ends=Ends(count, 2 * count), memory=[Reading(0, 0)] * (2 * count + 1), seconds=[seconds]
    )


def noisy(rng, seconds, sigma, disturbed):
    """A run of a step: all of it, and each part, slower or faster by ``sigma``; some parts disturbed by others."""
    slow = math.exp(rng.gauss(0, sigma / 2))
    factors = [slow * math.exp(rng.gauss(0, sigma)) for _ in seconds]
    return [
        s * f * (1 + rng.expovariate(1) * (rng.random() < disturbed)) for s, f in zip(seconds, factors, strict=True)
    ]


def measured(layers, rng=None, *, rounds=5, sigma=0.0, disturbed=0.0):
    """The layers measured in rounds; without ``rng`` exactly."""
    names = [[str(n) for n in range(len(layers))]]
    workload = Workload(
        model=nn.Identity(), forward=lambda: torch.zeros(()), batch=[], device=torch.device("cpu"), stacks=names
    )
    traces = []
    for word in ("none", "selective"):
        step = trace(layers, word == "selective")
        if rng:
            (exact,) = step.seconds
            step.seconds[:] = [noisy(rng, exact, sigma, disturbed) for _ in range(rounds)]
        traces.append((plan_for(word, names), step))
    return Measurement(workload, traces)


def budgets_of(chain, count):
    """From the least that works to all that plain needs, with the reserve."""
    least, most = smallest_feasible(chain), simulate(chain, keep_all(chain)).peak_bytes
    return [reserve_bytes(chain) + least + (most - least) * n // (count - 1) for n in range(count)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_plans_are_nearly_the_fastest_and_no_slower_with_more_memory(name, seed):
    """Each of 20 budgets measured anew: runs vary by 5 %, and each twentieth of a block takes about twice its time."""
    layers, rng = MODELS[name], random.Random(seed)
    exact = measured(layers)
    true = exact.chain()
    plain_s = sum(block.forward_s + block.backward_s for block in true.blocks)
    before_s = math.inf
    for budget_bytes in budgets_of(true, 20):
        fastest_s = plain_s + simulate(true, forecast(exact, budget_bytes, STATIC).plan).added_s
        found = forecast(measured(layers, rng, sigma=0.05, disturbed=0.05), budget_bytes, STATIC)
        step_s = plain_s + simulate(true, found.plan).added_s
        noise = found.noise_s / found.micro_batch_s
        assert step_s <= 1.02 * fastest_s
        assert step_s <= (1 + noise) * before_s
        assert 0 < noise < 0.1
        before_s = step_s
    assert step_s == plain_s  # all of it fits


def test_predicted_times_are_right_within_the_noise_that_is_stated():
    layers = MODELS["resnet-like"]
    true = measured(layers).chain()
    plain_s = sum(block.forward_s + block.backward_s for block in true.blocks)
    plan = plan_for("selective", [true.decided_names])
    ratio = 1 + simulate(true, plan).added_s / plain_s
    right = 0
    for seed in range(20):
        chain = measured(layers, random.Random(seed), sigma=0.05, disturbed=0.05).chain()
        baseline_s = sum(block.forward_s + block.backward_s for block in chain.blocks)
        found = simulate(chain, plan)
        noise = (chain.noise_s + found.noise_s) / baseline_s
        right += abs(1 + found.added_s / baseline_s - ratio) <= noise * ratio
    assert right >= 18


def test_computed_times_have_no_noise():
    chain = measured(MODELS["equal"]).chain()
    assert chain.noise_s == 0
    assert simulate(chain, plan_for("selective", [chain.decided_names])).noise_s == 0


def with_one_round(layers, word, change):
    """Measured exactly in five rounds, but for the seconds of steps under ``word``, which ``change`` alters."""
    found = measured(layers)
    for plan, step in found.traces:
        (exact,) = step.seconds
        step.seconds[:] = [change(list(exact), number) if plan.strategy == word else exact for number in range(5)]
    return found


def test_what_may_be_slow_is_left_to_what_surely_is_not():
    """Selecting operators frees as much as it has to and seems to be free, in runs of which each is another."""
    layers = [Layer(0.010, 10.0, selecting=0.0)] * 6
    budget_bytes = int(0.9 * simulate(chain := measured(layers).chain(), keep_all(chain)).peak_bytes)

    def varied(seconds, number):
        return [s * (1, 1.02, 1.9, 1.4, 2.2)[number] for s in seconds]

    sure = forecast(measured(layers), budget_bytes, STATIC).plan
    unsure = forecast(with_one_round(layers, "selective", varied), budget_bytes, STATIC).plan
    assert sure.blocks_under(Action.SELECT_OPS)
    assert unsure.blocks_under(Action.RECOMPUTE)
    assert not unsure.blocks_under(Action.SELECT_OPS)


def test_of_equal_layers_none_is_chosen_because_another_was_disturbed():
    """The third layer is disturbed in every run without checkpointing, and so is a single run of all layers."""
    layers = MODELS["equal"]

    def disturbed(seconds, number):
        seconds[2] *= 3
        return [s * (4 if number == 1 else 1) for s in seconds]

    chain = with_one_round(layers, "none", disturbed).chain()
    assert {block.forward_s for block in chain.blocks} == {layers[0].forward_s}


def test_only_layers_of_one_kind_share_their_times():
    found = measured([Layer(0.010, 10.0), Layer(0.020, 10.0)] * 3)
    kinds = {str(n): n % 2 for n in range(6)}
    assert len({block.forward_s for block in found.chain().blocks[:-1]}) == 1
    apart = Measurement(found.workload, found.traces, kinds).chain()
    assert [block.forward_s for block in apart.blocks[:-1]] == [0.010, 0.020, 0.010, 0.020, 0.010]


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(p)) for p in (0.1, 0.2, 0.1))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Clock(DeviceInstruments):
    """Steps take as long as they are told to."""

    def __init__(self, seconds_of):
        super().__init__(torch.device("cpu"))
        object.__setattr__(self, "seconds_of", seconds_of)
        object.__setattr__(self, "runs", [])

    def read_clock(self, step):
        intervals = super().read_clock(step)
        self.runs.append(self.seconds_of(len(self.runs)))
        return [self.runs[-1] / len(intervals)] * len(intervals)


def rounds_with(seconds_of, **options):
    """Measures a model under plain alone; the rounds that it took, and the calls of ``on_run``."""
    names, model, batch = [[f"layers.{n}" for n in range(3)]], Layers(), torch.ones(2, 4)
    workload = workload_of(model, lambda model, batch: model(batch), batch, names)
    clock, calls, plans = Clock(seconds_of), [], [plan_for("none", names)]
    found = measure(workload, plans, instruments=clock, on_run=lambda: calls.append(1), **options)
    assert len(calls) == num_runs(plans)
    return len(clock.runs) - 1, found  # the first run warms up


def test_rounds_end_when_the_times_agree():
    least = DeviceInstruments.repetitions
    assert rounds_with(lambda run: 0.01 * (1 + run % 2 / 500))[0] == least
    assert rounds_with(lambda run: 0.01 * (2 if run < 2 else 1))[0] == least  # one run in five was disturbed
    assert least < rounds_with(lambda run: 0.01 * (1 + run % 3 / 10))[0] <= MOST_ROUNDS * least
    assert rounds_with(lambda run: 0.01 * 1.3**run)[0] == MOST_ROUNDS * least
    assert rounds_with(lambda run: 10.0 * 1.3**run)[0] == MOST_ROUNDS * least  # in an instant by the clock on the wall
    assert rounds_with(lambda run: 0.01 * 1.3**run, most_s=0.0)[0] == least


def test_ranks_that_may_wait_for_each_other_run_equally_often(monkeypatch, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
        assert rounds_with(lambda run: 0.01 * 1.3**run)[0] == DeviceInstruments.repetitions
    finally:
        torch.distributed.destroy_process_group()


def test_layers_of_other_settings_are_of_another_kind():
    _, found = rounds_with(lambda run: 0.01)
    first, second, third = (found.kinds[f"layers.{n}"] for n in range(3))
    assert first == third != second
