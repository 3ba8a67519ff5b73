"""``memsave fit``: the ways to train a model on a device, each with memory, time and the line that launches it."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memsave_recipes.core.costs.targets import Target, target_of
from memsave_recipes.core.errors import InputError, require
from memsave_recipes.core.planner.budget import usable_bytes
from memsave_recipes.core.planner.task import Launch, Task
from memsave_recipes.core.progress import ProgressBar
from memsave_recipes.core.text import GIB, format_bytes, gib_that_suffice, to_gib
from memsave_recipes.tools.cli.flags import STDOUT, recipe_path, write_text
from memsave_recipes.tools.cli.request import (
    PlanRequest,
    check_precision,
    host_budget_of,
    launch_line,
    open_flags,
    record_of_candidate,
    record_of_target,
    to_json,
)
from memsave_recipes.tools.fit.ladder import Rung, best_rung, ladder
from memsave_recipes.tools.fit.recipe_task import read_task
from memsave_recipes.tools.fit.subject import IMAGES, IMAGES_AND_TEXT, Subject, find_subject
from memsave_recipes.tools.pages.choice import heading, row
from memsave_recipes.training.parsing import named_flags

FORMAT_VERSION = 1
INTERRUPTED = 130
LEAST = "the least memory is needed"
FLAGS = {"target_memory_gib": "--memory", "target_memory": "--memory", "target ": "--card "}
"""Flags of ``memsave fit`` for the arguments of ``target_of``."""


def fit(arguments: argparse.Namespace) -> None:
    """Print each rung as soon as it is estimated, then the line that launches the best one."""
    page = _open_page(arguments)
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # tracebacks of what becomes one line
    adapters = page.subject.is_pretrained
    try:
        with ProgressBar(desc="estimating", unit="") as bar:

            def on_estimate(words: str) -> None:
                bar.set_postfix_str(words, refresh=False)
                bar.update()

            rungs = ladder(page.read, page.launch, page.budget_bytes, takes_adapters=adapters, on_estimate=on_estimate)
            for rung in rungs:
                page.add(rung, bar.write)
    except KeyboardInterrupt:
        page.end(is_complete=False)
        sys.exit(INTERRUPTED)
    page.end(is_complete=True)


@dataclass
class _Page:
    """A model on a device, with the rungs that are known; ``flags`` are the recipe's in all of them."""

    word: str
    subject: Subject
    flags: tuple[str, ...]
    launch: Launch
    budget_gib: float
    json_file: Path | None
    rungs: list[Rung] = field(default_factory=list)

    @property
    def budget_bytes(self) -> int:
        return int(self.budget_gib * GIB)

    @property
    def prints_table(self) -> bool:
        return str(self.json_file) != STDOUT

    def read(self, flags: Sequence[str]) -> Task:
        """Read the task of the recipe under the flags of all rungs and ``flags``."""
        flags = [*self.flags, *flags]
        path, named = recipe_path(self.subject.recipe), named_flags(flags)
        return read_task(path, [*flags, *open_flags(named, self.budget_gib)])

    def request_of(self, rung: Rung) -> PlanRequest:
        """Return the request of ``memsave plan`` for a rung."""
        flags = (*self.flags, *rung.flags)
        return PlanRequest(
            recipe=recipe_path(self.subject.recipe),
            flags=flags,
            named=named_flags(flags),
            task=self.read(rung.flags),
            launch=self.launch.over(rung.num_processes),
            budget_gib=self.budget_gib,
        )

    def launch_line(self, rung: Rung) -> str:
        return launch_line(self.request_of(rung), rung.candidate)

    def add(self, rung: Rung, write: Callable[[str], object]) -> None:
        if self.prints_table and not self.rungs:
            write(f"{self.word}, {self.subject.recipe}, for {self.request_of(rung).place}\n\n{heading()}")
        is_new = _figures(rung) not in map(_figures, self.rungs)
        self.rungs.append(rung)
        if self.prints_table and is_new:
            write(row(rung, self.rungs[0]))

    def end(self, *, is_complete: bool) -> None:
        """Print the line that launches the best rung, and write the JSON; refuse where none of all rungs fits."""
        best = best_rung(self.rungs)
        if best is not None and self.prints_table:
            print(*self.subject.remarks, *self.request_of(best).remarks_on(best.candidate), sep="\n")
            print(f"\n{self.launch_line(best)}")
        if self.json_file is not None:
            write_text("--json", self.json_file, self._json(best, is_complete))
        if best is None and is_complete:
            raise self._nothing_fits()

    def _nothing_fits(self) -> InputError:
        least = min(self.rungs, key=lambda rung: (not rung.candidate.fits_host, rung.candidate.needed_bytes))
        needed = least.candidate.needed_bytes
        kept = needed * self.launch.target.memory_bytes / self.budget_bytes
        is_packable = self.subject.recipe != IMAGES and any(rung.name == "LoRA" for rung in self.rungs)
        return InputError(
            f"MODEL {self.word} does not fit {format_bytes(self.budget_bytes)} of {self.launch.target.name}: "
            f"{LEAST} with {least.name} (--micro_batch_size {least.candidate.layout.micro_batch_size}, plan "
            f"{least.candidate.strategy}), {gib_that_suffice(needed)} GiB: take a card with {format_bytes(kept)}, a "
            "shorter --length or a smaller model"
            + ("; --lora --load_in_4bit needs less, which cannot be estimated" if is_packable else "")
        )

    def _json(self, best: Rung | None, is_complete: bool) -> str:
        return to_json(
            {
                "version": FORMAT_VERSION,
                "model": self.word,
                "recipe": self.subject.recipe,
                "flags": list(self.flags),
                "target": record_of_target(self.launch.target),
                "mixed_precision": self.launch.mixed_precision,
                "budget_bytes": self.budget_bytes,
                "is_complete": is_complete,
                "best": None if best is None else self.rungs.index(best),
                "rungs": [self._record(rung) for rung in self.rungs],
            }
        )

    def _record(self, rung: Rung) -> dict[str, Any]:
        candidate = rung.candidate
        return {
            "name": rung.name,
            "flags": list(rung.flags),
            "changes": rung.changes,
            "num_processes": rung.num_processes,
            **record_of_candidate(candidate),
            "relative_time": candidate.step_s / self.rungs[0].candidate.step_s,
            "launch": self.launch_line(rung) if candidate.fits else None,
        }


