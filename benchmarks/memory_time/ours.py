"""Ours: the plans that ``--activation_checkpointing budget`` makes, from the smallest budget that works to plain's."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from models import Work

from memory_time.methods import BITWISE, BUDGET, Extent, Method, applied
from memsave_recipes.core.activations import block_names, find_stacks
from memsave_recipes.core.costs.block_costs import Measurement, Workload, measure
from memsave_recipes.core.planner.budget import RESERVE, StaticMemory, forecast, keep_all, plans_to_measure
from memsave_recipes.core.plans import Plan
from memsave_recipes.core.plans.chain import Chain
from memsave_recipes.core.plans.simulate import simulate, span_costs
from memsave_recipes.core.plans.solver import smallest_feasible
from memsave_recipes.core.text import format_bytes
from memsave_recipes.models.causal_lm import LossKind

CLOSE = 0.01  # of plain's activations: budgets nearer than that share the smaller one


def ours(work: Work, extent: Extent, peaks: Sequence[int]) -> Iterator[Method]:
    """Plans for even budgets from the smallest to plain's, and for the peaks that others reached.

    Args:
        peaks: bytes of a forward and backward above what is resident.
    """
    loss: LossKind = "chunked" if work.is_language_model else "full"
    compiles = work.is_language_model and bool(extent.ratios)
    plans = [(BUDGET, _plans(_measure(work, loss, compiled=compiles), extent.num_budgets, peaks))]
    if compiles:
        plans.append((BITWISE, _plans(_measure(work, loss, compiled=False), extent.num_budgets, ())))
    for name, found in plans:
        for plan, budget_bytes in found.items():
            yield Method(
                series=name,
                name=f"{name} {format_bytes(budget_bytes)}",
                build=partial(applied, work, plan, loss),
                loss=loss,
                is_compiled=plan.compiled,
                budget_bytes=budget_bytes,
                plan=plan,
            )


def _measure(work: Work, loss: LossKind, *, compiled: bool) -> Measurement:
    model = work.copy(loss)
    workload = Workload(
        model=model,
        forward=lambda: work.loss_of(model),
        batch=list(work.batch.values()),
        device=work.device,
        stacks=block_names(find_stacks(model)),
    )
    strategy = "budget" if compiled else "budget:bitwise"
    return measure(workload, plans_to_measure(strategy, workload, compiled=compiled))


def _plans(measurement: Measurement, num_budgets: int, peaks: Sequence[int]) -> dict[Plan, int]:
    """Every plan with the smallest of the budgets that it was made for."""
    chain = measurement.chain()
    reserve = _reserve(chain)
    largest = simulate(chain, keep_all(chain)).peak_bytes + reserve
    smallest = min(largest, *(smallest_feasible(each) + _reserve(each) for each in _chains(measurement)))
    even = [smallest + (largest - smallest) * step // (num_budgets - 1) for step in range(num_budgets)]
    matched = [chain.resident_bytes + peak + reserve for peak in peaks]
    plans: dict[Plan, int] = {}
    last = 0
    for budget in sorted(budget for budget in {*even, *matched} if smallest <= budget <= largest):
        if budget in even or budget - last > CLOSE * (largest - chain.resident_bytes):
            last = budget
            plans.setdefault(forecast(measurement, budget, StaticMemory()).plan, budget - chain.resident_bytes)
    return plans


def _chains(measurement: Measurement) -> list[Chain]:
    """The costs, of compiled blocks also where they save a part, and those of spans that recompute at two levels."""
    return [measurement.chain(saves_part=True), replace(measurement.chain(), nested=True)]


def _reserve(chain: Chain) -> int:
    """What ``forecast`` leaves free; given on top, so that ours may be as large as what it is compared with."""
    return int(RESERVE * sum(costs.held_bytes for costs in span_costs(chain, keep_all(chain))))
