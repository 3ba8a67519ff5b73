"""Memory against throughput: every strategy at every micro-batch, predicted and, where the device is here, measured."""

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

EVERY = (2, 4)  # the K of every:K and segments:K that are looked at
SEGMENTS = (2, 4, 8)
BUDGETS = 4  # so many of the solver's plans for each micro-batch, from the least memory to nearly plain's
TIMED = 3  # a median of so many
DOCUMENT = 256  # tokens, in the rows of packed text that are made up for measuring


def every_strategy(
    space: SearchSpace, measurement: Measurement, layout: BatchLayout, loss: str | None = None
) -> list[Candidate]:
    """Candidates under every word that makes a plan, and under the solver's plans for a few budgets.

    For ``choose_for_target``; where the flags name a strategy, it alone.
    """
    if space.strategy not in BUDGET_WORDS:
        return space.candidates(measurement, layout, loss)
    found = [one for one in space.candidates(measurement, layout, loss) if one.strategy not in BUDGET_WORDS]
    num_blocks = sum(map(len, measurement.workload.stacks))
    words = [f"every:{k}" for k in EVERY] + [f"segments:{k}" for k in SEGMENTS]
    for word in words:
        if int(word.partition(":")[2]) <= num_blocks:
            found += replace(space, strategy=word).candidates(measurement, layout, loss)
    plain = found[0]
    for budget_bytes in _budgets(space, measurement, layout, plain):
        solved = replace(space, budget_bytes=budget_bytes).candidates(measurement, layout, loss)
        found += [replace(one, budget_bytes=space.budget_bytes) for one in solved if one.strategy in BUDGET_WORDS]
    return _without_twins(found)


@dataclass(frozen=True)
class Measured:
    """What a candidate took when it was run; its bytes with the overheads, as ``Candidate.needed_bytes``."""

    needed_bytes: int
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """A candidate in the picture.

    Args:
        is_optimal: no other one is as fast in as little memory.
        measured: where it was run.
    """

    candidate: Candidate
    is_optimal: bool
    measured: Measured | None = None

    @property
    def measured_samples_per_s(self) -> float | None:
        """Throughput as it was measured."""
        samples = self.candidate.layout.global_batch_size
        return None if self.measured is None else samples / self.measured.step_s


def points_of(candidates: Sequence[Candidate]) -> list[Point]:
    """The candidates, with those marked that are Pareto-optimal by what is predicted."""
    optimal: set[int] = set()
    fastest = 0.0
    for candidate in sorted(candidates, key=lambda one: (one.needed_bytes, -one.samples_per_s)):
        if candidate.samples_per_s > fastest:
            optimal.add(id(candidate))
            fastest = candidate.samples_per_s
    return [Point(candidate=candidate, is_optimal=id(candidate) in optimal) for candidate in candidates]


def run_points(
    task: Task, launch: Launch, points: Sequence[Point], *, on_run: Callable[[], object] = lambda: None
) -> list[Point]:
    """Run a micro-batch of each on the device that is here: random weights, made-up samples.

    Args:
        on_run: is called after every point.

    Returns:
        The points with what was measured; as they were where the device has no memory for them.
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


def made_up(batch: Batch, device: torch.device) -> Batch:
    """Values that a model can take for the tensors of a task: the same for each run of a micro-batch."""
    return {name: _values(name, tensor).to(device) for name, tensor in batch.items()}


def _budgets(space: SearchSpace, measurement: Measurement, layout: BatchLayout, plain: Candidate) -> list[int]:
    """From the least that a plan needs to nearly what plain needs."""
    least = least_memory(measurement, space.static(layout))
    least_bytes = replace(plain, forecast=least).needed_bytes
    return [least_bytes + (plain.needed_bytes - least_bytes) * part // BUDGETS for part in range(BUDGETS)]


def _without_twins(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of those that cost the same, the first."""
    return list({(one.needed_bytes, one.step_s): one for one in reversed(candidates)}.values())[::-1]


def _run(task: Task, launch: Launch, candidate: Candidate, accelerator: Accelerator, model: nn.Module) -> Measured:
    device, dtype = accelerator.device, AUTOCAST_DTYPES[launch.mixed_precision]
    trained = task.trained(model, candidate.loss, device)
    batch = made_up(task.micro_batch(candidate.layout.micro_batch_size), device)

    def forward() -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False):
            return task.loss_of(trained, batch)

    peak_bytes = run_trial_step(candidate, accelerator, model, forward)
    beside_bytes = candidate.needed_bytes - candidate.peak_bytes
    seconds = _micro_batch_s(candidate, model, forward, device)
    return Measured(peak_bytes + beside_bytes, seconds * candidate.layout.accumulation_steps)


def _micro_batch_s(
    candidate: Candidate, model: nn.Module, forward: Callable[[], Tensor], device: torch.device
) -> float:
    def step(meter: Meter) -> None:
        meter.mark()
        torch.autograd.backward(forward())
        meter.mark()
        clear_gradients(model)

    with apply_plan(model, candidate.forecast.plan), preserve_state(model, device):
        return median(DeviceInstruments(device).read_clock(step)[0] for _ in range(TIMED))


def _values(name: str, tensor: Tensor) -> Tensor:
    """By what the recipes call their tensors; any class and any token there is has the number 1."""
    shape, dtype = tensor.shape, tensor.dtype
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype)
    if name == "affine":  # every image as it is
        return torch.eye(2, 3, dtype=dtype).expand(shape).clone()
    if name == "position_ids":
        return (torch.arange(shape[-1]) % DOCUMENT).expand(shape).clone()
    return torch.ones(shape, dtype=dtype)
