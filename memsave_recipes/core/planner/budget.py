"""The fastest plan for a memory budget, with the memory that a run needs besides its forward and backward.

``static_memory_of`` is that of the optimizer and of DDP, ``overheads_of_*`` that of the device. ``forecast`` asks the
solver for the plan that adds least time and fits, under each set of actions that a plan may have.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from memsave_recipes.core.activations import find_stacks
from memsave_recipes.core.activations.blocks import CalledLayers, find_parts
from memsave_recipes.core.activations.compiled import NEVER_COMPILED, check_compiler
from memsave_recipes.core.activations.micro_batches import joined_batchnorm
from memsave_recipes.core.activations.offload import HOST_MEMORY
from memsave_recipes.core.activations.streaming import stream_of, streamed_parameters
from memsave_recipes.core.activations.tiles import find_mlps
from memsave_recipes.core.costs.block_costs import Measurement, Workload
from memsave_recipes.core.costs.memory import read_device_use
from memsave_recipes.core.costs.targets import UNKNOWN_HOST, Host, Target
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.host import step as host_step
from memsave_recipes.core.plans import BUDGET_WORDS, Plan, plan_for
from memsave_recipes.core.plans.chain import CPU, Chain, StaticMemory, allocated_bytes
from memsave_recipes.core.plans.plan import (
    MLP_TILE_TOKENS,
    OFFLOADING_STRATEGIES,
    TILED_STRATEGIES,
    UNIFORM_STRATEGIES,
    offloads,
)
from memsave_recipes.core.plans.prediction import Prediction, SpanPrediction
from memsave_recipes.core.plans.shards import ShardedUnit, Shards, communication_s, peak_in_shards
from memsave_recipes.core.plans.simulate import Simulation, TimelinePoint, keep_all, simulate, span_costs
from memsave_recipes.core.plans.solver import smallest_feasible, solve
from memsave_recipes.core.sharding.units import largest_shards
from memsave_recipes.core.step.batch_layout import BatchLayout, GradientSums
from memsave_recipes.core.step.memory import (
    as_stepped,
    clipping_bytes,
    losses_bytes,
    optimizer_memory,
    trained_parameters,
)
from memsave_recipes.core.step.settings import OptimizerSettings
from memsave_recipes.core.text import format_bytes

WORKSPACES = "workspaces"
"""The one of the overheads that torch counts as allocated."""

MULTIPLYING_THREADS = 2
"""The thread of the forward and that of autograd's backward: each has a cuBLAS handle, and torch has a workspace for
each handle and stream (its notes on CUDA). An assumption: not measured on a device yet."""

FRAGMENTATION = 0.05
"""The share of a device's memory that is left to its allocator: predictions are of allocated bytes, while a device is
full of reserved ones, some of them in blocks that no request fits. An assumption, of the order of full devices."""

COMPILED_RATIOS: tuple[float, ...] = (0.3, 0.5, 0.7)
RESERVE = 0.01
"""Kept free, of the activations that the baseline saves for backward. On a CPU no prediction errs low, but nothing has
been measured on an accelerator yet, and rounding and workspaces there are known only in part."""

LONG_ROW = 8 * MLP_TILE_TOKENS
"""Tokens from which inputs of layers with tiles are tried on the host: each more strategy takes time to plan."""

MIN_GAIN = 0.01  # of the baseline's step: time that compiling must save before its rounding is accepted


def static_memory_of(
    optim: OptimizerSettings,
    model: nn.Module,
    layout: BatchLayout,
    *,
    num_shards: int | None = None,
    logging_steps: int = 1,
    device: torch.device = CPU,
) -> StaticMemory:
    """Compute the static memory of a run on such a device, in shards that of the first rank.

    Under DDP gradients live in its buckets from the start; under accumulation those of the micro-batches live on, too.
    In shards each micro-batch is reduced by itself, so gradients of earlier ones are shards (``InShards.reduced_once``
    is for the other way).

    Args:
        num_shards: ranks that the weights are cut up over; ``None``: each rank has all of them.
    """
    trained: Sequence[Tensor] = as_stepped(optim, trained_parameters(model), device)
    if num_shards is not None:
        trained = largest_shards(trained, num_shards)
    gradients = _allocated_bytes(trained, device)
    accumulates = layout.forwards_per_step > 1
    optimizer = optimizer_memory(optim, model, device, num_ranks=num_shards, accumulates=accumulates)
    on_host = [one for one in streamed_parameters(model) if one.requires_grad]
    on_host_alone = optim.steps_on_host(device)
    static = replace(
        optimizer,
        optimizer_bytes=max(clipping_bytes(trained, device), optimizer.optimizer_bytes),
        losses_bytes=losses_bytes(layout, logging_steps, device),
        updates_in_backward=optim.optimizer_in_backward,
        device_updated_bytes=0 if on_host_alone else _touched_bytes(optim, trained, optimizer.state_bytes),
        adding_bytes=0 if on_host_alone else 3 * gradients,
    )
    if num_shards is None:
        return _with_gradients(static, optim, layout, trained, on_host, device)
    weights = list(model.parameters())
    frozen = largest_shards((one for one in weights if not one.requires_grad), num_shards)
    kept = _allocated_bytes([*trained, *frozen], device)
    sums = gradients if accumulates else 0
    if on_host_alone:
        sums = min((layout.forwards_per_step - 1) * gradients, host_step.LEAVING_BYTES)
    return replace(static, sums_bytes=sums, remote_bytes=_allocated_bytes(weights, device) - kept)


def _touched_bytes(optim: OptimizerSettings, trained: Sequence[Tensor], state_bytes: int) -> int:
    """What an update touches: gradients once, weights and state twice; clipping the gradients three times before."""
    weights = sum(one.nbytes for one in trained)
    return 3 * weights + 2 * state_bytes + (0 if optim.optimizer_in_backward else 3 * weights)


def _with_gradients(
    static: StaticMemory,
    optim: OptimizerSettings,
    layout: BatchLayout,
    trained: Sequence[Tensor],
    on_host: Sequence[Tensor],
    device: torch.device,
) -> StaticMemory:
    """Add gradients of whole weights, of which those ``on_host`` wait there."""
    accumulates = layout.forwards_per_step > 1
    gradients = _allocated_bytes(trained, device)
    waiting = set(map(id, on_host))
    reduced = _allocated_bytes((one for one in trained if id(one) not in waiting), device)
    buckets = reduced if layout.num_processes > 1 else 0
    leaves_rank = on_host or layout.num_processes == 1
    if optim.steps_on_host(device) and leaves_rank and layout.needs_all_gradients is None:
        sums = min((layout.forwards_per_step - 1) * gradients, host_step.LEAVING_BYTES)
        leaving = host_step.LEAVING_BYTES - sums
        if layout.num_processes > 1:  # the newest one is there twice, to be averaged
            sums += max(one.nbytes for one in on_host) + (reduced if accumulates else 0)
        return replace(static, buckets_bytes=buckets, sums_bytes=sums, gradients_stay=False, leaving_bytes=leaving)
    if optim.optimizer_in_backward:
        return replace(static, buckets_bytes=buckets, gradients_stay=False, leaving_bytes=0)
    stay = not (buckets and not accumulates)
    static = replace(static, buckets_bytes=buckets, gradients_resident=accumulates, gradients_stay=stay)
    earlier = layout.gradient_sums(trained, gradients)
    if earlier is not None:
        return _with_sums(static, earlier, gradients)
    if buckets and accumulates:  # in which alone the gradients are when the optimizer steps
        return replace(static, optimizer_bytes=max(0, static.optimizer_bytes - buckets))
    return static


def shards_of(
    units: tuple[ShardedUnit, ...],
    optim: OptimizerSettings,
    layout: BatchLayout,
    *,
    num_ranks: int,
    num_replicas: int = 1,
    device: torch.device,
) -> Shards:
    """Make the shards of a step whose gradients are reduced in every micro-batch."""
    leave = optim.steps_on_host(device)
    return Shards(
        units=units,
        num_ranks=num_ranks,
        num_replicas=num_replicas,
        accumulates=layout.accumulation_steps > 1 and not leave,
        leaving_bytes=host_step.LEAVING_BYTES if leave else None,
    )


def _allocated_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    return allocated_bytes((tensor.nbytes for tensor in tensors), device)


def _with_sums(static: StaticMemory, sums: GradientSums, gradients_bytes: int) -> StaticMemory:
    """``static`` with sums of earlier gradients.

    One micro-batch finds most of them, and its own gradient grows beside them: in DDP's buckets if it is the last one.
    """
    ends_in_buckets = static.buckets_bytes > 0 and sums.end_in_buckets
    freed_bytes = sums.exchanged_bytes + sums.held_bytes + (0 if ends_in_buckets else gradients_bytes)
    return replace(
        static,
        sums_bytes=sums.held_bytes,
        exchange_bytes=sums.exchanged_bytes,
        gradients_resident=False,
        gradients_stay=not ends_in_buckets,
        optimizer_bytes=max(static.optimizer_bytes, sums.exchanged_after_bytes - freed_bytes),
    )


def usable_bytes(memory_bytes: int, device: torch.device) -> int:
    """Return the default budget: the device's memory without the ``FRAGMENTATION`` of an accelerator."""
    return memory_bytes if device.type == "cpu" else int((1 - FRAGMENTATION) * memory_bytes)


