"""What ``memsave frontier`` shows, memory against time of every strategy; and the speed of a candidate."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from memsave_recipes.core.costs.block_costs import Measurement
from memsave_recipes.core.costs.throughput import utilization_pct
from memsave_recipes.core.planner.budget import least_memory
from memsave_recipes.core.planner.search import Candidate, SearchSpace
from memsave_recipes.core.planner.task import Estimates, Launch, Task, space_of
from memsave_recipes.core.plans import BUDGET_WORDS
from memsave_recipes.core.step.batch_layout import BatchLayout

EVERY = (2, 4)  # values of K in every:K
SEGMENTS = (2, 4, 8)  # values of K in segments:K
NUM_BUDGETS = 4  # plans of the solver for each micro-batch size, from the least memory to nearly the baseline's


def every_strategy(
    space: SearchSpace, measurement: Measurement, layout: BatchLayout, loss: str | None = None
) -> list[Candidate]:
    """Make the candidates of every strategy, and of the solver for ``NUM_BUDGETS`` budgets, for ``choose_for_target``.

    Where the flags name a strategy, only its candidates.
    """
    if space.strategy not in BUDGET_WORDS:
        return space.candidates(measurement, layout, loss)
    found = [one for one in space.candidates(measurement, layout, loss) if one.strategy not in BUDGET_WORDS]
    num_blocks = sum(map(len, measurement.workload.stacks))
    for strategy in [f"every:{k}" for k in EVERY] + [f"segments:{k}" for k in SEGMENTS]:
        if int(strategy.partition(":")[2]) <= num_blocks:
            found += replace(space, strategy=strategy).candidates(measurement, layout, loss)
    for budget_bytes in _budgets(space, measurement, layout, found):
        solved = replace(space, budget_bytes=budget_bytes).candidates(measurement, layout, loss)
        found += [replace(one, budget_bytes=space.budget_bytes) for one in solved if one.strategy in BUDGET_WORDS]
    first_of_equal = {(one.needed_bytes, one.step_s): one for one in reversed(found)}
    return list(first_of_equal.values())[::-1]


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """A candidate of a frontier; Pareto-optimal if no other one is as fast in as little memory."""

    candidate: Candidate
    is_optimal: bool


def points_of(candidates: Sequence[Candidate]) -> list[FrontierPoint]:
    """Return the candidates as points, marked where they are Pareto-optimal by prediction."""
    optimal: set[int] = set()
    fastest = 0.0
    for candidate in sorted(candidates, key=lambda one: (one.needed_bytes, -one.samples_per_s)):
        if candidate.samples_per_s > fastest:
            optimal.add(id(candidate))
            fastest = candidate.samples_per_s
    return [FrontierPoint(candidate=candidate, is_optimal=id(candidate) in optimal) for candidate in candidates]


def _budgets(
    space: SearchSpace, measurement: Measurement, layout: BatchLayout, found: Sequence[Candidate]
) -> list[int]:
    """List budgets from the least that a plan needs, or one of ``found`` in shards, to nearly that of the first one."""
    baseline = found[0]
    if space.in_shards is None:
        least_bytes = replace(baseline, forecast=least_memory(measurement, space.static(layout))).needed_bytes
    else:
        least_bytes = min(one.needed_bytes for one in found)
    saved_bytes = baseline.needed_bytes - least_bytes
    return [least_bytes + saved_bytes * part // NUM_BUDGETS for part in range(NUM_BUDGETS)]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What the seconds of a step mean.

    Args:
        bound_s: of the same step by the data sheet.
        tokens_per_s: over all ranks, where samples are rows of tokens.
        mfu_pct: the share of the device's peak that the model's FLOPs are, as ``utilization_pct`` has it of a run;
            ``None`` where the peak is not known.
    """

    bound_s: float
    tokens_per_s: float | None
    mfu_pct: float | None


def speed_of(task: Task, launch: Launch, candidate: Candidate) -> Speed:
    """Return the speed of a candidate of ``choose_for_target``."""
    rows = task.micro_batch(1).get("input_ids")
    tokens_per_s = rows.numel() * candidate.samples_per_s if isinstance(rows, Tensor) else None
    if launch.rates is launch.target:
        return Speed(bound_s=candidate.step_s, tokens_per_s=tokens_per_s, mfu_pct=None)
    layout, loss = candidate.layout, candidate.loss
    estimates = Estimates(task, replace(launch, by_data_sheet=True))
    found = space_of(task, estimates.launch, estimates.model, candidate.budget_bytes)
    space = replace(found, plan=candidate.forecast.plan, reductions=(candidate.reduces_once,))
    plans_of = replace(space, strategy=candidate.strategy).plans_of
    (bound,) = space.candidates(estimates.of(layout, loss, plans_of), layout, loss)
    flops = estimates.model_flops(layout, loss)
    rates = {precision: count * layout.forwards_per_step / candidate.step_s for precision, count in flops.items()}
    mfu_pct = utilization_pct(rates, launch.target.name)
    return Speed(bound_s=bound.step_s, tokens_per_s=tokens_per_s, mfu_pct=mfu_pct)
