"""The fastest plan for a memory budget, from measured costs.

Keeping, selecting operators, offloading (where there is a host to offload to) and compiling (where a layer repeats and
a compiler is there) are measured on this device with this batch; recomputing follows from keeping. The solver of
``plans/budget.py`` then takes the least added time that fits, once for every ratio of compiled memory, since a plan has
one, and once with offloading, which sets memory aside.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from memsave_recipes.activations import find_stacks
from memsave_recipes.activations.compiled import check_compiler
from memsave_recipes.activations.stacks import Layers
from memsave_recipes.costs import Measurement
from memsave_recipes.errors import InputError
from memsave_recipes.plans import Plan, plan_for
from memsave_recipes.plans.budget import smallest_feasible, solve
from memsave_recipes.plans.chain import Chain
from memsave_recipes.plans.simulate import Moment, simulate, span_costs

COMPILED_RATIOS = (0.3, 0.5, 0.7)
RESERVE = 0.01  # of what plain holds for its backward: for what a chain does not know of
WORTH_ROUNDING = 0.01  # of plain's step: what compiling has to save before it is preferred to plain's very bits


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What lives on the device beside the parameters, the buffers, the batch and what a forward and backward make.

    Args:
        resident_bytes: optimizer state, and the buckets of DDP.
        gradients_resident: whether an earlier micro-batch's gradients are there already.
        gradients_stay: whether the gradient of a parameter outlives the backward of its block. One that goes into a
            bucket of DDP or is used up at once does not.
        optimizer_bytes: what the optimizer's update needs for itself.
    """

    resident_bytes: int = 0
    gradients_resident: bool = False
    gradients_stay: bool = True
    optimizer_bytes: int = 0


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


def keep_all(chain: Chain) -> Plan:
    """The plain plan of a chain."""
    return plan_for("none", [chain.decided_names])


def uniform_plans(model: nn.Module, stacks: Sequence[Sequence[str]], *, bitwise: bool) -> list[Plan]:
    """The plans that have to be measured for a budget; the first keeps everything."""
    words = ["none", "selective"]
    if next(model.parameters()).device.type not in ("cpu", "meta"):
        words.append("offload")
    if not bitwise and _can_compile(model):
        words += [f"compiled:{ratio}" for ratio in COMPILED_RATIOS]
    return [plan_for(word, stacks) for word in words]


def _can_compile(model: nn.Module) -> bool:
    """Whether its layers repeat and a compiler is there."""
    stacks = find_stacks(model)
    try:
        check_compiler(model)
    except InputError:
        return False
    return bool(stacks) and all(isinstance(stack, Layers) for stack in stacks)


def forecast(measurement: Measurement, budget_bytes: int, beside: Beside) -> Forecast:
    """The fastest plan whose predicted peak stays below ``budget_bytes``.

    Where a plan with compiled blocks is hardly faster, one that keeps plain's bits is taken.

    Raises:
        InputError: no plan fits; the message names the smallest budget that one fits in, and what needs it.
    """
    best: Forecast | None = None
    refusals: dict[int, InputError] = {}  # by the smallest budget that would do
    for chain in (_beside(chain, beside) for chain in _chains(measurement)):
        try:
            found = Forecast(plan=solve(_with_reserve(chain), budget_bytes), chain=chain)
        except InputError as refusal:
            refusals[smallest_feasible(_with_reserve(chain))] = refusal
        else:
            if best is None or found.added_s < best.added_s - WORTH_ROUNDING * best.plain_s:
                best = found
    if best is None:
        raise refusals[min(refusals)]
    return best


def _chains(measurement: Measurement) -> Iterator[Chain]:
    """Of everything bitwise but offloading, with that, and with each ratio of compiled memory."""
    yield measurement.chain()
    for plan, _ in measurement.seen:
        if plan.strategy == "offload":
            yield measurement.chain(offload=True)
        elif plan.compiled_memory_ratio is not None:
            yield measurement.chain(ratio=plan.compiled_memory_ratio)


def _beside(chain: Chain, beside: Beside) -> Chain:
    blocks = chain.blocks if beside.gradients_stay else [replace(block, gradient_bytes=0) for block in chain.blocks]
    return replace(
        chain,
        blocks=tuple(blocks),
        resident_bytes=chain.resident_bytes + beside.resident_bytes,
        gradients_resident=beside.gradients_resident,
        optimizer_bytes=beside.optimizer_bytes,
    )


def _with_reserve(chain: Chain) -> Chain:
    held = sum(costs.held_bytes for costs in span_costs(chain, keep_all(chain)))
    return replace(chain, resident_bytes=chain.resident_bytes + int(RESERVE * held))