def usable_host_bytes(device: torch.device) -> int | None:
    """Return this machine's available memory for each of its ranks; ``None`` on a CPU, where nothing is offloaded.

    It ignores the memory limit of a container.
    """
    if device.type == "cpu":
        return None
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def overheads_of_target(target: Target) -> dict[str, int]:
    """Return the bytes of a device besides the tensors, by purpose."""
    lines = {
        "CUDA context": target.context_bytes,
        WORKSPACES: MULTIPLYING_THREADS * target.cublas_workspace_bytes,
    }
    return {name: num_bytes for name, num_bytes in lines.items() if num_bytes}


def overheads_of_device(device: torch.device) -> dict[str, int]:
    """Return the memory of this accelerator that this process uses outside torch; nothing on a CPU."""
    return {} if device.type == "cpu" else {"device context": read_device_use(device).outside_torch_bytes}


def workspaces_of_device(device: torch.device, known_bytes: int) -> dict[str, int]:
    """Return what torch has allocated besides ``known_bytes`` of tensors after steps have run; nothing on a CPU."""
    if device.type == "cpu":
        return {}
    return {WORKSPACES: max(0, torch.accelerator.memory_allocated(device) - known_bytes)}


@dataclass(frozen=True, kw_only=True)
class InShards:
    """The shards of the ranks in the units of a plan, and the bytes a second that a rank sends to the others."""

    of_plan: Callable[[Plan], Shards]
    bytes_per_s: float

    def reduced_once(self, static: StaticMemory, accumulation_steps: int) -> tuple["InShards", StaticMemory]:
        """Return the same with gradients that are reduced once a step, and ``static`` with them."""

        def of_plan(plan: Plan) -> Shards:
            return replace(self.of_plan(plan), accumulates=False, num_unreduced=accumulation_steps - 1)

        return replace(self, of_plan=of_plan), replace(static, sums_bytes=0)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A plan with its predicted memory and time; in shards the chain is that of one rank."""

    plan: Plan
    chain: Chain
    in_shards: InShards | None = None

    @cached_property
    def shards(self) -> Shards | None:
        """The shards in the units of the plan; ``None`` for whole weights."""
        return None if self.in_shards is None else self.in_shards.of_plan(self.plan)

    @property
    def num_unreduced(self) -> int:
        """Micro-batches of a step whose gradients in shards are reduced with those of its last one."""
        return 0 if self.shards is None else self.shards.num_unreduced

    @property
    def peak(self) -> TimelinePoint:
        """The point of a step at which most memory is in use."""
        return self._simulated.peak

    @property
    def host_bytes(self) -> int:
        """Pinned memory of the host, at most."""
        return self._simulated.host_bytes

    @cached_property
    def reserve_bytes(self) -> int:
        """Memory kept free."""
        return reserve_bytes(self.chain)

    @property
    def baseline_peak_bytes(self) -> int:
        """The peak without checkpointing."""
        return replace(self, plan=keep_all(self.chain)).peak.total_bytes

    @property
    def baseline_s(self) -> float:
        """Seconds of one forward and backward without checkpointing."""
        return sum(block.forward_s + block.backward_s for block in self.chain.blocks)

    @property
    def added_s(self) -> float:
        """Seconds that the plan adds to ``baseline_s``; below 0 where it is faster."""
        return self._simulated.added_s

    @property
    def surely_added_s(self) -> float:
        """``added_s`` with its noise counted against the plan: what the solver minimises."""
        return self.added_s + self._simulated.noise_s

    @property
    def micro_batch_s(self) -> float:
        """Seconds of one forward and backward under the plan, with the traffic that nothing hides: a step's mean."""
        return self.baseline_s + self.added_s + self.communication_s[1]

    @cached_property
    def communication_s(self) -> tuple[float, float]:
        """Seconds that weights and gradients travel between ranks, and those of them that nothing hides."""
        if self.in_shards is None or self.shards is None:
            return 0.0, 0.0
        return communication_s(self.chain, self.shards, self.in_shards.bytes_per_s)

    @property
    def noise_s(self) -> float:
        """The error of ``micro_batch_s``, as the measured times of the blocks vary; 0 of estimates."""
        return self.chain.noise_s + self._simulated.noise_s

    @property
    def prediction(self) -> Prediction:
        """The same as plain figures."""
        kept = [costs.held_bytes for costs in span_costs(self.chain, keep_all(self.chain))]
        spans = (
            SpanPrediction(
                blocks="..".join(dict.fromkeys((self.plan.blocks[span.start], self.plan.blocks[span.stop - 1]))),
                action=str(span.action),
                saved_bytes=costs.held_bytes,
                baseline_bytes=sum(kept[span.start : span.stop]),
                added_s=costs.added_s,
            )
            for span, costs in zip(self.plan.spans, span_costs(self.chain, self.plan), strict=True)
        )
        return Prediction(
            peak_bytes=self.peak.total_bytes,
            baseline_peak_bytes=self.baseline_peak_bytes,
            baseline_s=self.baseline_s,
            added_s=self.added_s,
            noise_s=self.noise_s,
            host_bytes=self.host_bytes,
            spans=tuple(spans),
        )

    @cached_property
    def _simulated(self) -> Simulation:
        simulated = simulate(self.chain, self.plan)
        if self.shards is None:
            return simulated
        return replace(simulated, peak=peak_in_shards(self.chain, self.plan, self.shards))


