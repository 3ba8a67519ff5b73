"""A plan made for a budget: fits, is predicted, recomputes what it says and changes not a bit."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel
from workloads import peak_bytes, workload_of

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.costs.block_costs import Workload, measure
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.budget import StaticMemory, forecast, keep_all, plans_to_measure
from memsave_recipes.core.plans import Action, Plan, Span
from memsave_recipes.core.plans.simulate import simulate

LARGE = [pytest.param(name, marks=pytest.mark.slow) for name in ("vgg16", "densenet121")]
MODELS = [*LARGE, pytest.param("resnet50", marks=pytest.mark.slow), "vit", "gpt2", "llama"]
NUM_BUDGETS, NUM_PLANS = 3, 4


@dataclass
class Costed:
    """A case with what was measured of it."""

    case: object
    workload: Workload
    measurement: object
    static: StaticMemory

    @property
    def chain(self):
        return self.measurement.chain()

    def budgets(self, count=NUM_BUDGETS):
        """From the smallest that works to what plain needs."""
        smallest = smallest_bytes(self)
        plain = simulate(self.chain, keep_all(self.chain)).peak_bytes
        return [smallest + (plain - smallest) * step // (count - 1) for step in range(count)]


def smallest_bytes(costed):
    with pytest.raises(InputError, match="the smallest that works is") as refusal:
        forecast(costed.measurement, 0, costed.static)
    words = str(refusal.value).partition("works is ")[2]
    return int(float(words.partition(",")[0]) * 1024**3)


@pytest.fixture(scope="module", params=MODELS)
def costed(request):
    case = request.getfixturevalue("build_case")(request.param)
    if request.param == "vgg16":  # images large enough that its activations count beside its 512 MiB of gradients
        case.batch = torch.randn(3, 3, 96, 96, generator=torch.Generator().manual_seed(1))
    if config := getattr(case.model, "config", None):
        config.use_cache = False  # as the recipes have it
    workload = workload_of(case.model, case.loss_of, case.batch)
    plans = plans_to_measure("budget:bitwise", workload)
    return Costed(case, workload, measure(workload, plans), StaticMemory())


def step(case):
    case.model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = case.loss_of(case.model, case.batch)
    loss.backward()
    return loss


def peak_of_step(costed):
    """The most that a step adds to what is there before it."""
    costed.case.model.zero_grad(set_to_none=True)
    return peak_bytes(lambda: costed.workload.forward().backward())


def record_of_step(case, buffers):
    for buffer, before in zip(case.model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    loss = step(case)
    record = {f"gradient of {name}": parameter.grad for name, parameter in case.model.named_parameters()}
    record |= {f"buffer {name}": buffer for name, buffer in case.model.named_buffers()}
    record |= {"loss": loss.detach(), "rng": torch.get_rng_state()}
    return {name: tensor.clone() for name, tensor in record.items()}


def test_plans_fit_their_budgets_and_peak_where_they_were_predicted(costed):
    resident = costed.chain.resident_bytes
    for budget in costed.budgets():
        found = forecast(costed.measurement, budget, costed.static)
        with apply_plan(costed.case.model, found.plan):
            measured = resident + peak_of_step(costed)
        assert measured <= budget
        assert measured <= found.peak.total_bytes <= measured + 0.01 * (measured - resident)


def test_any_plan_peaks_where_it_was_predicted(costed):
    """Whatever times the blocks take: the solver chooses among all plans."""
    rng = random.Random(0)
    resident = costed.chain.resident_bytes
    for _ in range(NUM_PLANS):
        plan = random_plan(costed.workload.stacks, rng)
        predicted = simulate(costed.chain, plan).peak_bytes
        with apply_plan(costed.case.model, plan):
            measured = resident + peak_of_step(costed)
        assert measured <= predicted <= measured + 0.01 * (measured - resident), plan


def random_plan(stacks, rng):
    """Spans of up to ``longest`` blocks under actions that are drawn."""
    longest, actions = rng.choice([1, 2, 4, 64]), (Action.KEEP, Action.RECOMPUTE, Action.SELECT_OPS)
    blocks = [(name, number) for number, names in enumerate(stacks) for name in names]
    spans = []
    while (start := spans[-1].stop if spans else 0) < len(blocks):
        left = sum(number == blocks[start][1] for _, number in blocks[start:])
        length = min(left, rng.randint(1, longest))
        spans.append(Span(start=start, stop=start + length, action=rng.choice(actions)))
    return Plan(strategy="random", blocks=tuple(name for name, _ in blocks), spans=tuple(spans))


def test_every_budget_leaves_gradients_buffers_and_random_numbers_as_they_are(costed):
    case = costed.case
    buffers = [buffer.clone() for buffer in case.model.buffers()]
    expected = record_of_step(case, buffers)
    for budget in costed.budgets():
        with apply_plan(case.model, forecast(costed.measurement, budget, costed.static).plan):
            record = record_of_step(case, buffers)
        assert [name for name in expected if not torch.equal(record[name], expected[name])] == []


def test_tighter_budgets_never_add_less_time(costed):
    """With the noise of the measured times, as the solver counts it."""
    added = [forecast(costed.measurement, budget, costed.static).surely_added_s for budget in costed.budgets()]
    assert added == sorted(added, reverse=True)


def flops_of(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_recomputed_flops_are_those_of_the_spans_that_recompute(costed):
    """Each span alone recomputes some FLOPs; a plan recomputes the sum of its spans', and selected operators none."""
    case = costed.case
    plain = flops_of(lambda: step(case))
    for budget in costed.budgets():
        plan = forecast(costed.measurement, budget, costed.static).plan
        alone = 0
        for span in plan.spans:
            if span.action is Action.RECOMPUTE:
                with apply_plan(case.model, only(plan, span)):
                    alone += flops_of(lambda: step(case)) - plain
        with apply_plan(case.model, plan):
            assert flops_of(lambda: step(case)) - plain == alone


