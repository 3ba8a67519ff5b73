"""What the planner would have run: the end of the page about a device without memory.

On paper, so nothing is allocated on the device that is full. What failed is among the candidates, and only those count
that are predicted to need less.
"""

import os
from collections.abc import Callable
from dataclasses import replace

from memsave_recipes.planner.on_paper import Launch, choose_on_paper
from memsave_recipes.planner.search import Candidate, Choice
from memsave_recipes.planner.sketch import Sketch
from memsave_recipes.training.arguments import AUTO, RunArguments
from memsave_recipes.units import format_bytes, to_gib


def planned_advice(sketch: Callable[[], Sketch]) -> str:
    """A line with the flags of the fastest configuration that is predicted to fit, or what is known instead.

    Args:
        sketch: the recipe's, of the run that failed.

    Raises:
        InputError: the recipe cannot be planned on paper with these flags.
    """
    failed = sketch()
    launch = Launch.here(int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    memory_bytes = launch.target.memory_bytes
    opened = replace(failed, run=_opened(failed.run, memory_bytes))
    choice = _needing_less(choose_on_paper(opened, launch, memory_bytes), failed.run, launch)
    if choice.chosen is None:
        return f"no plan of this recipe is predicted to fit in {format_bytes(memory_bytes)}: see memsave plan"
    return (
        f"the fastest that is predicted to fit in {format_bytes(memory_bytes)} (memsave plan): "
        f"{_flags(choice.chosen)}, {format_bytes(choice.chosen.needed_bytes)} in all"
    )


def _opened(run: RunArguments, budget_bytes: int) -> RunArguments:
    """The flags with everything left to the planner."""
    return replace(
        run,
        micro_batch_size=AUTO,
        activation_checkpointing="budget",
        gradient_checkpointing=False,
        memory_budget_gib=to_gib(budget_bytes),
    )


def _needing_less(choice: Choice, run: RunArguments, launch: Launch) -> Choice:
    """Without what is predicted to need as much as the configuration that failed, where that is a candidate."""
    size = run.geometry(launch.num_processes).micro_batch_size
    same = [
        candidate.needed_bytes
        for candidate in choice.candidates
        if (candidate.geometry.micro_batch_size, candidate.strategy) == (size, run.activation_checkpointing)
    ]
    limit = min(same, default=launch.target.memory_bytes + 1)
    return Choice(candidates=tuple(candidate for candidate in choice.candidates if candidate.needed_bytes < limit))


def _flags(candidate: Candidate) -> str:
    """What to type; a plan of the solver's is made again, on the device."""
    flags = [f"--micro_batch_size {candidate.geometry.micro_batch_size}"]
    flags.append(f"--activation_checkpointing {candidate.strategy}")
    if candidate.strategy == "budget":
        flags.append(f"--memory_budget_gib {to_gib(candidate.budget_bytes):.4g}")
    if candidate.loss is not None:
        flags.append(f"--loss {candidate.loss}")
    return " ".join(flags)
