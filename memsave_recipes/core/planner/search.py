"""The fastest step that fits a budget: a search over micro-batch size, plan and loss, at the same global batch size.

The candidates of a micro-batch size are the plans of ``STRATEGIES`` and the solver's plan for the budget.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from math import hypot, inf
from typing import Any

import torch
from torch import nn

from memsave_recipes.core.activations import plan_blocks
from memsave_recipes.core.costs.block_costs import Measurement, Workload
from memsave_recipes.core.costs.targets import UNKNOWN_HOST, Host
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.budget import (
    COMPILED_RATIOS,
    WORKSPACES,
    Forecast,
    InShards,
    forecast,
    least_memory,
    plans_to_measure,
    shards_of,
    static_memory_of,
)
from memsave_recipes.core.plans import BUDGET_WORDS, Plan
from memsave_recipes.core.plans.chain import StaticMemory
from memsave_recipes.core.plans.plan import OFFLOADING_STRATEGIES, offloads
from memsave_recipes.core.plans.shards import Shards
from memsave_recipes.core.sharding.groups import ShardGroups
from memsave_recipes.core.sharding.units import sharded_units
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.core.step.memory import keeps_masters
from memsave_recipes.core.step.settings import AUTO, OptimizerSettings, StepSettings

STRATEGIES = ("none", "full", "selective", *OFFLOADING_STRATEGIES)  # the simplest first
AS_FAST = 0.01  # of a step's time: a candidate that is slower by less is preferred if it is simpler
MOST_TRIES = 16
"""Plans of the solver that are judged in shards, each made for less memory than the one before."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a rank has: memory of its device, and its host.

    Args:
        budget_bytes: of the device, overheads included.
        overheads: bytes besides the tensors of a step, by purpose, such as the CUDA context.
        memory_bytes_per_s: that the device reads and writes.
    """

    budget_bytes: int
    overheads: Mapping[str, int] = field(default_factory=dict)
    host: Host = UNKNOWN_HOST
    memory_bytes_per_s: float = inf

    @property
    def room(self) -> dict[str, Any]:
        """These fields alone, by name."""
        return {one.name: getattr(self, one.name) for one in fields(Room)}


@dataclass(frozen=True, kw_only=True)
class Candidate(Room):
    """A way to compute the global batch, with its predicted memory and time.

    Args:
        loss: value of ``--loss``, where the recipe has a choice.
        forecast: of the largest forward of a step; its chain includes ``weights_bytes`` and ``static``.
        weights_bytes: parameters and buffers; in shards those of one rank.
    """

    layout: BatchLayout
    loss: str | None
    forecast: Forecast
    weights_bytes: int
    static: StaticMemory

    @property
    def strategy(self) -> str:
        """The strategy of its plan."""
        return self.forecast.plan.strategy

    @property
    def peak_bytes(self) -> int:
        """The peak of the tensors of a step."""
        return self.forecast.peak.total_bytes

    @property
    def allocated_bytes(self) -> int:
        """The peak that torch's allocator will report, at most: it counts the workspaces, too."""
        return self.peak_bytes + self.overheads.get(WORKSPACES, 0)

    @property
    def needed_bytes(self) -> int:
        """The peak with the overheads and the reserve."""
        return self.peak_bytes + sum(self.overheads.values()) + self.forecast.reserve_bytes

    @property
    def fits(self) -> bool:
        """Whether both the budget and the host's memory are enough."""
        return self.needed_bytes <= self.budget_bytes and self.fits_host

    @property
    def host_bytes(self) -> int:
        """Pinned memory of a rank's host, at most."""
        return self.forecast.host_bytes

    @property
    def fits_host(self) -> bool:
        """Whether the host has that much, or is not known."""
        return self.host.holds(self.host_bytes)

    @property
    def step_s(self) -> float:
        """Seconds of a step: of its micro-batches, of adding up their gradients, and of the update."""
        micro_batches_s = self.layout.forwards_per_step * self.forecast.micro_batch_s
        return micro_batches_s + self.device_update_s + self.awaited_s

    @property
    def device_update_s(self) -> float:
        """Seconds in which the device adds up gradients, clips and steps: an estimate; 0 in a run, which measures."""
        num_added = self.layout.forwards_per_step - 1
        return (self.static.device_updated_bytes + num_added * self.static.adding_bytes) / self.memory_bytes_per_s

    @property
    def awaited_s(self) -> float:
        """Seconds of a step in which the device waits for optimizer state, or for the host's step: an estimate."""
        beside_s = sum(block.backward_s for block in self.forecast.chain.blocks)
        exposed_s = self.update_s - (beside_s if self.static.updates_in_backward else 0)
        return self.static.awaited_bytes / self.host.bytes_per_s + max(0.0, exposed_s)

    @property
    def update_s(self) -> float:
        """Seconds in which the host steps, if it does: an estimate."""
        return self.static.updated_bytes / self.host.memory_bytes_per_s

    @property
    def communication_s(self) -> tuple[float, float]:
        """Seconds of traffic between ranks in a step, where weights are in shards, and those that nothing hides."""
        sent_s, exposed_s = self.forecast.communication_s
        return self.layout.forwards_per_step * sent_s, self.layout.forwards_per_step * exposed_s

    @property
    def noise_s(self) -> float:
        """The error of ``step_s``."""
        return self.layout.forwards_per_step * self.forecast.noise_s

    @property
    def samples_per_s(self) -> float:
        """Throughput over all ranks, by ``step_s``."""
        return self.layout.global_batch_size / self.step_s

    @property
    def reduces_once(self) -> bool:
        """Whether gradients in shards are reduced once a step, and not for every micro-batch."""
        return self.forecast.num_unreduced > 0

    @property
    def parts(self) -> dict[str, int]:
        """The bytes in use at the peak, by kind; they add up to ``needed_bytes``."""
        peak, chain = self.forecast.peak, self.forecast.chain
        gradients = peak.gradients_bytes + (chain.all_gradients_bytes if chain.gradients_resident else 0)
        gradients += self.static.sums_bytes
        communication = self.static.communication_bytes
        stays = self.weights_bytes + self.static.state_bytes + communication + self.static.sums_bytes
        batch = chain.resident_bytes - stays
        return {
            "parameters": self.weights_bytes,
            "gradients": gradients,
            "optimizer state": self.static.state_bytes,
            "communication": communication + peak.traffic_bytes,
            "activations": batch + peak.held_bytes + peak.own_bytes - peak.temporary_bytes,
            "temporaries": peak.temporary_bytes,
            **self.overheads,
            "reserve": self.forecast.reserve_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class Choice:
    """All candidates of a search, small micro-batches first, and the best of them."""

    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate | None:
        """The simplest of the candidates that fit and are ``AS_FAST`` as the fastest; ``None`` where none fits.

        The noise of measured times counts against a candidate, so of two within it, the one that recomputes less wins.
        """
        fitting = [candidate for candidate in self.candidates if candidate.fits]
        if not fitting:
            return None
        slowest_s = [candidate.step_s + candidate.noise_s for candidate in fitting]
        limit_s = (1 + AS_FAST) * min(slowest_s)
        return min((one for one, most_s in zip(fitting, slowest_s, strict=True) if most_s <= limit_s), key=_complexity)

    @property
    def rivals(self) -> list[tuple[Candidate, float]]:
        """The other candidates that fit and are as fast as the chosen one within the noise, each with that noise.

        It is a fraction of the chosen one's step.
        """
        chosen = self.chosen
        if chosen is None:
            return []
        noise = [(one, hypot(one.noise_s, chosen.noise_s)) for one in self.candidates if one.fits and one is not chosen]
        return [(one, noise_s / chosen.step_s) for one, noise_s in noise if abs(one.step_s - chosen.step_s) < noise_s]

    @property
    def smallest(self) -> Candidate:
        """The candidate that needs least; one that the host has memory for, if there is any."""
        return min(self.candidates, key=lambda candidate: (not candidate.fits_host, candidate.needed_bytes))


def _complexity(candidate: Candidate) -> tuple[int, int, bool, float]:
    strategy = candidate.strategy
    rank = STRATEGIES.index(strategy) if strategy in STRATEGIES else len(STRATEGIES)
    return rank, candidate.layout.accumulation_steps, candidate.reduces_once, candidate.step_s


@dataclass(frozen=True, kw_only=True)
class SearchSpace(Room):
    """The constraints of a search, and the candidates that they admit.

    Args:
        strategy: with ``budget`` all plans are candidates, else only this one.
        plan_of: the plan of a strategy for the blocks that run.
        plan: the one candidate, in place of those of the strategy.
        compiled: whether layers compute compiled.
        compiled_ratios: of what compiled blocks save, to measure for a budget.
        missed_bytes: as of ``forecast``.
        in_shards: of a batch layout, where weights are in shards.
        reductions: whether gradients in shards are reduced once a step: the ways to compare.
        micro_batch_size: of the blocks that run in micro-batches: those that a named strategy recomputes, and any for a
            budget; ``None``: no block does.
    """

    strategy: str
    static: Callable[[BatchLayout], StaticMemory]
    plan_of: Callable[[str, Mapping[str, bool]], Plan]
    plan: Plan | None = None
    compiled: bool = False
    compiled_ratios: tuple[float, ...] = COMPILED_RATIOS
    missed_bytes: int = 0
    micro_batch_size: int | None = None
    in_shards: Callable[[BatchLayout], InShards] | None = None
    reductions: tuple[bool, ...] = (False,)

    def plans_of(self, workload: Workload) -> list[Plan]:
        """Return the plans under which a workload has to run to know its costs; the first keeps everything."""
        return plans_to_measure(
            self.strategy,
            workload,
            compiled=self.compiled,
            ratios=self.compiled_ratios,
            micro_batch_size=self.micro_batch_size,
        )

    def candidates(self, measurement: Measurement, layout: BatchLayout, loss: str | None = None) -> list[Candidate]:
        """Make the candidates of a layout by the costs of a micro-batch; none if the host was too small to measure."""
        return [
            Candidate(
                layout=layout,
                loss=loss,
                forecast=found,
                weights_bytes=measurement.workload.weights_bytes - static.remote_bytes,
                static=static,
                **self.room,
            )
            for in_shards, static in self._reduced(layout)
            for found in self._forecasts(measurement, static, in_shards)
        ]

    def _reduced(self, layout: BatchLayout) -> Iterator[tuple[InShards | None, StaticMemory]]:
        """Yield ``in_shards`` and the static memory for each of ``reductions``; for one where nothing accumulates."""
        static, steps = self.static(layout), layout.accumulation_steps
        in_shards = None if self.in_shards is None else self.in_shards(layout)
        if in_shards is None or steps == 1:
            yield in_shards, static
            return
        for once in self.reductions:
            yield in_shards.reduced_once(static, steps) if once else (in_shards, static)

    def _forecasts(
        self, measurement: Measurement, static: StaticMemory, in_shards: InShards | None
    ) -> Iterator[Forecast]:
        if self.plan is not None:
            yield self._with(self.plan, measurement, static, in_shards)
            return
        if self.strategy not in BUDGET_WORDS:
            if not offloads(self.strategy) or _is_measured(self.strategy, measurement):
                yield self._under(self.strategy, measurement, static, in_shards)
            return
        named = [
            self._under(strategy, measurement, static, in_shards)
            for strategy in STRATEGIES
            if strategy in ("none", "full") or _is_measured(strategy, measurement)
        ]
        yield from named
        solved: Forecast | None
        if in_shards is None:
            solved = self._solved(measurement, static)
        else:
            solved = self._solved_in_shards(measurement, static, in_shards)
        if solved is not None and _costs(solved) not in map(_costs, named):
            yield solved

    def _under(
        self, strategy: str, measurement: Measurement, static: StaticMemory, in_shards: InShards | None
    ) -> Forecast:
        plan = self.plan_of(strategy, measurement.running)
        if self.compiled:
            plan = plan.on_compiled_layers()
        if self.micro_batch_size is not None and self.strategy not in BUDGET_WORDS:
            plan = plan.in_micro_batches(self.micro_batch_size)
        found = self._with(plan, measurement, static, in_shards)
        if plan.blocks != found.chain.decided_names:
            raise InputError(
                f"strategy {strategy} has blocks of its own, whose memory cannot be predicted: give "
                "micro_batch_size a number, or take another strategy"
            )
        return found

    def _with(self, plan: Plan, measurement: Measurement, static: StaticMemory, in_shards: InShards | None) -> Forecast:
        return Forecast(plan=plan, chain=static.added_to(measurement.chain_under(plan)), in_shards=in_shards)

    def _solved_in_shards(self, measurement: Measurement, static: StaticMemory, in_shards: InShards) -> Forecast | None:
        """Return the solver's plan for the budget as ``timeline_in_shards`` judges it, or the one that needs least.

        The weights gathered at the peak follow from the spans of a plan, which the solver does not know. So it solves
        for less and less memory, each time by as much as the plan before was too large: first for plans whose blocks
        recompute one by one, which all gather alike, then for any. ``None`` where no plan leaves enough units.
        """
        budget_bytes = self.budget_bytes - sum(self.overheads.values())
        # Gradients that are reduced count as nothing here; what they take is part of what a plan is too large by.
        without_gradients = replace(static, gradients_stay=False)
        judged: list[tuple[int, Forecast]] = []
        for joins in (False, True):
            free_bytes = budget_bytes
            for _ in range(MOST_TRIES):
                try:
                    plan = forecast(
                        measurement,
                        free_bytes,
                        without_gradients,
                        host=self.host,
                        joins=joins,
                    ).plan
                    found = self._with(plan, measurement, static, in_shards)
                    over_bytes = found.peak.total_bytes + found.reserve_bytes - budget_bytes
                except InputError:  # nothing is so small, or there are too few units
                    break
                if over_bytes <= 0:
                    return found
                judged.append((over_bytes, found))
                free_bytes -= over_bytes
        return min(judged, key=lambda pair: pair[0])[1] if judged else None

    def _solved(self, measurement: Measurement, static: StaticMemory) -> Forecast:
        """Return the solver's plan for the budget, or the one that needs least where none fits."""
        try:
            budget_bytes = self.budget_bytes - sum(self.overheads.values())
            return forecast(
                measurement,
                budget_bytes,
                static,
                missed_bytes=self.missed_bytes,
                host=self.host,
            )
        except InputError:
            return least_memory(measurement, static, self.host)


def search_space(
    run: StepSettings,
    optim: OptimizerSettings,
    model: nn.Module,
    room: Room,
    *,
    num_processes: int,
    device: torch.device,
    compiled: bool = False,
    groups: ShardGroups | None = None,
    bytes_per_s: float = inf,
) -> SearchSpace:
    """Make the space of what ``run`` leaves open for a model on such devices.

    Args:
        compiled: whether layers compute compiled.
        groups: of ranks that hold the model in shards; ``None``: each rank has all of it.
        bytes_per_s: that a rank sends to others.
    """
    with_masters = keeps_masters(optim, device)

    def in_shards(groups: ShardGroups, layout: BatchLayout) -> InShards:
        @cache
        def of_plan(plan: Plan) -> Shards:
            return shards_of(
                sharded_units(model, plan, groups.size, str(run.shard), device, with_masters=with_masters),
                optim,
                layout,
                num_ranks=groups.size,
                num_replicas=groups.num_replicas,
                device=device,
            )

        return InShards(of_plan=of_plan, bytes_per_s=bytes_per_s)

    static = partial(static_memory_of, optim, model, logging_steps=run.logging_steps, device=device)
    return SearchSpace(
        **room.room,
        strategy=run.activation_checkpointing or "none",
        static=cache(static if groups is None else partial(static, num_shards=groups.size)),
        plan_of=partial(plan_blocks, model),
        compiled=compiled,
        micro_batch_size=run.micro_batch_of_blocks(run.layout(num_processes)),
        in_shards=None if groups is None else partial(in_shards, groups),
        reductions=(False,) if with_masters else run.reductions,  # whole sums would be in float32
    )


def open_layouts(run: StepSettings, optim: OptimizerSettings, num_processes: int) -> list[BatchLayout]:
    """Return the batch layouts to search, small micro-batches first: one, unless ``--micro_batch_size`` is auto."""
    named = run.layout(num_processes)  # without a size in the flags, a single micro-batch
    if run.micro_batch_size != AUTO or optim.optimizer_in_backward:  # the latter cannot accumulate
        return [named]
    return named.halvings


def search(
    layouts: Sequence[BatchLayout],
    losses: Sequence[str | None],
    candidates_of: Callable[[BatchLayout, str | None], list[Candidate]],
) -> Choice:
    """Predict every layout, up to the first whose micro-batch is too large for any plan.

    Args:
        layouts: small micro-batches first.
        candidates_of: the candidates of a layout and a loss; empty where it does not run at all.
    """
    found: list[Candidate] = []
    for layout in layouts:
        of_this = [candidate for loss in losses for candidate in candidates_of(layout, loss)]
        found += of_this
        if not any(candidate.fits for candidate in of_this):
            break
    return Choice(candidates=tuple(found))


def _is_measured(strategy: str, measurement: Measurement) -> bool:
    return any(plan.strategy == strategy for plan, _ in measurement.traces)


def _costs(found: Forecast) -> tuple[object, ...]:
    return found.peak, found.added_s, found.noise_s, found.host_bytes
