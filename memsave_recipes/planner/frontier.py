"""Memory against throughput: every strategy at every micro-batch size, predicted, and measured on this device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from memsave_recipes.activations import apply_plan
from memsave_recipes.planner.budget import least_memory
from memsave_recipes.planner.search import Candidate, SearchSpace
from memsave_recipes.planner.task import AUTOCAST_DTYPES, Launch, Task
from memsave_recipes.planner.trial_step import run_trial_step
from memsave_recipes.plans import BUDGET_WORDS
from memsave_recipes.profiling.block_costs import Measurement
from memsave_recipes.profiling.preserve_state import clear_gradients, preserve_state
from memsave_recipes.profiling.trace_events import DeviceInstruments, Meter
from memsave_recipes.training.batch_layout import BatchLayout
from memsave_recipes.training.batching import Batch

EVERY = (2, 4)  # values of K in every:K
SEGMENTS = (2, 4, 8)  # values of K in segments:K
NUM_BUDGETS = 4  # plans of the solver for each micro-batch size, from the least memory to nearly the baseline's
NUM_TIMED = 3  # steps whose median is the measured time
DOCUMENT_TOKENS = 256  # per document in synthetic packed batches


def every_strategy(
    space: SearchSpace, measurement: Measurement, layout: BatchLayout, loss: str | None = None
) -> list[Candidate]:
    """The candidates of every strategy, and of the solver for ``NUM_BUDGETS`` budgets, for ``choose_for_target``.

    Where the flags name a strategy, its candidates alone.
    """
    if space.strategy not in BUDGET_WORDS:
        return space.candidates(measurement, layout, loss)
    found = [one for one in space.candidates(measurement, layout, loss) if one.strategy not in BUDGET_WORDS]
    num_blocks = sum(map(len, measurement.workload.stacks))
    baseline = found[0]
    for strategy in [f"every:{k}" for k in EVERY] + [f"segments:{k}" for k in SEGMENTS]:
        if int(strategy.partition(":")[2]) <= num_blocks:
            found += replace(space, strategy=strategy).candidates(measurement, layout, loss)
    for budget_bytes in _budgets(space, measurement, layout, baseline):
        solved = replace(space, budget_bytes=budget_bytes).candidates(measurement, layout, loss)
        found += [replace(one, budget_bytes=space.budget_bytes) for one in solved if one.strategy in BUDGET_WORDS]
    return _distinct_costs(found)


@dataclass(frozen=True)
class Measured:
    """The memory (with overheads, as ``Candidate.needed_bytes``) and the time of a candidate that was run."""

    needed_bytes: int
    step_s: float


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """A candidate of a frontier.

    Args:
        is_optimal: whether it is Pareto-optimal: no other candidate is as fast in as little memory.
        measured: its real costs, if it was run.
    """

    candidate: Candidate
    is_optimal: bool
    measured: Measured | None = None

    @property
    def measured_samples_per_s(self) -> float | None:
        """Measured throughput."""
        samples = self.candidate.layout.global_batch_size
        return None if self.measured is None else samples / self.measured.step_s


def points_of(candidates: Sequence[Candidate]) -> list[FrontierPoint]:
    """The candidates as points, marked where they are Pareto-optimal by prediction."""
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

    Args:
        on_run: called after every point.

    Returns:
        The points with ``measured``; without it where the device has too little memory.
    """
    accelerator = Accelerator(cpu=launch.target.device_type == "cpu")
    with accelerator.device:
        model = task.planned_model()
    found = []
    for point in points:
        try:
            measured = _run(task, launch, point.candidate, accelerator, model)
            found.append(replace(point, measured=measured))
        except torch.OutOfMemoryError:
            found.append(point)
        on_run()
    return found


def synthetic_batch(batch: Batch, device: torch.device) -> Batch:
    """Valid values for the tensors of a task's micro-batch."""
    return {name: _values(name, tensor).to(device) for name, tensor in batch.items()}


def _budgets(space: SearchSpace, measurement: Measurement, layout: BatchLayout, baseline: Candidate) -> list[int]:
    """From the least that a plan needs to nearly the baseline's need."""
    least = least_memory(measurement, space.static(layout))
    least_bytes = replace(baseline, forecast=least).needed_bytes
    saved_bytes = baseline.needed_bytes - least_bytes
    return [least_bytes + saved_bytes * part // NUM_BUDGETS for part in range(NUM_BUDGETS)]


def _distinct_costs(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first of the candidates that cost the same."""
    return list({(one.needed_bytes, one.step_s): one for one in reversed(candidates)}.values())[::-1]


def _run(task: Task, launch: Launch, candidate: Candidate, accelerator: Accelerator, model: nn.Module) -> Measured:
    device, dtype = accelerator.device, AUTOCAST_DTYPES[launch.mixed_precision]
    trained = task.trained(model, candidate.loss, device)
    batch = synthetic_batch(task.micro_batch(candidate.layout.micro_batch_size), device)

    def forward() -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False):
            return task.loss_of(trained, batch)

    peak_bytes = run_trial_step(candidate, accelerator, model, forward)
    overheads_bytes = candidate.needed_bytes - candidate.peak_bytes
    seconds = _micro_batch_s(candidate, model, forward, device)
    return Measured(peak_bytes + overheads_bytes, seconds * candidate.layout.accumulation_steps)


def _micro_batch_s(
    candidate: Candidate, model: nn.Module, forward: Callable[[], Tensor], device: torch.device
) -> float:
    def step(meter: Meter) -> None:
        meter.mark()
        torch.autograd.backward(forward())
        meter.mark()
        clear_gradients(model)

    with apply_plan(model, candidate.forecast.plan), preserve_state(model, device):
        return median(DeviceInstruments(device).read_clock(step)[0] for _ in range(NUM_TIMED))


def _values(name: str, tensor: Tensor) -> Tensor:
    """Values by the recipes' names of tensors; 1 is a valid class and a valid token everywhere."""
    shape, dtype = tensor.shape, tensor.dtype
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype)
    if name == "affine":  # identity
        return torch.eye(2, 3, dtype=dtype).expand(shape).clone()
    if name == "position_ids":
        return (torch.arange(shape[-1]) % DOCUMENT_TOKENS).expand(shape).clone()
    return torch.ones(shape, dtype=dtype)