def plans_to_measure(
    strategy: str,
    workload: Workload,
    *,
    compiled: bool = False,
    ratios: Sequence[float] = COMPILED_RATIOS,
    micro_batch_size: int | None = None,
) -> list[Plan]:
    """Return the plans to measure for a strategy; the first is the baseline.

    Args:
        compiled: whether layers compute compiled.
        ratios: of what compiled blocks save, for a budget.
        micro_batch_size: of the blocks that run in micro-batches, where some may.
    """
    compiled |= strategy.startswith("compiled")
    modules = dict(workload.model.named_modules())
    blocks = [modules.get(name) for names in workload.stacks for name in names]
    strategies = ["none"]
    if strategy in BUDGET_WORDS:
        to_host = workload.device.type not in HOST_MEMORY
        strategies += [*([] if compiled else ["selective"]), *(OFFLOADING_STRATEGIES if to_host else ())]
        if compiled and strategy == "budget":
            strategies += [f"compiled:{ratio}" for ratio in ratios]
        tokens = [tensor for tensor in workload.batch if tensor.dtype == torch.long and tensor.ndim > 0]  # (..., T)
        if strategy == "budget" and not compiled and _has_tiles(blocks, tokens):
            is_long = to_host and max(one.shape[-1] for one in tokens) >= LONG_ROW
            strategies += [name for name in TILED_STRATEGIES if is_long or not offloads(name)]
    elif strategy.partition(":")[0] in UNIFORM_STRATEGIES.keys() - {"none", "full"}:
        strategies.append(strategy)
    may_nest = strategy in BUDGET_WORDS or strategy.startswith("nested")
    if may_nest and not compiled and any(find_parts(block) for block in blocks if block is not None):
        strategies.append(f"nested:{len(blocks)}")
    plans = [plan_for(one, workload.stacks) for one in strategies]
    if compiled:
        plans = [plan.on_compiled_layers() for plan in plans]
    if micro_batch_size is not None and strategy not in ("none", "budget:bitwise"):
        recomputing = ["full", *(one for one in strategies if one == "full_offload")]
        plans += [plan_for(one, workload.stacks).in_micro_batches(micro_batch_size) for one in recomputing]
    return plans


