"""The line that launches what was chosen, ready to be pasted into a shell."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from memsave_recipes.cli.recipe import Question
from memsave_recipes.errors import InputError
from memsave_recipes.planner.search import Candidate
from memsave_recipes.plans import BUDGET_WORDS
from memsave_recipes.training.arguments import AUTO

CONFIGS = "accelerate_configs"


def launch_line(question: Question, chosen: Candidate, plan_file: Path | None = None) -> str:
    """``accelerate launch ...`` with the flags as they were typed and those that were decided.

    Args:
        plan_file: that holds the chosen plan, for a run that shall not look for it again.
    """
    decided = _decided(question, chosen)
    if plan_file is not None:
        decided["activation_checkpointing"] = str(plan_file)
        decided.pop("memory_budget_gib", None)
    words = ["accelerate", "launch", "--config_file", str(_config_file(question))]
    if question.launch.num_processes > 1:
        words += ["--num_processes", str(question.launch.num_processes)]
    if question.launch.mixed_precision != "no":
        words += ["--mixed_precision", question.launch.mixed_precision]
    words += [str(question.recipe), *_without(question.flags, decided)]
    words += [word for name, value in decided.items() for word in (f"--{name}", value)]
    if "output_dir" not in question.named:
        words += ["--output_dir", f"out/{question.recipe.stem}"]
    return " ".join(map(_quoted, words))


def check_plan_file(question: Question) -> None:
    """Whether a run with these flags takes a plan from a file.

    Raises:
        InputError: its preset has a budget, which goes with ``budget`` alone.
    """
    if "memory_budget_gib" in question.named:
        raise InputError("--plan does not go with a preset that has memory_budget_gib: give the budget as a flag")


def _quoted(word: str) -> str:
    """``word`` for a shell, and without what commands a terminal: those letters in the form ``$'\\x1b'``."""
    if word.isprintable():
        return shlex.quote(word)
    letters = (letter if letter.isprintable() and letter not in "\\'" else _as_bytes(letter) for letter in word)
    return f"$'{''.join(letters)}'"


def _as_bytes(letter: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in letter.encode())


def _config_file(question: Question) -> Path:
    """Beside the folder of the recipe, or, for a recipe from elsewhere, in the folder where one launches."""
    several = question.launch.num_processes > 1
    if question.launch.target.device_type == "cpu":
        name = "cpu_ddp.yaml" if several else "cpu.yaml"
    else:
        name = "multi_gpu.yaml" if several else "single_gpu.yaml"
    beside = question.recipe.parent.parent / CONFIGS
    return (beside if beside.is_dir() else Path(CONFIGS)) / name


def _decided(question: Question, chosen: Candidate) -> dict[str, str]:
    """The flags that were left open, by name.

    ``--memory_budget_gib`` stays with ``budget`` and ``auto`` alone. One that a preset names cannot be taken back, so
    what it belongs to stays open for the run, which comes to the same choice.
    """
    run, strategy = question.sketch.run, str(question.sketch.run.activation_checkpointing)
    by_preset = "memory_budget_gib" in question.named
    is_solved = chosen.strategy in BUDGET_WORDS
    decided = {}
    if run.micro_batch_size == AUTO:
        stays_open = by_preset and strategy not in BUDGET_WORDS
        decided["micro_batch_size"] = AUTO if stays_open else str(chosen.geometry.micro_batch_size)
    if strategy in BUDGET_WORDS:
        decided["activation_checkpointing"] = strategy if is_solved or by_preset else chosen.strategy
    if len(question.sketch.losses) > 1 and chosen.loss is not None:
        decided["loss"] = chosen.loss
    if is_solved and not by_preset:
        decided["memory_budget_gib"] = f"{question.budget_gib:.12g}"
    return decided


def _without(flags: Sequence[str], names: dict[str, str]) -> list[str]:
    """``flags`` less those named, with their one value each."""
    kept: list[str] = []
    words = iter(flags)
    for word in words:
        name, is_joined, _ = word.partition("=")
        if name.removeprefix("--") not in names or not name.startswith("--"):
            kept.append(word)
        elif not is_joined:
            next(words, None)
    return kept
