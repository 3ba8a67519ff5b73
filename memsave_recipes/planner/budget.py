"""The fastest plan for a memory budget, from measured costs.

Keeping, selecting operators, offloading (where there is a host to offload to) and compiling (where a layer repeats and
a compiler is there) are measured on this device with this batch; recomputing follows from keeping. The solver of
``plans/budget.py`` then takes the least added time that fits, once for every ratio of compiled memory, since a plan has
one, and once with offloading, which sets memory aside.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from memsave_recipes.activations import find_stacks
from memsave_recipes.activations.compiled import check_compiler
from memsave_recipes.activations.stacks import Layers
from memsave_recipes.costs import Measurement, Workload
from memsave_recipes.errors import InputError
from memsave_recipes.planner.beside import Beside
from memsave_recipes.plans import BUDGET_WORDS, Plan, plan_for
from memsave_recipes.plans.budget import smallest_feasible, solve
from memsave_recipes.plans.chain import Chain
from memsave_recipes.plans.simulate import Moment, host_bytes, simulate, span_costs

COMPILED_RATIOS = (0.3, 0.5, 0.7)
RESERVE = 0.01  # of what plain holds for its backward: for what a chain does not know of
WORTH_ROUNDING = 0.01  # of plain's step: what compiling has to save before it is preferred to plain's very bits


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A plan, and what it is expected to take."""

    plan: Plan
    chain: Chain

    @property
    def peak(self) -> Moment:
        """The moment of a step at which most lives."""
        return simulate(self.chain, self.plan).peak

    @property
    def host_bytes(self) -> int:
        """What it pins of the host's memory at most."""
        return host_bytes(self.chain, self.plan)

    @property
    def reserve_bytes(self) -> int:
        """Kept free for what a chain does not know of: 1 % of what plain holds for its backward."""
        return reserve_bytes(self.chain)

    @property
    def plain_peak_bytes(self) -> int:
        """The peak of keeping everything."""
        return simulate(self.chain, keep_all(self.chain)).peak_bytes

    @property
    def plain_s(self) -> float:
        """Seconds of one plain forward and backward."""
        return sum(block.forward_s + block.backward_s for block in self.chain.blocks)

    @property
    def added_s(self) -> float:
        """Seconds that the plan adds to that; below 0 where it is faster than plain."""
        return simulate(self.chain, self.plan).added_s

    @property
    def micro_batch_s(self) -> float:
        """Seconds of one forward and backward under the plan."""
        return self.plain_s + self.added_s


def keep_all(chain: Chain) -> Plan:
    """The plain plan of a chain."""
    return plan_for("none", [chain.decided_names])


def plans_to_measure(strategy: str, workload: Workload, *, device_type: str, compiles: bool = True) -> list[Plan]:
    """The plans that have to be measured for a strategy; the first keeps everything.

    Args:
        device_type: of the step; a CPU has no host to offload to.
        compiles: whether there is a device to compile for.
    """
    words = ["none"]
    if strategy in BUDGET_WORDS:
        words += ["selective"] if device_type == "cpu" else ["selective", "offload"]
        if compiles and strategy == "budget" and _can_compile(workload.model):
            words += [f"compiled:{ratio}" for ratio in COMPILED_RATIOS]
    elif strategy.partition(":")[0] in ("selective", "offload", "compiled"):
        words.append(strategy)
    return [plan_for(word, workload.stacks) for word in words]


def _can_compile(model: nn.Module) -> bool:
    """Whether its layers repeat and a compiler is there."""
    stacks = find_stacks(model)
    try:
        check_compiler(model)
    except InputError:
        return False
    return bool(stacks) and all(isinstance(stack, Layers) for stack in stacks)


def forecast(
    measurement: Measurement,
    budget_bytes: int,
    beside: Beside,
    *,
    missed_bytes: int = 0,
    host_budget_bytes: int | None = None,
) -> Forecast:
    """The fastest plan whose predicted peak stays below ``budget_bytes``.

    Where a plan with compiled blocks is hardly faster, one that keeps plain's bits is taken.

    Args:
        missed_bytes: by which a prediction was seen to be too low: kept free, where the reserve is less.
        host_budget_bytes: of the host, for what is offloaded; ``None`` where it is not known.

    Raises:
        InputError: no plan fits; the message names the smallest budget that one fits in, and what needs it.
    """
    best: Forecast | None = None
    refusals: dict[int, InputError] = {}  # by the smallest budget that would do
    for chain in (beside.added_to(chain) for chain in _chains(measurement)):
        reserved = _with_reserve(chain, missed_bytes)
        try:
            found = Forecast(plan=solve(reserved, budget_bytes), chain=chain)
        except InputError as refusal:
            refusals[smallest_feasible(reserved)] = refusal
        else:
            is_best = best is None or found.added_s < best.added_s - WORTH_ROUNDING * best.plain_s
            if is_best and fits_host(found, host_budget_bytes):
                best = found
    if best is None:
        raise refusals[min(refusals)]
    return best


def least_memory(measurement: Measurement, beside: Beside, host_budget_bytes: int | None = None) -> Forecast:
    """The plan with the lowest predicted peak of all that the host has memory for."""
    chains = [beside.added_to(chain) for chain in _chains(measurement)]
    smallest = sorted(((smallest_feasible(_with_reserve(c)), c) for c in chains), key=lambda pair: pair[0])
    found = (Forecast(plan=solve(_with_reserve(chain), num_bytes), chain=chain) for num_bytes, chain in smallest)
    return next(one for one in found if fits_host(one, host_budget_bytes))  # without offloading, which takes none, any


def fits_host(found: Forecast, host_budget_bytes: int | None) -> bool:
    """Whether the host has the memory for what is offloaded; of a host that is not known, it has."""
    return host_budget_bytes is None or found.host_bytes <= host_budget_bytes


def _chains(measurement: Measurement) -> Iterator[Chain]:
    """Of everything bitwise but offloading, with that, and with each ratio of compiled memory."""
    yield measurement.chain()
    for plan, _ in measurement.seen:
        if plan.strategy == "offload":
            yield measurement.chain(offload=True)
        elif plan.compiled_memory_ratio is not None:
            yield measurement.chain(ratio=plan.compiled_memory_ratio)


def reserve_bytes(chain: Chain) -> int:
    """``Forecast.reserve_bytes``."""
    return int(RESERVE * sum(costs.held_bytes for costs in span_costs(chain, keep_all(chain))))


def _with_reserve(chain: Chain, missed_bytes: int = 0) -> Chain:
    return replace(chain, resident_bytes=chain.resident_bytes + max(reserve_bytes(chain), missed_bytes))
