"""A recipe's training task, the choice of its plan for a target device by estimates alone, and its frontier.

A recipe that ``memsave plan`` can plan has a function ``task(args)`` next to its ``main``, made of the same functions.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from memsave_recipes.core.activations import apply_plan, block_names, find_stacks
from memsave_recipes.core.activations.micro_batches import tensors_in
from memsave_recipes.core.activations.streaming import ALL, FROZEN, NONE, host_bytes
from memsave_recipes.core.costs.block_costs import Measurement, Workload
from memsave_recipes.core.costs.estimate import Estimator, fake_batch, fake_model, stream_on_target
from memsave_recipes.core.costs.memory import is_out_of_memory
from memsave_recipes.core.costs.preserve_state import clear_gradients, preserve_state
from memsave_recipes.core.costs.targets import Target, find_target, target_of
from memsave_recipes.core.costs.throughput import utilization_pct
from memsave_recipes.core.costs.trace_events import DeviceInstruments, Meter
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.ahead import ahead
from memsave_recipes.core.planner.budget import least_memory, overheads_of_target, plans_to_measure, usable_bytes
from memsave_recipes.core.planner.search import Candidate, Choice, SearchSpace, open_layouts, search, search_space
from memsave_recipes.core.planner.trial_step import step_bytes
from memsave_recipes.core.plans import BUDGET_WORDS, Plan
from memsave_recipes.core.sharding.groups import ShardGroups, check_precision
from memsave_recipes.core.sharding.units import modules_outside_blocks
from memsave_recipes.core.step.batch_layout import Batch, BatchLayout
from memsave_recipes.core.step.settings import OptimizerSettings, StepSettings
from memsave_recipes.core.text import GIB

FOLDER_FLAG = "--output_dir"
AUTOCAST_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A recipe's model, loss and micro-batch under its flags.

    Args:
        run, optim: the settings of a step, such as the parsed flags.
        build_model: the model with the blocks: with ``with_weights=True`` as it is trained, else without weights, on
            torch's default device.
        adapt: adds adapters to that model in place; by default it has none.
        trained: the module that the recipe trains, made of the model, one of ``losses`` (``None`` for the flags'
            choice) and the device that it will run on.
        loss_of: the summed loss of a micro-batch under ``trained``'s module.
        micro_batch: a micro-batch of so many samples with the largest shapes of the data; its values are not read.
        takes_adapters: whether ``--lora`` is a flag of the recipe, and off.
        stream_weights: whether weights of layers wait on the host.
        check_samples: raises ``InputError`` where the model, on ``meta``, does not train on so many samples at once.
        losses: the values of ``--loss`` to compare; ``(None,)`` for a recipe with one loss.
        losses_on_accelerators: in place of several ``losses``, those to compare there; empty: the same.
        assumed: assumptions made in place of data, for people.
    """

    run: StepSettings
    optim: OptimizerSettings
    build_model: Callable[..., nn.Module]
    adapt: Callable[[Any], object] = lambda model: model
    trained: Callable[[Any, Any, torch.device], nn.Module] = lambda model, loss, device: model
    loss_of: Callable[[nn.Module, Batch], Tensor]
    micro_batch: Callable[[int], Batch]
    takes_adapters: bool = False
    stream_weights: bool = False
    check_samples: Callable[[nn.Module, int], None] | None = None
    losses: tuple[str | None, ...] = (None,)
    losses_on_accelerators: tuple[str | None, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def streamed(self) -> str:
        """The weights of layers that wait on the host: of those that train, where the host steps them."""
        if not self.stream_weights:
            return NONE
        return ALL if self.optim.offload_optimizer == "step" else FROZEN

    def losses_on(self, device_type: str) -> tuple[str | None, ...]:
        """Return the values of ``--loss`` to compare on devices of this type."""
        several = len(self.losses) > 1 and device_type != "cpu"
        return (several and self.losses_on_accelerators) or self.losses

    def planned_model(self) -> nn.Module:
        """Build the model with its adapters, without weights."""
        model = self.build_model()
        self.adapt(model)
        self.run.convert(model)
        return model


def layouts_of(
    task: Task, num_processes: int, smallest: Callable[[BatchLayout], int] | None = None
) -> list[BatchLayout]:
    """Return ``open_layouts`` without those that leave a micro-batch of fewer samples than the model trains on.

    Args:
        smallest: the fewest samples of a forward of the run in a layout; by default those of a full step.

    Raises:
        InputError: none is left.
    """
    found: list[BatchLayout] = []
    refusals: dict[int, InputError | None] = {}
    for layout in open_layouts(task.run, task.optim, num_processes):
        num_samples = min(2, (smallest or _smallest)(layout))  # one may be too few, and two never are
        if num_samples not in refusals:
            refusals[num_samples] = _refusal(task, num_samples)
        found += [layout] if refusals[num_samples] is None else []
    for refusal in filter(None, refusals.values()) if not found else ():
        raise refusal
    return found


def check_samples(task: Task, num_samples: int) -> None:
    """Raise ``InputError`` where the model does not train on so many samples at once."""
    if task.check_samples is not None:
        with torch.device("meta"):
            task.check_samples(task.build_model(), num_samples)


def _refusal(task: Task, num_samples: int) -> InputError | None:
    try:
        check_samples(task, num_samples)
    except InputError as error:
        return error
    return None


def _smallest(layout: BatchLayout) -> int:
    ranks = layout.micro_batches(layout.global_batch_size)
    return min(max(1, len(micro_batch)) for rank in ranks for micro_batch in rank)


def fake_planned_model(task: Task, target: Target) -> nn.Module:
    """Build the model of a task as it is planned for a device, of fake tensors.

    Raises:
        InputError: no weights of its layers can be streamed, where they are to be.
    """
    model = fake_model(task.planned_model)
    if task.stream_weights and target.device_type != "cpu":
        stream_on_target(model, trained=task.streamed == ALL)
    return model


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The devices that a recipe is to run on.

    Args:
        host_budget_bytes: memory of a rank's host for offloading; ``None`` where it is not known.
        link_bytes_per_s: that a rank sends to others; ``None``: as much as to its host.
        by_data_sheet: whether seconds are bounds by the data sheet, and not what to expect.
    """

    target: Target
    num_processes: int = 1
    mixed_precision: str = "no"
    host_budget_bytes: int | None = None
    link_bytes_per_s: float | None = None
    by_data_sheet: bool = False

    @property
    def rates(self) -> Target:
        """The target with the rates that seconds are made of."""
        return self.target if self.by_data_sheet else self.target.calibrated

    def over(self, num_processes: int) -> "Launch":
        """Return the same with other ranks on the same host."""
        host = self.host_budget_bytes
        share = None if host is None else host * self.num_processes // num_processes
        return replace(self, num_processes=num_processes, host_budget_bytes=share)

    @property
    def half(self) -> str:
        """The dtype for frozen weights: of 16 bits, if it can."""
        if self.mixed_precision == "fp16":
            return "float16"
        return "bfloat16" if self.target.half == "bfloat16" else "float32"

    @property
    def bytes_per_s_between(self) -> float:
        """The rate at which a rank sends to others."""
        return self.link_bytes_per_s or min(self.target.host_bytes_per_s, self.target.bytes_per_s)

    @classmethod
    def here(cls, num_processes: int, mixed_precision: str) -> "Launch":
        """Make the launch on the device of this machine.

        Raises:
            InputError: its figures are not known.
        """
        target = find_target("cuda" if torch.cuda.is_available() else "cpu")
        return cls(target=target, num_processes=num_processes, mixed_precision=mixed_precision.replace("fp8", "bf16"))


def read_task(recipe: Path, args: Sequence[str]) -> Task:
    """Return the task of the recipe in a file under the flags ``args``; ``--output_dir`` may be missing.

    Raises:
        InputError: no such file, no function ``task`` in it, or flags that it refuses.
    """
    task: Callable[[list[str]], Task] | None = getattr(_load(recipe), "task", None)
    if task is None:
        raise InputError(f"{recipe} has no function task(args): docs/planner.md has an example")
    named = any(word.partition("=")[0] == FOLDER_FLAG for word in args)
    if "transformers" in sys.modules:  # which shows a bar for weights that it does not read either
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    return task([*args] if named else [*args, FOLDER_FLAG, "out"])


def _load(recipe: Path) -> object:
    if not os.path.isfile(recipe):  # unlike pathlib, without an error for a text that cannot be a path
        raise InputError(f"RECIPE {recipe} is not a file: name one such as recipes/language_modeling.py")
    spec = importlib.util.spec_from_file_location(recipe.stem, recipe)
    if spec is None or spec.loader is None:
        raise InputError(f"RECIPE {recipe} is not a Python file")
    try:
        compile(recipe.read_bytes(), str(recipe), "exec")
    except (SyntaxError, ValueError) as error:
        raise InputError(f"RECIPE {recipe} is not Python: {error}") from error
    module = importlib.util.module_from_spec(spec)
    sys.modules[recipe.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def estimate(
    task: Task,
    *,
    target: str | None = "cuda",
    target_memory_gib: float | None = None,
    budget_gib: float | None = None,
    num_processes: int = 1,
    mixed_precision: str = "no",
) -> Choice:
    """Return the ways to compute a step of ``task``, with memory and time on a device that need not be here.

    No data is read, no weight is made and nothing is run. The micro-batch size and the strategy that ``task.run`` names
    are kept; with ``micro_batch_size="auto"`` and ``activation_checkpointing="budget"`` all of them are compared.

    Args:
        target: ``cpu`` (this one), ``cuda`` (the device that is here, or an A100), or a device such as ``h100``.
        target_memory_gib: memory of that device; with ``target=None`` that of any GPU, at the rates of an A100.
        budget_gib: memory of one device, in GiB, for everything on it. Default: that of ``task.run``, or else 95 % of a
            GPU's memory, and all of a CPU's.
        num_processes: devices, with DDP, or with shards as ``task.run`` says.
        mixed_precision: ``no``, ``bf16`` or ``fp16``, as for ``accelerate launch``.

    Returns:
        All candidates; ``chosen`` is the fastest that fits, ``None`` where none does.

    Raises:
        InputError: no such target or precision, numbers out of range, contradictions in ``task.run``, or a model
            without blocks for its strategy.
    """
    launch = Launch(
        target=target_of(target, target_memory_gib), num_processes=num_processes, mixed_precision=mixed_precision
    )
    if mixed_precision not in AUTOCAST_DTYPES:
        raise InputError(f"mixed_precision {mixed_precision}: choose one of {', '.join(AUTOCAST_DTYPES)}")
    if num_processes < 1:
        raise InputError(f"num_processes {num_processes}: it must be at least 1")
    if budget_gib is not None and not 0 < budget_gib < inf:
        raise InputError(f"budget_gib {budget_gib}: it must be above 0")
    named = task.run.budget_bytes if budget_gib is None else int(budget_gib * GIB)
    usable = usable_bytes(launch.target.memory_bytes, launch.target.device_type)
    return choose_for_target(task, launch, usable if named is None else named)


def choose_for_target(
    task: Task,
    launch: Launch,
    budget_bytes: int,
    *,
    on_size: Callable[[BatchLayout], None] = lambda layout: None,
    plan: Plan | None = None,
    candidates: Callable[[SearchSpace, Measurement, BatchLayout, str | None], list[Candidate]] = SearchSpace.candidates,
    in_processes: bool = False,
) -> Choice:
    """Return all candidates for a recipe on a device, estimated from fake tensors and the device's rates.

    Args:
        on_size: called with the batch layout that is estimated next.
        plan: the only one, in place of those of the strategy.
        candidates: the candidates that follow from the costs of one micro-batch.
        in_processes: whether a process of its own may estimate each further loss.

    Raises:
        InputError: flags that contradict each other, or a model without blocks for the strategy.
    """
    estimates = Estimates(task, launch)
    space = replace(space_of(task, launch, estimates.model, budget_bytes), plan=plan)
    plans_of = _plans_of(space, launch)
    layouts, losses = layouts_of(task, launch.num_processes), task.losses_on(launch.target.device_type)

    def estimated(loss: str | None) -> Iterator[list[Candidate]]:
        return (candidates(space, estimates.of(layout, loss, plans_of), layout, loss) for layout in layouts)

    with ExitStack() as processes:
        of_losses = {loss: estimated(loss) for loss in losses}
        # Candidates in shards cannot be sent; workspaces on a CPU depend on its threads, of which a fork has one.
        if in_processes and space.in_shards is None and launch.target.device_type != "cpu":
            for loss in losses[1:]:
                of_losses[loss] = processes.enter_context(ahead(of_losses[loss], all_at_once=True))

        def candidates_of(layout: BatchLayout, loss: str | None) -> list[Candidate]:
            on_size(layout)
            return next(of_losses[loss])

        return search(layouts, losses, candidates_of)


def _plans_of(space: SearchSpace, launch: Launch) -> Callable[[Workload], list[Plan]]:
    """Return what lists the plans under which a workload has to run for the strategy of ``space``."""
    return partial(
        plans_to_measure,
        space.strategy,
        device_type=launch.target.device_type,
        compiles=False,
        micro_batch_size=space.micro_batch_size,
    )


def space_of(task: Task, launch: Launch, model: nn.Module, budget_bytes: int) -> SearchSpace:
    """Return what the flags of a task leave open for its model on a device."""
    return search_space(
        task.run,
        task.optim,
        model,
        budget_bytes,
        num_processes=launch.num_processes,
        device_type=launch.target.device_type,
        overheads=overheads_of_target(launch.target),
        host_budget_bytes=launch.host_budget_bytes,
        host_bytes_per_s=launch.target.host_bytes_per_s,
        host_memory_bytes_per_s=launch.target.host_memory_bytes_per_s,
        memory_bytes_per_s=launch.rates.bytes_per_s,
        groups=shard_groups(task, launch),
        bytes_per_s=launch.bytes_per_s_between,
    )


@dataclass
class Estimates:
    """The costs of a task's micro-batches on a device that need not be here."""

    task: Task
    launch: Launch

    def __post_init__(self) -> None:
        self.model = fake_planned_model(self.task, self.launch.target)
        launch = self.launch
        precision = AUTOCAST_DTYPES[launch.mixed_precision]
        exchange_rate = launch.bytes_per_s_between if self.task.run.sequence_parallel > 1 else inf
        self._estimator = Estimator(self.model, launch.rates, precision, exchange_rate)

    def of(self, layout: BatchLayout, loss: str | None, plans_of: Callable[[Workload], Sequence[Plan]]) -> Measurement:
        """Return the costs of the largest forward of a step under plans for it; the first keeps everything."""
        workload = fake_workload(self.task, self.launch, self.model, layout, loss)
        return self._estimator.estimate(workload, plans_of(workload))

    def model_flops(self, layout: BatchLayout, loss: str | None) -> Mapping[str, int]:
        """Return the model's FLOPs in the largest forward of a step and its backward, by precision."""
        return self._estimator.model_flops(fake_workload(self.task, self.launch, self.model, layout, loss))


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
    plans_of = _plans_of(replace(space, strategy=candidate.strategy), launch)
    (bound,) = space.candidates(estimates.of(layout, loss, plans_of), layout, loss)
    flops = estimates.model_flops(layout, loss)
    rates = {precision: count * layout.forwards_per_step / candidate.step_s for precision, count in flops.items()}
    mfu_pct = utilization_pct(rates, launch.target.name)
    return Speed(bound_s=bound.step_s, tokens_per_s=tokens_per_s, mfu_pct=mfu_pct)


def shard_groups(task: Task, launch: Launch) -> ShardGroups | None:
    """Return the ranks that hold one model in shards; ``None`` where each holds all of it.

    Raises:
        InputError: as ``ShardGroups.of``, or a precision that shards do not take.
    """
    groups = ShardGroups.of(task.run.shard, launch.num_processes)
    if groups is not None:
        check_precision(str(task.run.shard), launch.mixed_precision)
    return groups


def fake_workload(task: Task, launch: Launch, model: nn.Module, layout: BatchLayout, loss: str | None) -> Workload:
    """Make the largest forward of a step of a recipe, of fake tensors."""
    trained = task.trained(model, loss, launch.target.device)
    make_batch = inputs_of(task, layout, partial(fake_batch, model))
    return Workload(
        model=model,
        forward=lambda: task.loss_of(trained, make_batch()),
        batch=tensors_in(make_batch()),
        device=torch.device("cpu"),
        stacks=block_names(find_stacks(model)),
        host_bytes=host_bytes(model),
        extra_modules=modules_outside_blocks(model) if task.run.in_shards else (),
    )


def inputs_of(task: Task, layout: BatchLayout, tensors_of: Callable[[Batch], Batch]) -> Callable[[], Batch]:
    """Make what the largest forward of a step takes, anew for each forward, on one rank that waits for no other.

    Args:
        tensors_of: makes a micro-batch from one without values.
    """
    micro_batches = [tensors_of(task.micro_batch(size)) for size in layout.largest_forward(layout.global_batch_size)]
    return partial(layout.joined, micro_batches)


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
