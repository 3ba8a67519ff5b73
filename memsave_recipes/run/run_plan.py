"""The plan of a run: the one that its flags name, or the best by measurements of the run's own step.

A plan for a budget is run in a trial step before training. The first rank's choice holds for all ranks. Where even the
smallest micro-batch finds no memory to be measured, the choice is made by estimates.

NOTE [ a plan by estimates ]
1. The units of shards follow the plan, so it is chosen before the weights are cut up, by estimates as ``memsave plan``
   makes them. Ranks that share rows wait for each other in every layer, so they plan in the same way. Bytes are those
   of the first rank, which has most.
2. The budget is that of the flags, or what the rank with the least memory can use.
3. The trial step runs on all ranks together. Where it needs more than the budget, gradients in shards are reduced for
   every micro-batch, and then micro-batches are halved, under the same plan: another one would have other units.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from typing import ClassVar

import torch
from accelerate import Accelerator
from torch import nn

from memsave_recipes.core.activations.streaming import host_bytes
from memsave_recipes.core.costs.memory import empty_cache, read_device_use
from memsave_recipes.core.costs.targets import UNKNOWN_HOST, Host, find_target, host_memory_rate, host_rate, target_of
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.budget import (
    COMPILED_RATIOS,
    overheads_of_device,
    static_memory_of,
    usable_bytes,
    usable_host_bytes,
)
from memsave_recipes.core.planner.search import Candidate, Choice, Room, SearchSpace, search, search_space
from memsave_recipes.core.planner.task import (
    Launch,
    Task,
    check_samples,
    choose_for_target,
    layouts_of,
)
from memsave_recipes.core.planner.trial_step import MAX_TRIALS, with_smaller_ratio
from memsave_recipes.core.plans import Plan
from memsave_recipes.core.plans.chain import CUDA, StaticMemory
from memsave_recipes.core.plans.plan import offloads
from memsave_recipes.core.progress import ProgressBar
from memsave_recipes.core.sharding.groups import NONE, ShardGroups
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.core.step.settings import AUTO, StepSettings
from memsave_recipes.core.text import format_bytes, gib_that_suffice, to_gib
from memsave_recipes.run.step_on_device import StepOnDevice, run_trial_step
from memsave_recipes.tools.fit.advice import HostUse, budget_too_small, reduction_line
from memsave_recipes.tools.pages.choice import show_choice
from memsave_recipes.training.arguments import BUDGET_FLAG
from memsave_recipes.training.launch.distributed import on_main_process
from memsave_recipes.training.launch.processes import describe_busy_host


@dataclass(frozen=True)
class RunPlan:
    """A plan; with its predicted peak, for a budget, and host memory; in shards also how gradients are reduced."""

    plan: Plan
    predicted_peak_bytes: int | None = None
    predicted_host_bytes: int = 0
    reduces_once: bool = False


def plan_run(task: Task, step: StepOnDevice, estimated: Candidate | None = None, host: Host = UNKNOWN_HOST) -> RunPlan:
    """Find the plan that the flags ask for; show one for a budget, and run it in a trial step.

    Sets ``step.batches.layout`` where the micro-batch size is left to the planner, or turns out to be too large.

    Args:
        task: the recipe's task under this run's flags.
        estimated: the result of ``choose_by_estimates``, in whose units weights in shards have been cut up.
        host: the result of ``host_of``.

    Raises:
        InputError: no such strategy, or nothing fits in the budget.
    """
    accelerator, run = step.accelerator, task.run
    if not run.searches:
        return _named(task, step, host)
    if estimated is not None:
        candidate = _Estimated(accelerator, task).tried(estimated, step)
    else:
        measured = _Measured(accelerator, task, step, host)
        candidate = measured.tried(measured.choose(measured.open_layouts()), step)
    empty_cache(accelerator.device)  # of the trial steps
    step.batches.layout = candidate.layout
    check_samples(task, step.batches.smallest_micro_batch)
    return RunPlan(candidate.forecast.plan, candidate.allocated_bytes, candidate.host_bytes, candidate.reduces_once)


def _named(task: Task, step: StepOnDevice, host: Host) -> RunPlan:
    """Return the plan that the flags name; print the memory of the host that it and the optimizer take."""
    accelerator, on_host = step.accelerator, 0
    if accelerator.device.type != "cpu":
        line, on_host = on_main_process(accelerator, partial(_host_memory, task, step, host))
        if line is not None:
            accelerator.print(line)
    plan = task.run.named_plan(step.model, step.running_blocks)
    if task.run.compiles_on(accelerator.device):
        plan = plan.on_compiled_layers()
    size = task.run.micro_batch_of_blocks(step.batches.layout)
    plan = plan if size is None else plan.in_micro_batches(size)
    return RunPlan(plan, None, on_host, bool(task.run.reduces_once))


def _host_memory(task: Task, step: StepOnDevice, host: Host) -> tuple[str | None, int]:
    """Return a line on the host's memory that a plan and the optimizer take, if any, and its bytes, 0 where not known.

    Raises:
        InputError: the host has less.
    """
    accelerator = step.accelerator
    if offloads(task.run.activation_checkpointing or NONE):
        here = partial(Launch.here, accelerator.num_processes, accelerator.mixed_precision)
        return predicted_host_memory(task, here, host)
    static = _static_memory(task, step.model, step.batches.layout)
    if not static.host_bytes:
        return None, 0
    return _line_of(HostUse.beside_plans(static.host_bytes + host_bytes(step.model), host))


def host_of(accelerator: Accelerator, task: Task, model: nn.Module, layout: BatchLayout) -> Host:
    """Return a rank's host before the optimizer takes any of it, with what streamed weights have taken.

    Raises:
        InputError: the optimizer takes more at once.
    """
    there = on_main_process(accelerator, lambda: usable_host_bytes(accelerator.device))
    if there is None:
        return UNKNOWN_HOST
    streamed_bytes, static = host_bytes(model), _static_memory(task, model, layout)
    host = Host(there + streamed_bytes)
    if static.updated_bytes:
        _line_of(HostUse.beside_plans(static.host_bytes + streamed_bytes, host))
    return host


def _static_memory(task: Task, model: nn.Module, layout: BatchLayout) -> StaticMemory:
    """Return that of a rank on an accelerator."""
    groups = ShardGroups.of(task.run.shard, layout.num_processes)
    num_shards = None if groups is None else groups.size
    return static_memory_of(task.optim, model, layout, num_shards=num_shards, device=CUDA)


def _line_of(use: HostUse) -> tuple[str, int]:
    if not use.host.holds(use.num_bytes):
        raise use.too_small
    return use.line, use.num_bytes


def choose_by_estimates(accelerator: Accelerator, task: Task) -> Candidate:
    """Find the fastest plan and micro-batch for ranks that hold shards or share rows: NOTE [ a plan by estimates ].

    Args:
        task: the recipe's task under this run's flags.

    Raises:
        InputError: nothing fits in the budget, or the step of this model cannot be estimated.
    """
    own = torch.tensor([budget_of(task.run, accelerator.device)], dtype=torch.int64, device=accelerator.device)
    budget_bytes = int(accelerator.gather(own).min())
    return on_main_process(accelerator, lambda: _Estimated(accelerator, task).choose(budget_bytes))


def budget_of(run: StepSettings, device: torch.device) -> int:
    """Return the budget of the flags, or ``usable_bytes`` of what other processes leave of an accelerator.

    Raises:
        InputError: there is neither.
    """
    if run.budget_bytes is not None:
        return run.budget_bytes
    if device.type == "cpu":
        raise InputError(f"--micro_batch_size auto needs {BUDGET_FLAG} on a CPU: the GiB that a step may take")
    use = read_device_use(device)
    return usable_bytes(use.total_bytes - use.others_bytes, device)


def predicted_host_memory(task: Task, here: Callable[[], Launch], host: Host = UNKNOWN_HOST) -> tuple[str, int]:
    """Return a line on the host's memory that offloading takes, and its bytes, 0 where not known.

    They are estimates, as a named strategy is not measured.

    Raises:
        InputError: the host has less.
    """
    try:
        launch = replace(here(), host_budget_bytes=host.budget_bytes)
        (candidate,) = choose_for_target(_of_flags(task), launch, launch.target.memory_bytes).candidates
    except Exception as unknown:  # fake tensors cannot run every model; a missing prediction must not stop the run
        return f"offload: how much of the host's memory it takes cannot be predicted ({type(unknown).__name__})", 0
    return _line_of(HostUse.of(candidate))


def _of_flags(task: Task, run: StepSettings | None = None) -> Task:
    """Return ``task`` with the loss of the flags alone, and with ``run`` in place of its own."""
    return replace(task, run=run or task.run, losses=(None,))


@dataclass(frozen=True)
class _Trial:
    """A trial step with the highest peak of all ranks; ``None`` where one had no memory left."""

    candidate: Candidate
    peak_bytes: int | None

    @property
    def needed_bytes(self) -> int:
        """The peak with the overheads."""
        return (self.peak_bytes or 0) + sum(self.candidate.overheads.values())

    @property
    def fits(self) -> bool:
        """Whether the budget is enough."""
        return self.peak_bytes is not None and self.needed_bytes <= self.candidate.budget_bytes

    @property
    def missed_bytes(self) -> int:
        """The bytes by which the prediction was too low; 0 where they are not known."""
        return 0 if self.peak_bytes is None else self.peak_bytes - self.candidate.peak_bytes

    @property
    def problem(self) -> str:
        """The beginning of a line on a step that does not fit."""
        predicted = f"the prediction of {format_bytes(self.candidate.peak_bytes)} was wrong"
        if self.peak_bytes is None:
            return f"{predicted}, a rank had no memory left"
        in_shards = "" if self.candidate.forecast.in_shards is None else " in shards"
        budget = format_bytes(self.candidate.budget_bytes)
        return f"{predicted}, a step{in_shards} needs {format_bytes(self.needed_bytes)} of {budget}"


@dataclass(frozen=True)
class _Planning:
    """Chooses by the costs of each micro-batch, tries the choice, and takes less where it misses; on all ranks."""

    accelerator: Accelerator
    task: Task
    keeps_plan: ClassVar[bool] = False

    def tried(self, candidate: Candidate, step: StepOnDevice) -> Candidate:
        """Return ``candidate``, or the first of those after it whose trial step fits the budget."""
        ratios = COMPILED_RATIOS
        while not (tried := _Trial(candidate, run_trial_step(candidate, step))).fits:
            empty_cache(self.accelerator.device)  # here, where no frame of the failed step holds its tensors any more
            ratios = with_smaller_ratio(ratios, candidate.forecast.plan)
            candidate = self.after(tried, ratios)
        return candidate

    def after(self, trial: _Trial, ratios: tuple[float, ...]) -> Candidate:
        """Return the candidate to try next; ``ratios`` of compiled memory may be measured for it."""
        raise NotImplementedError

    @property
    def launch(self) -> Launch:
        """The devices of the run; one of unknown rates has those of an A100."""
        device = self.accelerator.device
        try:
            target = find_target("cpu" if device.type == "cpu" else "cuda")
        except InputError:
            target = target_of(None, to_gib(read_device_use(device).total_bytes))
        return Launch(
            target=target,
            num_processes=self.accelerator.num_processes,
            mixed_precision=self.accelerator.mixed_precision.replace("fp8", "bf16"),
            host_budget_bytes=usable_host_bytes(device),
        )

    def chosen(self, choice: Choice) -> Candidate:
        """Return the fastest candidate that fits, which the first rank shows with the others; refuse if none does."""
        if choice.chosen is None:
            raise budget_too_small(choice.smallest, self.task, lambda: self.launch)
        if self.accelerator.is_main_process:
            show_choice(choice)
        return choice.chosen

    def _smaller_layout(self, trial: _Trial) -> BatchLayout:
        """Halve the micro-batches, unless reducing each of their gradients takes less; refuse if they cannot shrink."""
        candidate, layout, size = trial.candidate, trial.candidate.layout, trial.candidate.layout.micro_batch_size
        if candidate.reduces_once:
            self.accelerator.print(f"{trial.problem}, so {reduction_line(once=False)}")
            return layout
        if size == 1 or self.task.optim.optimizer_in_backward or self.task.run.keeps_micro_batch:
            above = f" above {gib_that_suffice(trial.needed_bytes)}" if self.keeps_plan else ""
            raise InputError(f"{trial.problem}, and the micro-batch cannot be halved: raise {BUDGET_FLAG}{above}")
        smaller = layout.with_micro_batch(-(-size // 2))
        same_plan = " under the same plan" if self.keeps_plan else ""
        self.accelerator.print(
            f"{trial.problem}: falling back to micro-batches of {smaller.micro_batch_size}{same_plan}, "
            f"{smaller.describe()}"
        )
        return smaller


@dataclass(frozen=True)
class _Measured(_Planning):
    """Plans by costs that are measured on the ranks; where memory is too small to measure, by estimates."""

    step: StepOnDevice
    host: Host

    def open_layouts(self) -> list[BatchLayout]:
        """Return the batch layouts to search: where plans may compile, which takes long, the best one without."""
        layouts = layouts_of(self.task, self.accelerator.num_processes, self.step.smallest_micro_batch)
        if self._space.strategy != "budget" or len(layouts) == 1:
            return layouts
        choice = self._search(layouts, replace(self._space, strategy="budget:bitwise"))
        return [(choice.chosen or choice.smallest).layout]

    def choose(self, layouts: list[BatchLayout]) -> Candidate:
        """Measure and return the fastest candidate that fits."""
        if self.accelerator.device.type == "cpu" and (busy := describe_busy_host()):
            self.accelerator.print(busy)
        return self.chosen(self._search(layouts, self._space))

    def after(self, trial: _Trial, ratios: tuple[float, ...]) -> Candidate:
        """Keep more memory free where compiled blocks save a part, by NOTE [ trial step ] 4; else shrink batches."""
        saves_part = self.task.run.activation_checkpointing == "budget" and trial.candidate.forecast.plan.ratios
        if not saves_part or not trial.missed_bytes or len(ratios) - len(COMPILED_RATIOS) >= MAX_TRIALS:
            return self.choose([self._smaller_layout(trial)])
        self.accelerator.print(f"{trial.problem}: measuring the layers compiled with a ratio of {ratios[-1]:g}")
        space = replace(self._space, compiled_ratios=ratios, missed_bytes=trial.missed_bytes)
        choice = self._search([trial.candidate.layout], space)
        if choice.chosen is None:
            return self.choose([self._smaller_layout(trial)])
        return self.chosen(choice)

    @cached_property
    def _measured_host(self) -> Host:
        """Return the host with the rates of the optimizer's copies and updates there, where there are any."""
        device, layout = self.accelerator.device, self.step.batches.layout
        static = static_memory_of(self.task.optim, self.step.model, layout, device=device)
        copies = on_main_process(self.accelerator, partial(host_rate, device)) if static.awaited_bytes else inf
        updates = on_main_process(self.accelerator, host_memory_rate) if static.updated_bytes else inf
        return replace(self.host, bytes_per_s=copies, memory_bytes_per_s=updates)

    @property
    def _space(self) -> SearchSpace:
        device, run = self.accelerator.device, self.task.run
        room = Room(
            budget_bytes=budget_of(run, device),
            overheads=overheads_of_device(device),
            host=self._measured_host,
        )
        ranks = self.accelerator.num_processes
        model, optim = self.step.model, self.task.optim
        compiled = run.compiles_on(device)
        return search_space(run, optim, model, room, num_processes=ranks, device=device, compiled=compiled)

    def _search(self, layouts: list[BatchLayout], space: SearchSpace) -> Choice:
        with ProgressBar(shown=self.accelerator.is_main_process, desc="measuring blocks", unit="run") as progress:
            choice = search(layouts, (None,), lambda layout, _: self.step.candidates(space, layout, progress))
        return choice if choice.candidates else self._search_by_estimates(layouts, space)

    def _search_by_estimates(self, layouts: list[BatchLayout], space: SearchSpace) -> Choice:
        """Choose where not even the smallest micro-batch can be measured."""
        size = layouts[0].micro_batch_size
        no_memory = f"there is no memory to measure a micro-batch of {size}"
        self.accelerator.print(f"{no_memory}: planning by estimates")

        def choose() -> Choice:
            run = self.task.run
            open_size: int | str | None = AUTO if len(layouts) > 1 else size
            if run.keeps_micro_batch:
                open_size = run.micro_batch_size
            run = replace(run, micro_batch_size=open_size, activation_checkpointing=space.strategy)
            launch = Launch.here(self.accelerator.num_processes, self.accelerator.mixed_precision)
            launch = replace(launch, host_budget_bytes=self.host.budget_bytes)
            return choose_for_target(_of_flags(self.task, run), launch, space.budget_bytes)

        try:
            return on_main_process(self.accelerator, choose)
        except InputError as refused:
            hint = "give a smaller --micro_batch_size"
            raise InputError(f"{no_memory}, and no estimate ({refused.one_line}): {hint}") from refused


