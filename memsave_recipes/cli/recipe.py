"""A recipe with its flags and the device to plan it for, as ``memsave plan`` and ``memsave frontier`` are asked."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from memsave_recipes.costs.on_paper import paper_model
from memsave_recipes.costs.targets import Target, find_target
from memsave_recipes.errors import InputError
from memsave_recipes.planner.beside import usable_bytes
from memsave_recipes.planner.on_paper import Launch
from memsave_recipes.planner.refusal import refusal
from memsave_recipes.planner.search import Choice, open_geometries
from memsave_recipes.planner.sketch import Sketch, read_sketch
from memsave_recipes.plans import BUDGET_WORDS
from memsave_recipes.training.arguments import AUTO, MOST_GIB, require
from memsave_recipes.training.parsing import named_flags, underscored
from memsave_recipes.training.sample_order import Geometry
from memsave_recipes.units import GIB, to_gib

SECONDS_BEFORE_THE_BAR = 5
ON_PAPER = (
    "seconds are what the data sheet allows at best, without the optimizer's update: they rank plans, they are no clock"
)
OF_THIS_CPU = "seconds are made of the rates measured here, without the optimizer's update: they rank plans"
NOT_IN_IT = "not in any figure: fragmentation of the allocator, for which 5 % are left where no budget is named"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a command was asked.

    Args:
        recipe: its file.
        flags: of the recipe, as they were typed.
        named: what these and their preset name, with the values.
        sketch: of the recipe; what the flags leave open is ``auto`` and ``budget`` in it.
        launch: where it is to run.
        budget_gib: of the device, for everything.
    """

    recipe: Path
    flags: tuple[str, ...]
    named: dict[str, str]
    sketch: Sketch
    launch: Launch
    budget_gib: float

    @property
    def budget_bytes(self) -> int:
        """The budget as the planner takes it."""
        return int(self.budget_gib * GIB)

    @property
    def title(self) -> str:
        """``vgg16, image_classification``: what the flags call the model, and the recipe."""
        names = (self.named.get(flag) for flag in ("model", "model_name_or_path", "model_type"))
        return ", ".join(filter(None, (next(filter(None, names), None), self.recipe.stem)))

    @property
    def place(self) -> str:
        """``2 x NVIDIA A10, bf16``: the devices and the precision."""
        count, precision = self.launch.num_processes, self.launch.mixed_precision
        devices = f"{count} x {self.launch.target.name}" if count > 1 else self.launch.target.name
        return devices if precision == "no" else f"{devices}, mixed precision {precision}"

    @property
    def remarks(self) -> list[str]:
        """What the figures rest on, a line each."""
        target = self.launch.target
        return [
            f"for {self.place}" + (f" ({target.remark})" if target.remark else ""),
            *(f"assumed: {words}" for words in self.sketch.assumed),
            OF_THIS_CPU if target.device_type == "cpu" else ON_PAPER,
            *([] if target.device_type == "cpu" else [NOT_IN_IT]),
        ]

    def refused(self, choice: Choice) -> InputError:
        """What to say where nothing fits."""
        model = paper_model(self.sketch.build_model)
        return refusal(choice.smallest, model, self.sketch.optim, takes_adapters=self.sketch.takes_adapters)


def read_question(arguments: argparse.Namespace) -> Question:
    """What was asked, with ``--micro_batch_size auto`` and ``--activation_checkpointing budget`` where nothing is said.

    Raises:
        InputError: a value that cannot be, no such target, or flags that the recipe refuses.
    """
    flags = underscored(arguments.flags)
    named = named_flags(flags)
    target = find_target(arguments.target or ("cuda" if torch.cuda.is_available() else "cpu"))
    _check(arguments, target)
    usable_gib = to_gib(usable_bytes(target.memory_bytes, target.device_type))
    gib = arguments.memory_budget_gib
    if gib is None and "memory_budget_gib" not in named:
        gib = usable_gib
    sketch = read_sketch(arguments.recipe, [*flags, *_open_flags(named, gib)])
    return Question(
        recipe=arguments.recipe,
        flags=flags,
        named=named,
        sketch=sketch,
        launch=Launch(target=target, num_processes=arguments.num_processes, mixed_precision=arguments.mixed_precision),
        budget_gib=gib or sketch.run.memory_budget_gib or usable_gib,
    )


def with_progress(question: Question, work: Callable[[Callable[[Geometry], None]], Choice]) -> Choice:
    """``work`` with a progress bar; it tells a function which geometry is next."""
    sketch = question.sketch
    sizes = open_geometries(sketch.run, sketch.optim, question.launch.num_processes)
    total = len(sizes) * len(sketch.losses)
    with tqdm(desc="planning", total=total, unit="size", delay=SECONDS_BEFORE_THE_BAR, leave=False) as bar:

        def on_size(geometry: Geometry) -> None:
            bar.set_postfix_str(f"micro-batch {geometry.micro_batch_size}", refresh=False)
            bar.update()

        return work(on_size)


def _open_flags(named: dict[str, str], gib: float | None) -> Sequence[str]:
    """What to add to the recipe's flags, so that all that they leave open is searched."""
    added = []
    strategy = named.get("activation_checkpointing", "full" if "gradient_checkpointing" in named else None)
    if strategy is None:
        added += ["--activation_checkpointing", BUDGET_WORDS[0]]
    if "micro_batch_size" not in named:
        added += ["--micro_batch_size", AUTO]
    is_searched = strategy in (None, *BUDGET_WORDS) or named.get("micro_batch_size", AUTO) == AUTO
    # A run that searches nothing takes no budget; here one is only held against what it needs.
    return [*added, "--memory_budget_gib", repr(gib)] if is_searched and gib is not None else added


def _check(arguments: argparse.Namespace, target: Target) -> None:
    gib, count = arguments.memory_budget_gib, arguments.num_processes
    require(gib is None or 0 < gib <= MOST_GIB, "--memory_budget_gib", gib, "from above 0 to a million")
    require(count >= 1, "--num_processes", count, "at least 1")
    if target.device_type == "cpu" and arguments.mixed_precision == "fp16":
        raise InputError("--mixed_precision fp16 does not work on the CPU: take bf16 or no")
