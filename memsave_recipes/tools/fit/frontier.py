"""What ``memsave frontier`` shows: memory against time of every strategy, and memory against the length of rows.

The strategies of a curve over lengths are those whose costs ``memsave plan`` looks at for a budget. The solver's plan
uses what memory there is, so it has no curve.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from memsave_recipes.core.activations import apply_plan
from memsave_recipes.core.costs.block_costs import Measurement
from memsave_recipes.core.costs.memory import is_out_of_memory
from memsave_recipes.core.costs.preserve_state import clear_gradients, preserve_state
from memsave_recipes.core.costs.throughput import utilization_pct
from memsave_recipes.core.costs.trace_events import DeviceInstruments, Meter
from memsave_recipes.core.planner.budget import least_memory
from memsave_recipes.core.planner.search import Candidate, Choice, SearchSpace
from memsave_recipes.core.planner.task import (
    AUTOCAST_DTYPES,
    Estimates,
    Launch,
    Task,
    inputs_of,
    space_of,
)
from memsave_recipes.core.planner.trial_step import step_bytes
from memsave_recipes.core.plans import BUDGET_WORDS
from memsave_recipes.core.step.batch_layout import Batch, BatchLayout

EVERY = (2, 4)  # values of K in every:K
SEGMENTS = (2, 4, 8)  # values of K in segments:K
NUM_BUDGETS = 4  # plans of the solver for each micro-batch size, from the least memory to nearly the baseline's
NUM_TIMED = 3  # steps whose median is the measured time
DOCUMENT_TOKENS = 256  # per document in synthetic packed batches


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


@dataclass(frozen=True)
class Measured:
    """The memory with overheads and the time of a candidate that was run."""

    needed_bytes: int
    step_s: float


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """A candidate of a frontier; Pareto-optimal if no other one is as fast in as little memory."""

    candidate: Candidate
    is_optimal: bool
    measured: Measured | None = None

    @property
    def measured_samples_per_s(self) -> float | None:
        """Measured throughput."""
        samples = self.candidate.layout.global_batch_size
        return None if self.measured is None else samples / self.measured.step_s


def points_of(candidates: Sequence[Candidate]) -> list[FrontierPoint]:
    """Return the candidates as points, marked where they are Pareto-optimal by prediction."""
    optimal: set[int] = set()
    fastest = 0.0
    for candidate in sorted(candidates, key=lambda one: (one.needed_bytes, -one.samples_per_s)):
        if candidate.samples_per_s > fastest:
            optimal.add(id(candidate))
            fastest = candidate.samples_per_s
    return [FrontierPoint(candidate=candidate, is_optimal=id(candidate) in optimal) for candidate in candidates]


def run_points(
    task: Task, launch: Launch, points: Sequence[FrontierPoint], *, on_run: Callable[[], object] = lambda: None
) -> list[FrontierPoint]:
    """Run a micro-batch of each point on this device, with random weights and synthetic samples.

    Returns:
        The points with ``measured``; without it where the device has too little memory.
    """
    with launch.target.device:
        model = task.planned_model()
    found = []
    for point in points:
        try:
            found.append(replace(point, measured=_run(task, launch, point.candidate, model)))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            found.append(point)
        on_run()
    return found


def _synthetic_batch(batch: Batch, device: torch.device) -> Batch:
    return {name: _values(name, part).to(device) if isinstance(part, Tensor) else part for name, part in batch.items()}


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


def _run(task: Task, launch: Launch, candidate: Candidate, model: nn.Module) -> Measured:
    device, dtype = launch.target.device, AUTOCAST_DTYPES[launch.mixed_precision]
    trained = task.trained(model, candidate.loss, device)
    make_batch = inputs_of(task, candidate.layout, partial(_synthetic_batch, device=device))

    def forward() -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False):
            return task.loss_of(trained, make_batch())

    def step(meter: Meter) -> None:
        meter.mark()
        forward().backward()
        meter.mark()
        clear_gradients(model)

    peak_bytes = step_bytes(candidate.forecast, candidate.static, model, forward, device)
    overheads_bytes = candidate.needed_bytes - candidate.peak_bytes
    with apply_plan(model, candidate.forecast.plan), preserve_state(model, device):
        seconds = median(DeviceInstruments(device).read_clock(step)[0] for _ in range(NUM_TIMED))
    return Measured(peak_bytes + overheads_bytes, seconds * candidate.layout.forwards_per_step)


def _values(name: str, tensor: Tensor) -> Tensor:
    """Make values by the recipes' names of tensors; 1 is a valid class and a valid token everywhere."""
    shape, dtype = tensor.shape, tensor.dtype
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype)
    if name == "affine":  # identity
        return torch.eye(2, 3, dtype=dtype).expand(shape).clone()
    if name == "position_ids":
        return (torch.arange(shape[-1]) % DOCUMENT_TOKENS).expand(shape).clone()
    return torch.ones(shape, dtype=dtype)


FIRST_LENGTH = 1024
TOKENS_APART = 64


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The candidates of a strategy by the length of their rows, short ones first."""

    strategy: str
    points: tuple[tuple[int, Candidate], ...]

    def longest(self, budget_bytes: int) -> int | None:
        """Return the longest rows that fit in a budget; ``None`` where the first do not.

        Bytes are interpolated between two lengths, to multiples of ``TOKENS_APART``. Where all fit, it is the last one.
        """
        fitting = [(length, one.needed_bytes) for length, one in self.points if one.needed_bytes <= budget_bytes]
        if not fitting:
            return None
        length, needed_bytes = fitting[-1]
        if len(fitting) == len(self.points):
            return length
        beyond, too_many = self.points[len(fitting)][0], self.points[len(fitting)][1].needed_bytes
        more = (beyond - length) * (budget_bytes - needed_bytes) // (too_many - needed_bytes)
        return (length + more) // TOKENS_APART * TOKENS_APART


def under_each(space: SearchSpace, measurement: Measurement, layout: BatchLayout, loss: str | None) -> list[Candidate]:
    """Make the candidate of each strategy, for ``choose_for_target``; only of the one that the flags name."""
    if space.strategy not in BUDGET_WORDS:
        return space.candidates(measurement, layout, loss)
    strategies = dict.fromkeys(("none", "full", *(plan.strategy for plan, _ in measurement.traces)))
    return [one for name in strategies for one in replace(space, strategy=name).candidates(measurement, layout, loss)]


def lengths(most: int) -> Iterator[int]:
    """Yield lengths that double from ``FIRST_LENGTH`` on, and ``most`` as the last one."""
    length = min(FIRST_LENGTH, most)
    while length < most:
        yield length
        length *= 2
    yield most


def curves(choose: Callable[[int], Choice], most: int) -> list[Curve]:
    """Make the curve of every strategy, up to the first length at which nothing fits.

    One that no longer fits has that length as its last point.

    Args:
        choose: the candidates for a length.
        most: the longest rows that make sense.
    """
    found: dict[str, list[tuple[int, Candidate]]] = {}
    for length in lengths(most):
        candidates = choose(length).candidates
        for one in candidates:
            points = found.setdefault(one.strategy, [])
            if not points or points[-1][1].fits:
                points.append((length, one))
        if not any(one.fits for one in candidates):
            break
    return [Curve(strategy=strategy, points=tuple(points)) for strategy, points in found.items()]


def lengths_of(curves: Sequence[Curve]) -> list[int]:
    """Return all lengths of which a curve has a point."""
    return sorted({length for curve in curves for length, _ in curve.points})


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