def _has_tiles(blocks: Sequence[nn.Module | None], tokens: Sequence[Tensor]) -> bool:
    """Return whether a batch has the tokens of more than one tile, and every block an MLP."""
    if max((one.numel() for one in tokens), default=0) <= MLP_TILE_TOKENS:
        return False
    one_of_each = {type(block): block for block in blocks}
    return all(block is not None and find_mlps(block) for block in one_of_each.values())


def has_layers_to_compile(model: nn.Module) -> bool:
    """Return whether its layers repeat and stay on the device, and their shapes are known."""
    stacks, is_streamed = find_stacks(model), stream_of(model) is not None
    if is_streamed or joined_batchnorm(model) is not None or hasattr(model, NEVER_COMPILED):
        return False
    return bool(stacks) and all(isinstance(stack, CalledLayers) for stack in stacks)


def can_compile(model: nn.Module) -> bool:
    """Return whether it ``has_layers_to_compile``, and there is a compiler."""
    try:
        check_compiler(model)
    except InputError:
        return False
    return has_layers_to_compile(model)


def forecast(
    measurement: Measurement,
    budget_bytes: int,
    static: StaticMemory,
    *,
    missed_bytes: int = 0,
    host: Host = UNKNOWN_HOST,
    joins: bool = True,
) -> Forecast:
    """Find the fastest plan whose predicted peak stays below ``budget_bytes``.

    The noise of the measured times counts against a plan. One with compiled blocks or tiles, which round differently,
    is chosen only where it saves ``MIN_GAIN``.

    Args:
        missed_bytes: by which an earlier prediction was too low: kept free, where the reserve is less.
        host: has to have the memory that is offloaded to.
        joins: whether blocks may recompute together.

    Raises:
        InputError: no plan fits; the message names the smallest budget that works and the memory that it is for, or
            that of the host.
    """
    best: Forecast | None = None
    errors: dict[int, InputError] = {}  # by the smallest budget that works
    for chain in (static.added_to(chain) for chain in _chains(measurement)):
        if not joins:  # every block in a stack of its own, which no span leaves
            numbered = enumerate(chain.blocks)
            alone = (b if b.stack is None else replace(b, stack=number) for number, b in numbered)
            chain = replace(chain, blocks=tuple(alone))
        if chain.nested and best is not None and not best.plan.offloads:
            continue
        reserved = _with_reserve(chain, missed_bytes)
        try:
            found = Forecast(plan=solve(reserved, budget_bytes), chain=chain)
        except InputError as error:
            errors[smallest_feasible(reserved)] = error
        else:
            is_best = best is None or found.surely_added_s < best.surely_added_s - MIN_GAIN * best.baseline_s
            if is_best and host.holds(found.host_bytes):
                best = found
    if best is None and not errors:
        there = format_bytes(host.budget_bytes or 0)
        raise InputError(f"the host has {there} available, and every plan takes more of its memory")
    if best is None:
        raise errors[min(errors)]
    return best


