"""A plan for a script's model: as it will train, whatever mode it was left in, and within its budget when it is run."""

import json
import sys

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel
from workloads import peak_bytes, workload_of

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.costs.block_costs import measure, measure_in_groups
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner import StaticMemory, make_plan, trial_step
from memsave_recipes.core.planner.budget import forecast, plans_to_measure
from memsave_recipes.core.plans import Plan
from memsave_recipes.core.text import GIB

STRATEGY = "budget:bitwise"
BUDGET_GIB = 0.022  # below the baseline's peak, above the smallest that works
SLOW, STRATEGIES = ("none", "full"), ("segments:2", "selective", STRATEGY)


@pytest.fixture
def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_layer=3, n_head=4, n_embd=128, use_cache=False)
    return GPT2LMHeadModel(config)


def step_bytes(model, batch):
    """What lives at the peak of the second step of AdamW, the model and the batch included."""
    optimizer = AdamW(model.parameters(), fused=True)

    def step():
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    rise = peak_bytes(step)
    state = [tensor for one in optimizer.state.values() for tensor in one.values()]
    return rise + sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *batch.values(), *state))


def test_a_model_in_evaluation_mode_is_planned_as_it_will_train(gpt2):
    tokens = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    plan = make_plan(gpt2.eval(), batch, strategy=STRATEGY, budget_gib=BUDGET_GIB)
    assert not any(module.training for module in gpt2.modules())
    with apply_plan(gpt2.train(), plan):
        assert step_bytes(gpt2, batch) <= BUDGET_GIB * GIB


def test_what_is_frozen_on_purpose_stays_so(gpt2):
    frozen = gpt2.transformer.h[0].eval()
    seen = []
    frozen.register_forward_pre_hook(lambda module, _: seen.append((module.training, gpt2.training)))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    make_plan(gpt2, {"input_ids": tokens, "labels": tokens}, strategy=STRATEGY, budget_gib=1)
    assert set(seen) == {(False, True)}
    assert not frozen.training
    assert gpt2.transformer.h[1].training


class TakesMoreAgain(nn.Module):
    """A block that takes more memory in a second run than in the first, which is all that is measured of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        if torch._C._current_graph_task_id() != -1:  # in a backward
            x.detach().repeat(5, 1)
        return self.second(self.first(x).exp().tanh())


@pytest.fixture
def takes_more():
    """A model and a batch whose peaks are predicted too low."""
    torch.manual_seed(0)
    return nn.Sequential(*(TakesMoreAgain() for _ in range(8))), torch.randn(1024, 64)


def tensors_at_the_peak(model, batch):
    rise = peak_bytes(lambda: model(batch).sum().backward())
    model.zero_grad()
    return rise + batch.nbytes + sum(parameter.nbytes for parameter in model.parameters())


def peak_under(plan, model, batch):
    with apply_plan(model, plan):
        return tensors_at_the_peak(model, batch)


def test_a_plan_that_takes_more_than_was_predicted_is_not_given(takes_more):
    plain_bytes = tensors_at_the_peak(*takes_more)
    over = []
    for share in (0.6, 0.68, 0.74, 0.84):
        budget_bytes = int(share * plain_bytes)
        over.append(peak_under(predicted_to_fit(*takes_more, budget_bytes), *takes_more) > budget_bytes)
        plan = make_plan(*takes_more, strategy=STRATEGY, budget_gib=budget_bytes / GIB, static=StaticMemory())
        assert peak_under(plan, *takes_more) <= budget_bytes
    assert any(over)


def test_a_budget_that_no_plan_stays_within_is_refused(takes_more):
    model, batch = takes_more
    smallest = peak_under(plan_blocks(model, "full"), model, batch)
    with pytest.raises(InputError, match=r"^budget_gib .* a smaller batch$"):
        make_plan(model, batch, strategy=STRATEGY, budget_gib=0.5 * smallest / GIB, static=StaticMemory())


@pytest.mark.parametrize("arguments", [{"strategy": "segments:99"}, {"strategy": "no"}, {"strategy": "budget"}])
def test_errors_speak_of_parameters(takes_more, arguments):
    with pytest.raises(InputError, match=rf"^strategy {arguments['strategy']}: ") as error:
        make_plan(*takes_more, **arguments)
    assert "--" not in str(error.value)


def test_only_so_many_plans_are_tried_out(takes_more, monkeypatch):
    module = sys.modules["memsave_recipes.core.planner.make_plan"]  # the package has the function by its name
    monkeypatch.setattr(module, "MAX_TRIALS", 1)
    monkeypatch.setattr(module, "step_bytes", lambda *_: GIB + 1)
    with pytest.raises(InputError, match=r"^budget_gib 1: .* none of the 1 plans .* works with 1\.0001"):
        make_plan(*takes_more, strategy=STRATEGY, budget_gib=1, static=StaticMemory())


def predicted_to_fit(model, batch, budget_bytes):
    stacks = [[name for name, _ in model.named_children()]]
    workload = workload_of(model, lambda model, batch: model(batch).sum(), batch, stacks)
    measured = measure(workload, plans_to_measure(STRATEGY, workload))
    return forecast(measured, budget_bytes, StaticMemory()).plan


def test_trying_out_leaves_no_trace(takes_more):
    model, batch = takes_more
    random_state = torch.get_rng_state()
    make_plan(model, batch, strategy=STRATEGY, budget_gib=1, static=StaticMemory())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("strategy", [*(pytest.param(one, marks=pytest.mark.slow) for one in SLOW), *STRATEGIES])
def test_the_prediction_is_the_step_that_follows(gpt2, strategy):
    tokens = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    budget_gib = BUDGET_GIB if strategy == STRATEGY else None
    plan = make_plan(gpt2.train(), batch, strategy=strategy, budget_gib=budget_gib, predict=True)
    baseline_bytes = step_bytes(gpt2, batch)
    with apply_plan(gpt2, plan):
        planned_bytes = step_bytes(gpt2, batch)
    assert plan.prediction.peak_bytes == pytest.approx(planned_bytes, rel=0.01)
    assert plan.prediction.baseline_peak_bytes == pytest.approx(baseline_bytes, rel=0.01)
    assert plan.prediction.baseline_s > 0
    assert (plan.prediction.added_s > 0) is (strategy != "none")


def test_a_plan_prints_its_prediction_and_does_not_write_it(gpt2):
    tokens = torch.zeros(2, 16, dtype=torch.long)
    plan = make_plan(gpt2, {"input_ids": tokens, "labels": tokens}, strategy="segments:2", predict=True)
    first, second, *table = str(plan).splitlines()
    assert first == plan.describe()
    assert second.startswith("predicted peak ")
    assert "(baseline " in second
    assert len(table) == 1 + len(plan.spans)
    assert all(word in table[1] for word in ("transformer.h.0", "recompute", "iB", "ms"))
    figures = json.loads(plan.prediction.to_json())
    assert figures["peak_bytes"] == plan.prediction.peak_bytes
    assert [span["action"] for span in figures["spans"]] == [span.action for span in plan.spans]
    assert "prediction" not in json.loads(plan.to_json())
    assert Plan.from_json(plan.to_json()) == plan
    without_batch = make_plan(gpt2, strategy="segments:2")
    assert without_batch == plan
    assert without_batch.prediction is None
    assert str(without_batch) == plan.describe()


class Loop(nn.Module):
    """Layers in a dictionary, of a class of their own."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

        def forward(self, x):
            return self.norm(torch.tanh(self.linear(x)))

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for name in self.layers:
            x = self.layers[name](x)
        return x


