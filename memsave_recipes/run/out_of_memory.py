"""What would fit, where a run ran out of memory: the planner's estimates, which allocate nothing on a full device."""

import os
from collections.abc import Callable
from dataclasses import replace

import torch

from memsave_recipes.core.costs.memory import read_device_use
from memsave_recipes.core.errors import BUDGET_FLAG
from memsave_recipes.core.planner.search import Candidate, Choice
from memsave_recipes.core.planner.task import Launch, Task, choose_for_target
from memsave_recipes.core.step.settings import AUTO, StepSettings
from memsave_recipes.core.text import format_bytes, to_gib


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
    return run.with_micro_batch(size, budget_bytes, activation_checkpointing=strategy)


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
