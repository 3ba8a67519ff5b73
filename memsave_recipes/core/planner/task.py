"""A recipe's training task, and the choice of its plan for a target device by estimates alone.

A recipe that ``memsave plan`` can plan has a function ``task(args)`` next to its ``main``, made of the same functions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from memsave_recipes.core.activations import block_names, find_stacks
from memsave_recipes.core.activations.micro_batches import tensors_in
from memsave_recipes.core.activations.streaming import ALL, NONE, host_bytes
from memsave_recipes.core.costs.block_costs import Measurement, Workload
from memsave_recipes.core.costs.estimate import Estimator, fake_batch, fake_model, stream_on_target
from memsave_recipes.core.costs.targets import Host, Target, find_target, target_of
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.budget import (
    has_layers_to_compile,
    overheads_of_target,
    usable_bytes,
)
from memsave_recipes.core.planner.search import (
    AS_FAST,
    Candidate,
    Choice,
    Room,
    SearchSpace,
    open_layouts,
    search,
    search_space,
)
from memsave_recipes.core.plans import Plan
from memsave_recipes.core.processes import ahead
from memsave_recipes.core.sharding.groups import ShardGroups, check_precision
from memsave_recipes.core.sharding.units import modules_outside_blocks
from memsave_recipes.core.step.batch_layout import Batch, BatchLayout
from memsave_recipes.core.step.memory import has_master, trained_parameters
from memsave_recipes.core.step.settings import OptimizerSettings, StepSettings
from memsave_recipes.core.text import GIB

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
        micro_batch: a micro-batch of so many samples with the largest shapes of the data, on ``meta`` but for integers
            whose values say what runs.
        takes_adapters: whether ``--lora`` is a flag of the recipe, and off.
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
    check_samples: Callable[[nn.Module, int], None] | None = None
    losses: tuple[str | None, ...] = (None,)
    losses_on_accelerators: tuple[str | None, ...] = ()
    assumed: tuple[str, ...] = ()

    def losses_on(self, device: torch.device) -> tuple[str | None, ...]:
        """Return the values of ``--loss`` to compare on such devices."""
        several = len(self.losses) > 1 and device.type != "cpu"
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
    found = open_layouts(task.run, task.optim, num_processes)
    try:
        check_samples(task, 1)
    except InputError:
        check_samples(task, 2)  # so many are never too few
        found = [layout for layout in found if (smallest or _smallest)(layout) > 1]
        if not found:
            raise
    return found


def check_samples(task: Task, num_samples: int) -> None:
    """Raise ``InputError`` where the model does not train on so many samples at once."""
    if task.check_samples is not None:
        with torch.device("meta"):
            task.check_samples(task.build_model(), num_samples)


def _smallest(layout: BatchLayout) -> int:
    ranks = layout.micro_batches(layout.global_batch_size)
    return min(max(1, len(micro_batch)) for rank in ranks for micro_batch in rank)


def fake_planned_model(task: Task, target: Target) -> nn.Module:
    """Build the model of a task as it is planned for a device, of fake tensors.

    Raises:
        InputError: no weights of its layers can be streamed, where they are to be.
    """
    model = fake_model(task.planned_model)
    if task.optim.streamed != NONE and target.device.type != "cpu":
        stream_on_target(model, trained=task.optim.streamed == ALL)
    for weight in trained_parameters(model) if not task.run.in_shards else ():
        if has_master(task.optim, weight, target.device):
            weight.grad_dtype = torch.float32
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
    usable = usable_bytes(launch.target.memory_bytes, launch.target.device)
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
    layouts, losses = layouts_of(task, launch.num_processes), task.losses_on(launch.target.device)

    without_ratios = space if space.plan is not None else replace(space, compiled_ratios=())

    def of_space(space: SearchSpace, layout: BatchLayout, loss: str | None) -> list[Candidate]:
        return candidates(space, estimates.of(layout, loss, space.plans_of), layout, loss)

    def estimated(loss: str | None) -> Iterator[list[Candidate]]:
        """Compile with each ratio, which takes seconds, only where that may bring something."""
        fastest_s = inf
        for layout in layouts:
            found = of_space(without_ratios, layout, loss)
            if space.strategy == "budget" and space.compiled and not are_enough(found, fastest_s):
                found = of_space(space, layout, loss)
            fastest_s = min([fastest_s, *(one.step_s for one in found if one.fits)])
            yield found

    with ExitStack() as processes:
        of_losses = {loss: estimated(loss) for loss in losses}
        # Candidates in shards cannot be sent; workspaces on a CPU depend on its threads, of which a fork has one.
        if in_processes and space.in_shards is None and launch.target.device.type != "cpu":
            for loss in losses[1:]:
                of_losses[loss] = processes.enter_context(ahead(of_losses[loss], all_at_once=True))

        def candidates_of(layout: BatchLayout, loss: str | None) -> list[Candidate]:
            on_size(layout)
            return next(of_losses[loss])

        return search(layouts, losses, candidates_of)


def are_enough(found: Sequence[Candidate], fastest_s: float) -> bool:
    """Return whether ratios of compiled layers can bring nothing.

    Layers that save all fit then, or are no faster than what fits with smaller micro-batches.
    """
    keep = next((one for one in found if one.strategy == "none"), None)
    if keep is None or keep.fits:
        return True
    return (1 + AS_FAST) * keep.step_s >= fastest_s and any(one.fits for one in found)


def space_of(task: Task, launch: Launch, model: nn.Module, budget_bytes: int) -> SearchSpace:
    """Return what the flags of a task leave open for its model on a device."""
    target = launch.target
    room = Room(
        budget_bytes=budget_bytes,
        overheads=overheads_of_target(target),
        host=Host(launch.host_budget_bytes, target.host_bytes_per_s, target.host_memory_bytes_per_s),
        memory_bytes_per_s=launch.rates.bytes_per_s,
    )
    return search_space(
        task.run,
        task.optim,
        model,
        room,
        num_processes=launch.num_processes,
        device=target.device,
        compiled=compiles(task, target, model),
        groups=shard_groups(task, launch),
        bytes_per_s=launch.bytes_per_s_between,
    )


def compiles(task: Task, target: Target, model: nn.Module) -> bool:
    """Return whether the layers of a task's model compute compiled on a device."""
    return task.run.compiles_on(target.device) and has_layers_to_compile(model)


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
    make_batch = inputs_of(task, layout, partial(fake_batch, model, keep_integers=True))
    return Workload(
        model=model,
        forward=lambda: task.loss_of(trained, make_batch()),
        batch=tensors_in(make_batch()),
        device=launch.target.device,
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