def test_blocks_by_their_class_and_in_a_dictionary():
    model, x = Loop(nn.ModuleDict({name: Loop.Layer() for name in "abc"})), torch.ones(4, 32)
    expected = make_plan(model, x, strategy="full", blocks=["layers.a", "layers.b", "layers.c"])
    assert make_plan(model, x, strategy="full", blocks=Loop.Layer) == expected
    assert make_plan(model, x, strategy="full") == expected
    plain = model(x).sum()
    plain.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with apply_plan(model, expected):
        model(x).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    with pytest.raises(InputError, match="blocks Conv2d: Loop has no such modules"):
        make_plan(model, x, strategy="full", blocks=nn.Conv2d)


def test_where_memory_is_short_the_blocks_are_measured_in_groups(gpt2, monkeypatch):
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    batch, numbers = {"input_ids": tokens, "labels": tokens}, []
    at_once = make_plan(gpt2.train(), batch, strategy="full", predict=True).prediction

    def short(workload, plans, num_groups, **others):
        numbers.append(num_groups)
        if num_groups < 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return measure_in_groups(workload, plans, num_groups, **others)

    monkeypatch.setattr(trial_step, "measure_in_groups", short)
    in_groups = make_plan(gpt2, batch, strategy="full", predict=True).prediction
    assert numbers == [1, 2, 3]
    assert in_groups.peak_bytes == pytest.approx(at_once.peak_bytes, rel=0.01)


def test_the_state_of_the_given_optimizer_counts(gpt2):
    tokens = torch.randint(0, 256, (2, 64))
    peaks = [
        make_plan(
            gpt2, {"input_ids": tokens, "labels": tokens}, strategy="full", optimizer=optimizer, predict=True
        ).prediction.peak_bytes
        for optimizer in (None, AdamW(gpt2.parameters()), torch.optim.SGD(gpt2.parameters()))
    ]
    weights_bytes = sum(parameter.nbytes for parameter in gpt2.parameters())
    assert abs(peaks[1] - peaks[0]) < 1000  # AdamW's counters of steps
    assert abs(peaks[0] - peaks[2] - 2 * weights_bytes) < 1000
