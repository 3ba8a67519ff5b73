"""The plan of a run: the one that its flags name, or the best by measurements of the run's own step.

A plan for a budget is run in a trial step before training. The first rank's choice holds for all ranks. Where the
device has too little memory to measure even the smallest micro-batch, the choice is made by estimates instead.

NOTE [ a plan for shards ]
1. Units follow the plan, so it is chosen before the weights are cut up (``choose_in_shards``), by estimates on fake
   tensors as ``memsave plan`` makes them: also for a model that no rank has room for. Bytes are predicted for the first
   rank, which has most; seconds follow from the rates of the device and are not measured.
2. The budget is that of the flags, or what the rank with the least memory can use.
3. The trial step runs in shards. Where it needs more than the budget, micro-batches are halved under the same plan:
   another one would have other units. Gradients that a search would reduce once a step are first reduced for every
   micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from memsave_recipes.activations import plan_blocks
from memsave_recipes.distributed import on_main_process
from memsave_recipes.errors import InputError
from memsave_recipes.estimation.targets import find_target, target_of
from memsave_recipes.planner.budget import (
    COMPILED_RATIOS,
    overheads_of_device,
    static_memory_of,
    usable_bytes,
    usable_host_bytes,
)
from memsave_recipes.planner.savings import budget_too_small
from memsave_recipes.planner.search import (
    Candidate,
    Choice,
    SearchSpace,
    host_line,
    host_memory_too_small,
    open_layouts,
    reduction_line,
    search,
)
from memsave_recipes.planner.task import Launch, Task, choose_for_target, fake_planned_model
from memsave_recipes.planner.trial_step import MAX_TRIALS, with_smaller_ratio
from memsave_recipes.plans import Plan
from memsave_recipes.plans.plan import offloads
from memsave_recipes.profiling.block_costs import Measurement
from memsave_recipes.profiling.memory import empty_cache
from memsave_recipes.run.step_on_device import StepOnDevice, run_trial_step, run_trial_step_in_shards
from memsave_recipes.step.batch_layout import BatchLayout
from memsave_recipes.step.settings import AUTO, PER_MICRO_BATCH, PER_STEP, OptimizerSettings, StepSettings
from memsave_recipes.text import GIB, ProgressBar, format_bytes, gib_that_suffice, to_gib


@dataclass(frozen=True)
class RunPlan:
    """A plan; with the predicted peak of a step if it was made for a budget.

    ``reduces_once`` says whether gradients in shards are reduced once a step.
    """

    plan: Plan
    predicted_peak_bytes: int | None = None
    reduces_once: bool = False


def plan_run(
    run: StepSettings,
    optim: OptimizerSettings,
    step: StepOnDevice,
    task: Callable[[], Task],
    show: Callable[[Choice], None],
    in_shards: Candidate | None = None,
) -> RunPlan:
    """The plan that the flags ask for; one for a budget is shown, and run in a trial step.

    Sets ``step.batches.layout`` where the micro-batch size is left to the planner, or turns out to be too large.

    Args:
        task: the recipe's task under this run's flags.
        show: prints a choice; called on the first rank.
        in_shards: what ``choose_in_shards`` has found, in whose units the weights have been cut up since.

    Raises:
        InputError: no such strategy, or nothing fits in ``--memory_budget_gib``.
    """
    accelerator, model, batches = step.accelerator, step.model, step.batches
    if not run.searches:
        if run.activation_checkpointing and offloads(run.activation_checkpointing) and accelerator.device.type != "cpu":
            here = partial(Launch.here, accelerator.num_processes, accelerator.mixed_precision)
            accelerator.print(on_main_process(accelerator, lambda: predicted_host_memory(task, here)))
        running = step.running_blocks() if run.activation_checkpointing not in (None, "none") else None
        plan = plan_blocks(model, run.activation_checkpointing or "none", running)
        size = run.micro_batch_of_blocks(batches.layout)
        plan = plan if size is None else plan.in_micro_batches(size)
        return RunPlan(plan, reduces_once=run.reduce_gradients == PER_STEP)
    if in_shards is not None:
        candidate = _PlanningInShards(accelerator, task()).tried(in_shards, step)
    else:
        host_budget_bytes = on_main_process(accelerator, lambda: usable_host_bytes(accelerator.device))
        planning = _Planning(run, optim, step, task, host_budget_bytes, show)
        candidate = planning.tried(planning.choose(planning.open_layouts()))
    empty_cache(accelerator.device)  # of the trial steps
    batches.layout = candidate.layout
    reduces_once = candidate.reduces_once or run.reduce_gradients == PER_STEP
    return RunPlan(candidate.forecast.plan, candidate.allocated_bytes, reduces_once)


def choose_in_shards(accelerator: Accelerator, task: Task, show: Callable[[Choice], None]) -> Candidate:
    """The fastest plan and micro-batch for weights in shards, before they are cut up: NOTE [ a plan for shards ].

    Args:
        task: the recipe's task under this run's flags.
        show: prints a choice; called on the first rank.

    Raises:
        InputError: nothing fits in ``--memory_budget_gib``, or the step of this model cannot be estimated.
    """
    own = torch.tensor([budget_of(task.run, accelerator.device)], dtype=torch.int64, device=accelerator.device)
    budget_bytes = int(accelerator.gather(own).min())
    planning = _PlanningInShards(accelerator, task)
    return on_main_process(accelerator, lambda: planning.chosen(budget_bytes, show))


def budget_of(run: StepSettings, device: torch.device) -> int:
    """The budget of the flags, or ``usable_bytes`` of an accelerator.

    Raises:
        InputError: there is neither.
    """
    if run.memory_budget_gib is not None:
        return int(run.memory_budget_gib * GIB)
    if device.type == "cpu":
        raise InputError("--micro_batch_size auto needs --memory_budget_gib on a CPU: the GiB that a step may take")
    return usable_bytes(torch.get_device_module(device).mem_get_info(device)[1], device.type)


def predicted_host_memory(task: Callable[[], Task], here: Callable[[], Launch]) -> str:
    """A line on the host's memory that offloading takes: an estimate, as nothing is measured for a named strategy.

    Raises:
        InputError: the host has less.
    """
    try:
        launch, found = here(), replace(task(), losses=(None,))
        launch = replace(launch, host_budget_bytes=usable_host_bytes(launch.target.device))
        (candidate,) = choose_for_target(found, launch, launch.target.memory_bytes).candidates
    except Exception as unknown:  # fake tensors cannot run every model; a missing prediction must not stop the run
        return f"offload: how much of the host's memory it takes cannot be predicted ({type(unknown).__name__})"
    if not candidate.fits_host:
        raise host_memory_too_small(candidate)
    return host_line(candidate)


@dataclass(frozen=True)
class _Problem:
    """The error of a prediction, with the bytes by which it was too low; 0 where a rank had no memory left."""

    sentence: str
    missed_bytes: int = 0


@dataclass(frozen=True)
class _Planning:
    """The planning of a run; every method is called on all ranks."""

    run: StepSettings
    optim: OptimizerSettings
    step: StepOnDevice
    task: Callable[[], Task]
    host_budget_bytes: int | None
    show: Callable[[Choice], None]

    @property
    def accelerator(self) -> Accelerator:
        """That of the step."""
        return self.step.accelerator

    @property
    def strategy(self) -> str:
        """The value of ``--activation_checkpointing``."""
        return self.run.activation_checkpointing or "none"

    def open_layouts(self) -> list[BatchLayout]:
        """The batch layouts to search; where plans may compile, the best without compiling, as compiling takes long.

        Raises:
            InputError: as ``search``.
        """
        layouts = open_layouts(self.run, self.optim, self.accelerator.num_processes)
        if self.strategy != "budget" or len(layouts) == 1:
            return layouts
        choice = self._search(layouts, "budget:bitwise")
        return [(choice.chosen or choice.smallest).layout]

    def _search_space(self, strategy: str) -> SearchSpace:
        device = self.accelerator.device
        options = {"logging_steps": self.run.logging_steps, "device_type": device.type}
        return SearchSpace(
            budget_bytes=self.budget_bytes,
            strategy=strategy,
            static=partial(static_memory_of, self.optim, self.step.model, **options),
            overheads=overheads_of_device(device),
            host_budget_bytes=self.host_budget_bytes,
            plan_of=partial(plan_blocks, self.step.model),
            micro_batch_size=self.run.micro_batch_of_blocks(self.step.batches.layout),
        )

    @property
    def budget_bytes(self) -> int:
        """As ``budget_of``."""
        return budget_of(self.run, self.accelerator.device)

    def choose(self, layouts: list[BatchLayout]) -> Candidate:
        """The fastest candidate that fits; the first rank shows it with the others.

        Raises:
            InputError: nothing fits.
        """
        choice = self._search(layouts, self.strategy)
        if choice.chosen is None:
            raise budget_too_small(
                choice.smallest,
                self.step.model,
                self.optim,
                takes_adapters=self.task().takes_adapters,
                mixed_precision=self.accelerator.mixed_precision,
                device_type=self.accelerator.device.type,
            )
        if self.accelerator.is_main_process:
            self.show(choice)
        return choice.chosen

    def tried(self, candidate: Candidate) -> Candidate:
        """``candidate``, or the next one whose trial step fits the budget.

        After a plan that compiles, that is one of the same micro-batches with more memory kept free (NOTE [ trial step
        ] 4), then one of smaller micro-batches.

        Raises:
            InputError: not even micro-batches of 1 fit.
        """
        ratios = COMPILED_RATIOS
        while (problem := self._problem(candidate)) is not None:
            empty_cache(self.accelerator.device)  # here, where no frame of the failed step holds its tensors any more
            ratios = with_smaller_ratio(ratios, candidate.forecast.plan)
            same_size = self._with_more_free(candidate, problem, ratios)
            candidate = same_size or self.choose([self._smaller_layout(candidate.layout, problem)])
        return candidate

    def _with_more_free(self, candidate: Candidate, problem: _Problem, ratios: tuple[float, ...]) -> Candidate | None:
        """After a plan that compiles: the best for the same micro-batches, if there is one to try."""
        compiles = self.strategy == "budget" and candidate.forecast.plan.compiled_memory_ratio is not None
        if not compiles or not problem.missed_bytes or len(ratios) - len(COMPILED_RATIOS) >= MAX_TRIALS:
            return None
        self.accelerator.print(f"{problem.sentence}: measuring the layers compiled with a ratio of {ratios[-1]:g}")
        choice = self._search([candidate.layout], self.strategy, ratios, problem.missed_bytes)
        if choice.chosen is not None and self.accelerator.is_main_process:
            self.show(choice)
        return choice.chosen

    def _smaller_layout(self, layout: BatchLayout, problem: _Problem) -> BatchLayout:
        """Micro-batches of half the size.

        Raises:
            InputError: they cannot be smaller.
        """
        size = layout.micro_batch_size
        if size == 1 or self.optim.optimizer_in_backward or self.run.batchnorm == "global":
            raise InputError(f"{problem.sentence}, and the micro-batch cannot be halved: raise --memory_budget_gib")
        smaller = layout.of(self.run.global_batch_size, -(-size // 2), layout.num_processes)
        self.accelerator.print(
            f"{problem.sentence}: falling back to micro-batches of {smaller.micro_batch_size}, {smaller.describe()}"
        )
        return smaller

    def _problem(self, candidate: Candidate) -> _Problem | None:
        """``None`` where the trial step fits the budget."""
        predicted = f"the prediction of {format_bytes(candidate.peak_bytes)} was wrong"
        forward = self.step.forward(candidate.layout)
        try:
            needed = run_trial_step(candidate, self.accelerator, self.step.model, forward)
        except torch.OutOfMemoryError:
            return _Problem(f"{predicted}, a rank had no memory left")
        missed_bytes = needed - candidate.peak_bytes
        needed += sum(candidate.overheads.values())
        if needed <= candidate.budget_bytes:
            return None
        sentence = f"{predicted}, a step needs {format_bytes(needed)} of {format_bytes(candidate.budget_bytes)}"
        return _Problem(sentence, missed_bytes)

    def _search(
        self,
        layouts: list[BatchLayout],
        strategy: str,
        compiled_ratios: tuple[float, ...] = COMPILED_RATIOS,
        missed_bytes: int = 0,
    ) -> Choice:
        space = replace(self._search_space(strategy), compiled_ratios=compiled_ratios, missed_bytes=missed_bytes)
        with ProgressBar(shown=self.accelerator.is_main_process, desc="measuring blocks", unit="run") as progress:
            choice = search(layouts, (None,), lambda layout, _: self.step.candidates(space, layout, progress))
        return choice if choice.candidates else self._search_by_estimates(layouts, strategy)

    def _search_by_estimates(self, layouts: list[BatchLayout], strategy: str) -> Choice:
        """The choice where not even the smallest micro-batch can be measured.

        Raises:
            InputError: the recipe cannot be estimated either.
        """
        size = layouts[0].micro_batch_size
        no_memory = f"there is no memory to measure a micro-batch of {size}"
        self.accelerator.print(f"{no_memory}: planning by estimates")

        def choose() -> Choice:
            task = self.task()
            open_size: int | str | None = AUTO if len(layouts) > 1 else size
            if self.run.batchnorm == "global":
                open_size = self.run.micro_batch_size
            run = replace(task.run, micro_batch_size=open_size, activation_checkpointing=strategy)
            launch = Launch.here(self.accelerator.num_processes, self.accelerator.mixed_precision)
            launch = replace(launch, host_budget_bytes=self.host_budget_bytes)
            return choose_for_target(replace(task, run=run, losses=(None,)), launch, self.budget_bytes)

        try:
            return on_main_process(self.accelerator, choose)
        except InputError as refused:
            way_out = "give a smaller --micro_batch_size"
            raise InputError(f"{no_memory}, and no estimate ({refused.one_line}): {way_out}") from refused


@dataclass(frozen=True)
class _PlanningInShards:
    """The planning of a run with weights in shards: NOTE [ a plan for shards ]."""

    accelerator: Accelerator
    task: Task

    @property
    def launch(self) -> Launch:
        """The devices of the run; where the rates of one are not known, with those of an A100."""
        device = self.accelerator.device
        try:
            target = find_target("cpu" if device.type == "cpu" else "cuda")
        except InputError:
            memory_bytes = torch.get_device_module(device).mem_get_info(device)[1]
            target = target_of(None, to_gib(memory_bytes))
        return Launch(
            target=target,
            num_processes=self.accelerator.num_processes,
            mixed_precision=self.accelerator.mixed_precision.replace("fp8", "bf16"),
            host_budget_bytes=usable_host_bytes(device),
        )

    def chosen(self, budget_bytes: int, show: Callable[[Choice], None]) -> Candidate:
        """Of all candidates the fastest that fits; on the first rank.

        Raises:
            InputError: as ``choose_in_shards``.
        """
        launch = self.launch
        self.accelerator.print(
            f"--shard {self.task.run.shard}: planning by estimates for {launch.target.name}, before the weights are "
            "cut up: seconds are not measured"
        )
        choice = self._choice(self.task.run, launch, budget_bytes)
        if choice.chosen is None:
            raise budget_too_small(
                choice.smallest,
                fake_planned_model(self.task, launch.target),
                self.task.optim,
                takes_adapters=self.task.takes_adapters,
                mixed_precision=launch.mixed_precision,
                device_type=launch.target.device_type,
            )
        show(choice)
        return _sendable(choice.chosen)

    def tried(self, candidate: Candidate, step: StepOnDevice) -> Candidate:
        """``candidate``, or its plan with the first halved micro-batches whose trial step fits; on all ranks.

        Raises:
            InputError: not even micro-batches of 1 fit.
            torch.OutOfMemoryError: this rank ran out of memory.
        """
        while (needed_bytes := self._needed_bytes(candidate, step)) > candidate.budget_bytes:
            empty_cache(self.accelerator.device)
            smaller = self._smaller_layout(candidate, needed_bytes)
            candidate = on_main_process(self.accelerator, partial(self._of_same_plan, candidate, smaller))
        return candidate

    def _needed_bytes(self, candidate: Candidate, step: StepOnDevice) -> int:
        return run_trial_step_in_shards(candidate, step) + sum(candidate.overheads.values())

    def _smaller_layout(self, candidate: Candidate, needed_bytes: int) -> BatchLayout:
        layout, size = candidate.layout, candidate.layout.micro_batch_size
        sentence = (
            f"the prediction of {format_bytes(candidate.peak_bytes)} was wrong, a step in shards needs "
            f"{format_bytes(needed_bytes)} of {format_bytes(candidate.budget_bytes)}"
        )
        if candidate.reduces_once and self.task.run.reduce_gradients == AUTO:
            self.accelerator.print(f"{sentence}, so {reduction_line(once=False)}")
            return layout
        if size == 1:
            raise InputError(
                f"{sentence}, and the micro-batch cannot be halved: raise --memory_budget_gib above "
                f"{gib_that_suffice(needed_bytes)}"
            )
        smaller = layout.of(layout.global_batch_size, -(-size // 2), layout.num_processes)
        self.accelerator.print(
            f"{sentence}: falling back to micro-batches of {smaller.micro_batch_size} under the same plan, "
            f"{smaller.describe()}"
        )
        return smaller

    def _of_same_plan(self, candidate: Candidate, layout: BatchLayout) -> Candidate:
        """The plan of ``candidate`` for what the trial step has left of layout and reduction; on the first rank."""
        plan = candidate.forecast.plan

        def of_plan(
            space: SearchSpace, measurement: Measurement, layout: BatchLayout, loss: str | None
        ) -> list[Candidate]:
            return replace(space, plan=plan).candidates(measurement, layout, loss)

        budget_gib = to_gib(candidate.budget_bytes) if self.task.run.solves else None
        run = replace(
            self.task.run,
            micro_batch_size=layout.micro_batch_size,
            memory_budget_gib=budget_gib,
            reduce_gradients=PER_STEP if self.task.run.reduce_gradients == PER_STEP else PER_MICRO_BATCH,
        )
        (found,) = self._choice(run, self.launch, candidate.budget_bytes, candidates=of_plan).candidates
        return _sendable(found)

    def _choice(self, run: StepSettings, launch: Launch, budget_bytes: int, **options: Any) -> Choice:
        """As ``choose_for_target``, with the loss of the flags."""
        task = replace(self.task, run=run, losses=(None,))
        try:
            return choose_for_target(task, launch, budget_bytes, **options)
        except InputError:
            raise
        except Exception as unknown:  # fake tensors cannot run every model
            raise InputError(
                f"--shard {run.shard}: the step of this model cannot be estimated ({type(unknown).__name__}), by which "
                "its plan is found: name a plan and a --micro_batch_size"
            ) from unknown


def _sendable(candidate: Candidate) -> Candidate:
    """``candidate`` with the shards of its own plan alone: what finds those of others has the model in it."""
    found, in_shards = candidate.forecast, candidate.forecast.in_shards
    assert in_shards is not None
    known = {found.plan: in_shards.of_plan(found.plan)}
    return replace(candidate, forecast=replace(found, in_shards=replace(in_shards, of_plan=known.__getitem__)))