def _figures(rung: Rung) -> tuple[Any, ...]:
    """Return what a row shows of a rung beside its name."""
    one = rung.candidate
    return rung.num_processes, rung.changes, one.layout, one.loss, one.strategy, one.needed_bytes, one.step_s


def _open_page(arguments: argparse.Namespace) -> _Page:
    """Return the page of a command line, without rungs; refuse an unknown model or device, and sizes below 1."""
    for flag in ("length", "image_size", "max_pixels", "global_batch_size", "micro_batch_size"):
        value = getattr(arguments, flag)
        require(value is None or value >= 1, f"--{flag}", value, "at least 1")
    target = _target(arguments)
    subject = find_subject(arguments.model)
    check_precision(arguments.mixed_precision, target)
    return _Page(
        word=arguments.model,
        subject=subject,
        flags=_flags(arguments, subject),
        launch=Launch(
            target=target,
            mixed_precision=arguments.mixed_precision or _fast_precision(target),
            host_budget_bytes=host_budget_of(arguments, target),
        ),
        budget_gib=to_gib(usable_bytes(target.memory_bytes, target.device)),
        json_file=arguments.json,
    )


def _target(arguments: argparse.Namespace) -> Target:
    """Find the device; a message about it names the flags of this command."""
    try:
        return target_of(arguments.card, arguments.memory)
    except InputError as error:
        message = str(error)
        for name, flag in FLAGS.items():
            message = message.replace(name, flag)
        raise InputError(message) from error


def _fast_precision(target: Target) -> str:
    if target.device.type == "cpu":
        return "no"
    return "bf16" if target.half == "bfloat16" else "fp16"


def _flags(arguments: argparse.Namespace, subject: Subject) -> tuple[str, ...]:
    """Return the recipe's flags in all rungs; refuse a size that the model does not have."""
    sizes = {subject.length_flag: ("--length", subject.length), "image_size": ("--image_size", subject.image_size)}
    flags = list(subject.flags)
    for name, (flag, default) in sizes.items():
        value = getattr(arguments, flag.removeprefix("--"))
        if default is None and value is not None:
            raise InputError(f"{flag} {value}: {arguments.model} has no such size: leave it out")
        if default is not None:
            flags += [f"--{name}", str(value or default)]
    if arguments.max_pixels is not None:
        if subject.recipe != IMAGES_AND_TEXT:
            raise InputError(f"--max_pixels {arguments.max_pixels}: it is for models of images and text: leave it out")
        flags += ["--max_pixels", str(arguments.max_pixels)]
    flags += ["--global_batch_size", str(arguments.global_batch_size), "--optimizer", arguments.optimizer]
    if arguments.micro_batch_size is not None:
        flags += ["--micro_batch_size", str(arguments.micro_batch_size)]
    return tuple(flags)
