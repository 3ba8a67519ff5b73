"""What lives on the device beside a forward and backward: optimizer state, DDP's buckets, what torch cannot count.

The fastest plan for a memory budget, from measured costs.

Keeping, selecting operators, offloading (where there is a host to offload to) and compiling (where a layer repeats and
a compiler is there) are measured on this device with this batch; recomputing follows from keeping. The solver of
``plans/solver.py`` then takes the least added time that fits, once for every ratio of compiled memory, since a plan has
one, and once with offloading, which sets memory aside.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import psutil
import torch
from torch import nn

from memsave_recipes.activations import find_stacks
from memsave_recipes.activations.blocks import CalledLayers
from memsave_recipes.activations.compiled import check_compiler
from memsave_recipes.errors import InputError
from memsave_recipes.estimate.targets import Target
from memsave_recipes.plans import BUDGET_WORDS, Plan, plan_for
from memsave_recipes.plans.chain import Chain
from memsave_recipes.plans.simulate import TimelinePoint, host_bytes, simulate, span_costs
from memsave_recipes.plans.solver import smallest_feasible, solve
from memsave_recipes.profiling.block_costs import Measurement, Workload
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.batch_layout import BatchLayout
from memsave_recipes.training.optimizers import state_bytes

WORKSPACES = "workspaces"
"""Of the overheads the one that torch counts as allocated."""

MULTIPLYING_THREADS = 2
"""The forward's and that of autograd's backward: each has a cuBLAS handle, and torch a workspace for each handle and
stream (its notes on CUDA). An assumption: it has not been measured on a device yet."""

FRAGMENTATION = 0.05
"""Of a device's memory, what is left to its allocator: predictions are of allocated bytes, while a device is full of
reserved ones, which lie in blocks that no request fits. An assumption, of the order that full devices show."""


@dataclass(frozen=True, kw_only=True)
class StaticMemory:
    """What lives on the device beside the parameters, the buffers, the batch and what a forward and backward make.

    Args:
        state_bytes: what the optimizer keeps.
        buckets_bytes: those of DDP.
        gradients_resident: whether an earlier micro-batch's gradients are there already.
        gradients_stay: whether the gradient of a parameter outlives the backward of its block. One that goes into a
            bucket of DDP or is used up at once does not.
        optimizer_bytes: what the optimizer's update needs for itself.
    """

    state_bytes: int = 0
    buckets_bytes: int = 0
    gradients_resident: bool = False
    gradients_stay: bool = True
    optimizer_bytes: int = 0

    def added_to(self, chain: Chain) -> Chain:
        """``chain`` with all this in it."""
        blocks = chain.blocks if self.gradients_stay else [replace(block, gradient_bytes=0) for block in chain.blocks]
        return replace(
            chain,
            blocks=tuple(blocks),
            resident_bytes=chain.resident_bytes + self.state_bytes + self.buckets_bytes,
            gradients_resident=self.gradients_resident or not self.gradients_stay,
            optimizer_bytes=self.optimizer_bytes,
        )


def static_memory_of(optim: OptimizerArguments, model: nn.Module, layout: BatchLayout) -> StaticMemory:
    """What a run holds besides its forward and backward.

    Under DDP the gradients live in its buckets from the start; under accumulation the micro-batches' own do as well.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state = state_bytes(optim.optimizer, trained, momentum=optim.momentum)
    buckets = sum(parameter.nbytes for parameter in trained) if layout.num_processes > 1 else 0
    accumulates = layout.accumulation_steps > 1
    return StaticMemory(
        state_bytes=state,
        buckets_bytes=buckets,
        gradients_resident=accumulates,
        gradients_stay=not optim.optimizer_in_backward and not (buckets and not accumulates),
    )


def usable_bytes(memory_bytes: int, device_type: str) -> int:
    """Of a device's whole memory, what a run without a budget may take; ``FRAGMENTATION`` is left."""
    return memory_bytes if device_type == "cpu" else int((1 - FRAGMENTATION) * memory_bytes)


def usable_host_bytes(device: torch.device) -> int | None:
    """Of this machine's memory, what is available to each of its ranks; ``None`` on a CPU, where nothing is offloaded.

    Known limit: a container's own limit is not in it.
    """
    if device.type == "cpu":
        return None
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def overheads_of_target(target: Target) -> dict[str, int]:
    """Bytes that a device of this kind takes besides the tensors, by what they are for."""
    workspaces_bytes = MULTIPLYING_THREADS * target.cublas_workspace_bytes
    lines = {"CUDA context": target.context_bytes, WORKSPACES: workspaces_bytes}
    return {name: num_bytes for name, num_bytes in lines.items() if num_bytes}


def overheads_of_device(device: torch.device) -> dict[str, int]:
    """What an accelerator that is here holds besides what torch holds of it; nothing on a CPU."""
    if device.type == "cpu":
        return {}
    free, total = torch.get_device_module(device).mem_get_info(device)
    return {"device context": max(0, total - free - torch.accelerator.memory_reserved(device))}


def workspaces_of_device(device: torch.device, known_bytes: int) -> dict[str, int]:
    """What torch holds on an accelerator besides ``known_bytes`` of tensors once steps have run; nothing on a CPU."""
    if device.type == "cpu":
        return {}
    return {WORKSPACES: max(0, torch.accelerator.memory_allocated(device) - known_bytes)}


COMPILED_RATIOS = (0.3, 0.5, 0.7)
RESERVE = 0.01  # of what plain holds for its backward: for what a chain does not know of
WORTH_ROUNDING = 0.01  # of plain's step: what compiling has to save before it is preferred to plain's very bits


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A plan, and what it is expected to take."""

    plan: Plan
    chain: Chain

    @property
    def peak(self) -> TimelinePoint:
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
    return bool(stacks) and all(isinstance(stack, CalledLayers) for stack in stacks)


def forecast(
    measurement: Measurement,
    budget_bytes: int,
    static: StaticMemory,
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
    for chain in (static.added_to(chain) for chain in _chains(measurement)):
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


def least_memory(measurement: Measurement, static: StaticMemory, host_budget_bytes: int | None = None) -> Forecast:
    """The plan with the lowest predicted peak of all that the host has memory for."""
    chains = [static.added_to(chain) for chain in _chains(measurement)]
    smallest = sorted(((smallest_feasible(_with_reserve(c)), c) for c in chains), key=lambda pair: pair[0])
    found = (Forecast(plan=solve(_with_reserve(chain), num_bytes), chain=chain) for num_bytes, chain in smallest)
    return next(one for one in found if fits_host(one, host_budget_bytes))  # without offloading, which takes none, any


def fits_host(found: Forecast, host_budget_bytes: int | None) -> bool:
    """Whether the host has the memory for what is offloaded; of a host that is not known, it has."""
    return host_budget_bytes is None or found.host_bytes <= host_budget_bytes


def _chains(measurement: Measurement) -> Iterator[Chain]:
    """Of everything bitwise but offloading, with that, and with each ratio of compiled memory."""
    yield measurement.chain()
    for plan, _ in measurement.traces:
        if plan.strategy == "offload":
            yield measurement.chain(offload=True)
        elif plan.compiled_memory_ratio is not None:
            yield measurement.chain(ratio=plan.compiled_memory_ratio)


def reserve_bytes(chain: Chain) -> int:
    """``Forecast.reserve_bytes``."""
    return int(RESERVE * sum(costs.held_bytes for costs in span_costs(chain, keep_all(chain))))


def _with_reserve(chain: Chain, missed_bytes: int = 0) -> Chain:
    return replace(chain, resident_bytes=chain.resident_bytes + max(reserve_bytes(chain), missed_bytes))
