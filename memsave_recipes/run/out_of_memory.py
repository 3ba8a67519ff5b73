"""The page of a step that ran out of memory: what filled it, which flags free how much, and what would fit.

It allocates nothing on the full device: it uses earlier measurements, the shapes of existing tensors, and for
``planned_advice`` the planner's estimates.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memsave_recipes.activations.blocks import Block, Layer
from memsave_recipes.errors import BUDGET_FLAG
from memsave_recipes.planner.savings import Saving, Setup, savings_of
from memsave_recipes.planner.search import Candidate, Choice
from memsave_recipes.planner.task import Launch, Task, choose_for_target
from memsave_recipes.plans import plan_for
from memsave_recipes.profiling.breakdown import persistent_tensors
from memsave_recipes.profiling.memory import read_device_use, write_snapshot
from memsave_recipes.run.run_plan import RunPlan
from memsave_recipes.sharding import is_sharded
from memsave_recipes.step.settings import AUTO, StepSettings
from memsave_recipes.text import format_bytes, spaced, to_gib
from memsave_recipes.training.launch import device_name

if TYPE_CHECKING:
    from memsave_recipes.run.first_steps import MemoryWatch

UNPLANNED = RunPlan(plan_for("none", ()))
VIEWER = "https://pytorch.org/memory_viz"
HEADLINE_OF_SAVINGS = "what to change, how much it can free at the peak of a step, and the loss curve then:"
NO_SAVINGS_IN_SHARDS = (
    "what to change: a smaller --micro_batch_size, --activation_checkpointing full, or more ranks; how much that frees "
    "is not computed for weights in shards"
)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a run.

    Args:
        flags: all flags of the recipe, with their values.
        blocks: those of its plan.
        name: in dashboards.
    """

    folder: Path
    flags: dict[str, Any]
    planned: RunPlan = UNPLANNED
    blocks: Sequence[Block | Layer] = ()
    name: str = ""

    def snapshot_path(self, rank: int) -> Path:
        """Return the file for the allocator snapshot of a rank."""
        return self.folder / (f"memory_snapshot-rank{rank}.pickle" if rank else "memory_snapshot.pickle")


def page_of(watch: "MemoryWatch", step: int, error: RuntimeError) -> str:
    """Return the page of a step, counted from 0, that ran out of memory."""
    accelerator, parts, savings = watch.accelerator, _parts(watch), _savings(watch)
    held_bytes = read_device_use(accelerator.device).others_bytes
    rows = [(name, format_bytes(size), "") for name, size in parts.items()]
    rows.append(("together", format_bytes(sum(parts.values())), ""))
    advice = [
        (one.flags, "not known" if one.freed_bytes is None else format_bytes(one.freed_bytes), one.curve)
        for one in savings
    ]
    width = max(len(name) for name, _, _ in [*rows, *advice])
    where = f"rank {accelerator.process_index} of {accelerator.num_processes} ({device_name(accelerator.device)})"
    when = "as far as it had come" if watch.breakdown is None else "at the peak of an earlier step, measured"
    return "\n".join(
        [
            f"out of memory in step {step + 1} on {where}",
            f"  {str(error).strip().splitlines()[0]}",
            *([f"  other processes hold {format_bytes(held_bytes)} of this device"] if held_bytes else []),
            f"what filled it, {when}:",
            *_table(rows, width),
            NO_SAVINGS_IN_SHARDS if is_sharded(watch.model) else HEADLINE_OF_SAVINGS,
            *_table(advice, width),
            snapshot_line(watch),
        ]
    )


def _parts(watch: "MemoryWatch") -> dict[str, int]:
    """Return the bytes by kind: as measured, or computed now."""
    if watch.breakdown is not None:
        return {spaced(name.removesuffix("_bytes")): size for name, size in vars(watch.breakdown).items()}
    stays = persistent_tensors(watch.model, watch.optimizer, watch.average)
    parts = {spaced(label.use.value): sum(label.storages.values()) for label in stays}
    if watch.on_cpu:
        return {**parts, "saved for the backward": watch.forward_meter.num_bytes}
    peak = torch.accelerator.max_memory_allocated(watch.accelerator.device)
    return {**parts, "activations and temporaries": max(0, peak - sum(parts.values()))}


