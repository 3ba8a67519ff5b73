"""The fastest step that fits a budget: over micro-batch, plan and loss, with the global batch as it is.

Micro-batches are halvings of a rank's share, and each size is priced by itself: the peak of a step is the larger of
several lines in the micro-batch, so nothing is interpolated. For each size the plain plan, the plans of the usual words
and the solver's are held against the budget.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memsave_recipes.errors import InputError
from memsave_recipes.planner.budget import WORKSPACES, Forecast, StaticMemory, fits_host, forecast, least_memory
from memsave_recipes.plans import BUDGET_WORDS, Plan
from memsave_recipes.plans.simulate import simulate
from memsave_recipes.profiling.block_costs import Measurement
from memsave_recipes.text import format_bytes
from memsave_recipes.training.arguments import AUTO, OptimizerArguments, RunArguments
from memsave_recipes.training.batch_layout import BatchLayout

WORDS = ("none", "full", "selective", "offload")  # what is simpler comes first
AS_FAST = 0.01  # of a step's time: what nobody would give up a simpler configuration for


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to compute the global batch, and what it is expected to take.

    Args:
        layout: with its micro-batch.
        loss: of ``--loss``, where the recipe has a choice.
        forecast: of one micro-batch; its chain has everything in it that lives on the device.
        weights_bytes: parameters and buffers.
        static: what lives there besides.
        overheads: bytes beside the tensors of a step, by what they are for: the device's context, say.
        budget_bytes: for all of it.
        host_budget_bytes: of a rank's host, for what is offloaded; ``None`` where it is not known.
    """

    layout: BatchLayout
    loss: str | None
    forecast: Forecast
    weights_bytes: int
    static: StaticMemory
    overheads: Mapping[str, int] = field(default_factory=dict)
    budget_bytes: int
    host_budget_bytes: int | None = None

    @property
    def strategy(self) -> str:
        """The word of its plan."""
        return self.forecast.plan.strategy

    @property
    def peak_bytes(self) -> int:
        """The most that the tensors of a step take."""
        return self.forecast.peak.total_bytes

    @property
    def allocated_bytes(self) -> int:
        """The peak as torch's allocator will tell it: with the workspaces, which it counts as well."""
        return self.peak_bytes + self.overheads.get(WORKSPACES, 0)

    @property
    def needed_bytes(self) -> int:
        """The peak with the overheads and the reserve."""
        return self.peak_bytes + sum(self.overheads.values()) + self.forecast.reserve_bytes

    @property
    def fits(self) -> bool:
        """Whether the budget is enough, and the host's memory for what is offloaded."""
        return self.needed_bytes <= self.budget_bytes and self.fits_host

    @property
    def host_bytes(self) -> int:
        """What a rank pins of its host's memory at most."""
        return self.forecast.host_bytes

    @property
    def fits_host(self) -> bool:
        """Whether the host has that, or is not known."""
        return fits_host(self.forecast, self.host_budget_bytes)

    @property
    def step_s(self) -> float:
        """Seconds of the forwards and backwards of a step; the optimizer's update is the same for all candidates."""
        return self.layout.accumulation_steps * self.forecast.micro_batch_s

    @property
    def samples_per_s(self) -> float:
        """Throughput over all ranks, as far as ``step_s`` tells."""
        return self.layout.global_batch_size / self.step_s

    @property
    def parts(self) -> dict[str, int]:
        """What fills the device at the peak, in bytes; they add up to ``needed_bytes``."""
        peak, chain = self.forecast.peak, self.forecast.chain
        gradients = peak.gradients_bytes + (chain.all_gradients_bytes if chain.gradients_resident else 0)
        stays = self.weights_bytes + self.static.state_bytes + self.static.buckets_bytes
        batch = chain.resident_bytes - stays
        return {
            "parameters": self.weights_bytes,
            "gradients": gradients,
            "optimizer state": self.static.state_bytes,
            "communication": self.static.buckets_bytes,
            "activations": batch + peak.held_bytes + peak.own_bytes - peak.temporary_bytes,
            "temporaries": peak.temporary_bytes,
            **self.overheads,
            "reserve": self.forecast.reserve_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class Choice:
    """All candidates, those with small micro-batches first."""

    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate | None:
        """The fastest that fits, and of those as fast the simplest; ``None`` where none fits."""
        fitting = [candidate for candidate in self.candidates if candidate.fits]
        if not fitting:
            return None
        limit_s = (1 + AS_FAST) * min(candidate.step_s for candidate in fitting)
        return min((candidate for candidate in fitting if candidate.step_s <= limit_s), key=_complexity)

    @property
    def smallest(self) -> Candidate:
        """The one that needs least, of those that the host has memory for, if there are any."""
        return min(self.candidates, key=lambda candidate: (not candidate.fits_host, candidate.needed_bytes))


def _complexity(candidate: Candidate) -> tuple[int, int, float]:
    word = candidate.strategy
    rank = WORDS.index(word) if word in WORDS else len(WORDS)
    return rank, candidate.layout.accumulation_steps, candidate.step_s


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What a search is held to.

    Args:
        budget_bytes: of the device, overheads included.
        strategy: of ``--activation_checkpointing``: with ``budget`` all plans are looked at, else this one alone.
        static: what lives beside a step of a geometry.
        overheads, host_budget_bytes: see ``Candidate``.
        plan_of: the plan that a strategy's word makes of the blocks that run.
    """

    budget_bytes: int
    strategy: str
    static: Callable[[BatchLayout], StaticMemory]
    overheads: Mapping[str, int] = field(default_factory=dict)
    host_budget_bytes: int | None = None
    plan_of: Callable[[str, Collection[str]], Plan]

    def candidates(self, measurement: Measurement, layout: BatchLayout, loss: str | None = None) -> list[Candidate]:
        """What a measurement of one micro-batch makes possible; nothing where the host has no memory to measure it."""
        static = self.static(layout)
        return [
            Candidate(
                layout=layout,
                loss=loss,
                forecast=found,
                weights_bytes=measurement.workload.weights_bytes,
                static=static,
                overheads=self.overheads,
                budget_bytes=self.budget_bytes,
                host_budget_bytes=self.host_budget_bytes,
            )
            for found in self._forecasts(measurement, static)
        ]

    def _forecasts(self, measurement: Measurement, static: StaticMemory) -> Iterator[Forecast]:
        if self.strategy not in BUDGET_WORDS:
            if self.strategy != "offload" or _has_seen("offload", measurement):
                yield self._under(self.strategy, measurement, static)
            return
        named = []
        for word in WORDS:
            if word in ("none", "full") or _has_seen(word, measurement):
                named.append(self._under(word, measurement, static))
        yield from named
        solved = self._solved(measurement, static)
        if not any(_same_costs(solved, known) for known in named):
            yield solved

    def _under(self, strategy: str, measurement: Measurement, static: StaticMemory) -> Forecast:
        plan = self.plan_of(strategy, measurement.running)
        chain = measurement.chain(ratio=plan.compiled_memory_ratio, offload=strategy == "offload")
        if plan.blocks != chain.decided_names:
            raise InputError(
                f"--activation_checkpointing {strategy} has blocks of its own, whose memory cannot be predicted: give "
                "--micro_batch_size a number, or take another strategy"
            )
        return Forecast(plan=plan, chain=static.added_to(chain))

    def _solved(self, measurement: Measurement, static: StaticMemory) -> Forecast:
        """The solver's plan for the budget, or, where none fits, the one that needs least."""
        try:
            budget_bytes = self.budget_bytes - sum(self.overheads.values())
            return forecast(measurement, budget_bytes, static, host_budget_bytes=self.host_budget_bytes)
        except InputError:
            return least_memory(measurement, static, self.host_budget_bytes)


def open_layouts(run: RunArguments, optim: OptimizerArguments, num_processes: int) -> list[BatchLayout]:
    """Those that the flags leave open, with small micro-batches first: one, unless ``--micro_batch_size`` is auto.

    Raises:
        InputError: as ``BatchLayout``.
    """
    named = run.layout(num_processes)  # undivided, where none is named
    if run.micro_batch_size != AUTO or optim.optimizer_in_backward:  # which cannot accumulate
        return [named]
    return BatchLayout.halvings(run.global_batch_size, num_processes)


def search(
    layouts: Sequence[BatchLayout],
    losses: Sequence[str | None],
    candidates_of: Callable[[BatchLayout, str | None], list[Candidate]],
) -> Choice:
    """Look at every geometry until one is too large for any plan; what follows it is larger still.

    Args:
        layouts: those with small micro-batches first.
        losses: to try with each.
        candidates_of: prices one of them; empty where it does not run at all.

    Raises:
        InputError: as ``candidates_of``.
    """
    found: list[Candidate] = []
    for layout in layouts:
        of_this = [candidate for loss in losses for candidate in candidates_of(layout, loss)]
        found += of_this
        if not any(candidate.fits for candidate in of_this):
            break
    return Choice(candidates=tuple(found))


def _has_seen(strategy: str, measurement: Measurement) -> bool:
    return any(plan.strategy == strategy for plan, _ in measurement.traces)


def _same_costs(one: Forecast, other: Forecast) -> bool:
    costs = [simulate(found.chain, found.plan) for found in (one, other)]
    return costs[0] == costs[1]


def host_memory_too_small(candidate: Candidate) -> InputError:
    """The error for a plan that offloads more than the host has memory for."""
    there = format_bytes(candidate.host_budget_bytes or 0)
    return InputError(
        f"--activation_checkpointing {candidate.strategy}: a rank would move {format_bytes(candidate.host_bytes)} to "
        f"its host, which has {there} available for it: take full, or a smaller --micro_batch_size"
    )


def host_line(candidate: Candidate) -> str:
    """A line on the host's memory that is offloaded to, and on how much there is."""
    there = candidate.host_budget_bytes
    of = "" if there is None else f", of {format_bytes(there)} that are available to it"
    return f"{candidate.strategy}: at most {format_bytes(candidate.host_bytes)} of the host's memory for a rank{of}"