def only(plan, span):
    """``plan`` with everything kept but ``span``."""
    spans = [s if s == span else replace(s, action=Action.KEEP) for s in plan.spans]
    return replace(plan, spans=tuple(spans))


def test_measuring_leaves_no_trace(costed):
    case = costed.case
    step(case)
    gradients = [parameter.grad for parameter in case.model.parameters()]
    before = [*(buffer.clone() for buffer in case.model.buffers()), torch.get_rng_state()]
    measure(costed.workload, [plan_blocks(case.model, "none")])
    after = [*case.model.buffers(), torch.get_rng_state()]
    assert all(torch.equal(then, now) for then, now in zip(before, after, strict=True))
    assert all(then is parameter.grad for then, parameter in zip(gradients, case.model.parameters(), strict=True))


@pytest.mark.slow  # compiles three times
def test_compiled_plans_fit_and_are_predicted_too(build_case):
    case = build_case("gpt2")
    case.model.config.use_cache = False
    case.batch = torch.randint(0, 256, (8, 128), generator=torch.Generator().manual_seed(1))
    case.model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_layer=4, n_head=4, n_embd=128)).train()
    workload = workload_of(case.model, case.loss_of, case.batch)
    measurement = measure(workload, plans_to_measure("budget", workload, compiled=True))
    ratios = [plan.ratios[0] for plan, _ in measurement.traces if plan.ratios]
    assert ratios == [0.3, 0.5, 0.7]
    costed = Costed(case, workload, measurement, StaticMemory())
    resident = costed.chain.resident_bytes
    compiled = 0
    for budget in costed.budgets(5):
        found = forecast(measurement, budget, StaticMemory())
        compiled += not found.plan.is_bitwise
        with apply_plan(case.model, found.plan):
            step(case)  # compiles
            measured = resident + peak_of_step(costed)
        assert measured <= budget
        assert abs(found.peak.total_bytes - measured) <= 0.02 * (measured - resident)
        assert Plan.from_json(found.plan.to_json()) == found.plan
    assert compiled