def _savings(watch: "MemoryWatch") -> list[Saving]:
    """Return the flags that would help, where that can be computed."""
    if is_sharded(watch.model):
        return []
    measured, meter = watch.breakdown, watch.forward_meter
    activations = meter.num_bytes if measured is None else measured.activations_bytes
    return savings_of(
        Setup(
            flags=watch.settings.flags,
            layout=watch.layout,
            model=watch.model,
            mixed_precision=watch.accelerator.mixed_precision,
            activations_bytes=activations or None,  # 0: it ended before anything was saved
            freed_by_recomputation_bytes=meter.freed_by_recomputation_bytes,
            device_type=watch.accelerator.device.type,
        )
    )


def snapshot_line(watch: "MemoryWatch") -> str:
    """Write the allocator snapshot of a CUDA device; return a sentence with its path, or why there is none."""
    if watch.accelerator.device.type != "cuda":
        return "no allocator snapshot: only CUDA devices have one"
    path = watch.settings.snapshot_path(watch.accelerator.process_index)
    try:
        write_snapshot(path)
    except (OSError, RuntimeError) as error:  # the page matters more
        return f"no allocator snapshot: {error}"
    return f"the allocator's state is in {path}: open it at {VIEWER}"


def planned_advice(task: Callable[[], Task]) -> str:
    """Return a line with the flags of the fastest configuration that is predicted to fit, and in less than the failed.

    Args:
        task: the recipe's, under the flags of the run that failed.

    Raises:
        InputError: the recipe cannot be estimated with these flags.
    """
    failed = task()
    launch = Launch.here(int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    memory_bytes = launch.target.memory_bytes - read_device_use(device).others_bytes
    opened = replace(failed, run=_with_all_open(failed.run, memory_bytes))
    found = choose_for_target(opened, launch, memory_bytes)
    choice = _needing_less(found, failed.run, launch)
    if choice.chosen is None:
        return f"no plan of this recipe is predicted to fit in {format_bytes(memory_bytes)}: see memsave plan"
    return (
        f"the fastest that is predicted to fit in {format_bytes(memory_bytes)} (memsave plan): "
        f"{_flags(choice.chosen)}, {format_bytes(choice.chosen.needed_bytes)} in all"
    )


def _with_all_open(run: StepSettings, budget_bytes: int) -> StepSettings:
    """Leave micro-batch size and strategy to the planner."""
    size = run.micro_batch_size if run.keeps_micro_batch else AUTO
    strategy = run.budget_strategy
    return run.with_micro_batch(size, budget_bytes, activation_checkpointing=strategy, gradient_checkpointing=False)


def _needing_less(choice: Choice, run: StepSettings, launch: Launch) -> Choice:
    """Keep the candidates that need less than the configuration that failed, if that is among them."""
    size = run.layout(launch.num_processes).micro_batch_size
    same = [
        candidate.needed_bytes
        for candidate in choice.candidates
        if (candidate.layout.micro_batch_size, candidate.strategy) == (size, run.activation_checkpointing)
    ]
    limit = min(same, default=launch.target.memory_bytes + 1)
    return Choice(candidates=tuple(candidate for candidate in choice.candidates if candidate.needed_bytes < limit))


def _flags(candidate: Candidate) -> str:
    """Return the candidate as flags; a plan of the solver is made again, on the device."""
    flags = [f"--micro_batch_size {candidate.layout.micro_batch_size}"]
    flags.append(f"--activation_checkpointing {candidate.strategy}")
    if candidate.strategy == "budget":
        flags.append(f"{BUDGET_FLAG} {to_gib(candidate.budget_bytes):.4g}")
    if candidate.loss is not None:
        flags.append(f"--loss {candidate.loss}")
    return " ".join(flags)


def _table(rows: list[tuple[str, str, str]], width: int) -> list[str]:
    return [f"  {name:<{width}}  {figure:>9}  {remark}".rstrip() for name, figure, remark in rows]