@dataclass(frozen=True)
class _Estimated(_Planning):
    """Plans by estimates, for weights in shards before and after they are cut up: NOTE [ a plan by estimates ]."""

    keeps_plan: ClassVar[bool] = True

    def choose(self, budget_bytes: int) -> Candidate:
        """Return the fastest of all candidates that fits; on the first rank."""
        launch, before = self.launch, ", before the weights are cut up" if self.task.run.in_shards else ""
        self.accelerator.print(
            f"{self._flag}: planning by estimates for {launch.target.name}{before}: seconds are not measured"
        )
        choice = self._search(self.task.run, launch, budget_bytes)
        return _sendable(self.chosen(choice))

    def after(self, trial: _Trial, ratios: tuple[float, ...]) -> Candidate:
        """Keep the plan, and with it the units; shrink layout or reduction."""
        smaller = self._smaller_layout(trial)

        def find() -> Candidate:
            budget_bytes, plan = trial.candidate.budget_bytes, trial.candidate.forecast.plan
            changes = {"reduces_once": False} if self.task.run.in_shards else {}
            run = self.task.run.with_micro_batch(smaller.micro_batch_size, budget_bytes, **changes)
            (found,) = self._search(run, self.launch, budget_bytes, plan).candidates
            return _sendable(found)

        return on_main_process(self.accelerator, find)

    def _search(self, run: StepSettings, launch: Launch, budget_bytes: int, plan: Plan | None = None) -> Choice:
        """Estimate all candidates, or those with a plan, for the loss of the flags."""
        try:
            return choose_for_target(_of_flags(self.task, run), launch, budget_bytes, plan=plan)
        except InputError:
            raise
        except Exception as unknown:  # fake tensors cannot run every model
            raise InputError(
                f"{self._flag}: the step of this model cannot be estimated ({type(unknown).__name__}), by which "
                "its plan is found: name a plan and a --micro_batch_size"
            ) from unknown

    @property
    def _flag(self) -> str:
        run = self.task.run
        return f"--shard {run.shard}" if run.in_shards else f"--sequence_parallel {run.sequence_parallel}"


def _sendable(candidate: Candidate) -> Candidate:
    """Return ``candidate`` with the shards of its own plan alone: a function that finds others holds the model."""
    found, in_shards = candidate.forecast, candidate.forecast.in_shards
    if in_shards is None:
        return candidate
    known = {found.plan: in_shards.of_plan(found.plan)}
    return replace(candidate, forecast=replace(found, in_shards=replace(in_shards, of_plan=known.__getitem__)))