def least_memory(measurement: Measurement, static: StaticMemory, host: Host = UNKNOWN_HOST) -> Forecast:
    """Find the plan with the lowest predicted peak among those that the host has memory for, if there are any."""
    chains = [static.added_to(chain) for chain in _chains(measurement)]
    smallest = sorted(((smallest_feasible(_with_reserve(c)), c) for c in chains), key=lambda pair: pair[0])

    def least(num_bytes: int, chain: Chain) -> Forecast:
        return Forecast(plan=solve(_with_reserve(chain), num_bytes), chain=chain)

    found = (one for pair in smallest if host.holds((one := least(*pair)).host_bytes))
    return next(found, None) or least(*smallest[0])


def _chains(measurement: Measurement) -> Iterator[Chain]:
    """Yield the costs of all bitwise actions without offloading and with it; the same with tiles, or where compiled
    blocks may save a part; and of nested spans, which are for where nothing else fits without the host.

    Offloading sets memory aside: little for the inputs of blocks that recompute, more for all that a block saves.
    """
    plans = [plan for plan, _ in measurement.traces]
    measured = [action for plan in plans for action in plan.offloads]
    rounding = {
        "tiles": any(plan.mlp_tile_tokens is not None for plan in plans),
        "saves_part": any(plan.ratios for plan in plans),
    }
    of_rounding: list[dict[str, Any]] = [{name: True} for name, is_there in rounding.items() if is_there]
    for allowed in [{}, *of_rounding]:
        yield measurement.chain(**allowed)
        to_host = [action for action in measured if allowed.get("tiles") or not action.kind.is_tiled]
        for number in range(len(to_host)):
            yield measurement.chain(offload=to_host[number:], **allowed)
    yield replace(measurement.chain(), nested=True)


def reserve_bytes(chain: Chain) -> int:
    """Return the memory to keep free: ``RESERVE`` of the activations that the baseline saves for backward."""
    return int(RESERVE * sum(costs.held_bytes for costs in span_costs(chain, keep_all(chain))))


def _with_reserve(chain: Chain, missed_bytes: int = 0) -> Chain:
    return replace(chain, resident_bytes=chain.resident_bytes + max(reserve_bytes(chain), missed_bytes))
