"""Plan runs to come: ``memsave fit``, the ways to train a model; ``plan``, the fastest run that fits; ``frontier``.

They import their dependencies when they run, so that ``--help`` is fast.
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memsave_recipes.cli.flags import (
    STDOUT,
    add_recipe_flags,
    memory_gib,
    recipe_path,
    recipes_folder,
    write_text,
    writing,
)
from memsave_recipes.errors import InputError, packages_of, require
from memsave_recipes.text import GIB, ProgressBar, format_bytes, gib_that_suffice, to_gib

if TYPE_CHECKING:
    from memsave_recipes.cli.request import PlanRequest
    from memsave_recipes.estimation.targets import Target
    from memsave_recipes.planner.ladder import Rung, Subject
    from memsave_recipes.planner.task import FrontierPoint, Launch, Task

FIT_FORMAT_VERSION = 1
FIT_GLOBAL_BATCH_SIZE = 16
INTERRUPTED = 130
FIT_FLAGS = {"target_memory_gib": "--memory", "target_memory": "--memory", "target ": "--card "}
"""Flags of ``memsave fit`` for the arguments of ``target_of``."""


def add_recipes(parser: argparse.ArgumentParser) -> None:
    """It has no flags."""
    parser.set_defaults(command=_recipes)


def _recipes(arguments: argparse.Namespace) -> None:
    folder = recipes_folder()
    print(folder)
    for path in sorted([*folder.glob("*.py"), *folder.glob("configs/*.yaml")]):
        print(f"  {path.relative_to(folder)}")


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add_recipe_flags(parser)
    parser.add_argument("--all", action="store_true", help="every candidate, not only the best of each micro-batch")
    parser.add_argument(
        "--largest",
        choices=["block_size", "micro_batch_size", "global_batch_size"],
        help="the largest value of this flag of the recipe with which the run fits",
    )
    parser.add_argument("--plan", type=Path, metavar="FILE", help="file for the chosen plan; the launch line names it")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file for all data; - prints it in place of the table"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="file for a page with table and chart")
    parser.set_defaults(command=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    from memsave_recipes.cli.request import (
        check_plan_file,
        launch_line,
        read_request,
        record_of,
        to_json,
        with_progress,
    )
    from memsave_recipes.planner.task import choose_for_target, points_of
    from memsave_recipes.render.choice import best_rows, show_choice
    from memsave_recipes.render.frontier import plan_page

    largest = _take_largest(arguments) if arguments.largest else None
    request = read_request(arguments)
    choice = with_progress(
        request,
        lambda on_size: choose_for_target(request.task, request.launch, request.budget_bytes, on_size=on_size),
    )
    if choice.chosen is None:
        raise request.no_fit(choice)
    if arguments.plan:
        check_plan_file(request)
        write_text("--plan", arguments.plan, choice.chosen.forecast.plan.to_json())
    line = launch_line(request, choice.chosen, arguments.plan)
    remarks = request.remarks_on(choice.chosen)
    if str(arguments.json) != STDOUT:
        is_cut = not arguments.all and len(best_rows(choice)) < len(choice.candidates)
        more = ["--all shows every candidate"] if is_cut else []
        show_choice(choice, all_rows=arguments.all, remarks=[*remarks, *more])
        if largest is not None:
            print(f"\nthe largest --{arguments.largest} that fits: {largest:,}")
        print(f"\n{line}")
    points = points_of(choice.candidates)
    if arguments.json:
        found = {} if largest is None else {"largest": {"flag": arguments.largest, "value": largest}}
        record = record_of(request, points, chosen=choice.candidates.index(choice.chosen), launch=line, **found)
        write_text("--json", arguments.json, to_json(record))
    if arguments.html:
        page = plan_page(request.title, remarks, points, choice.chosen, line)
        write_text("--html", arguments.html, page)


def _take_largest(arguments: argparse.Namespace) -> int:
    """The largest value of ``--largest`` that fits, now among the recipe's flags."""
    from memsave_recipes.cli.largest import with_largest

    arguments.flags, value = with_largest(arguments)
    return value


def add_frontier(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add_recipe_flags(parser)
    parser.add_argument("--all", action="store_true", help="every point, not only the Pareto-optimal")
    parser.add_argument("--measure", action="store_true", help="measurements of the points on this machine's device")
    parser.add_argument("--over", choices=["block_size"], help="memory against the length of rows, up to what fits")
    parser.add_argument("--png", type=Path, metavar="FILE", help="file for the chart; no table is printed")
    parser.add_argument("--html", type=Path, metavar="FILE", help="file for a page with table and chart")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file for all data; - prints it in place of the table"
    )
    parser.set_defaults(command=_frontier)


def _frontier(arguments: argparse.Namespace) -> None:
    from memsave_recipes.cli.request import (
        check_device,
        measured_points,
        read_request,
        record_of,
        to_json,
        with_progress,
    )
    from memsave_recipes.planner.task import choose_for_target, every_strategy, points_of
    from memsave_recipes.render.frontier import frontier_page, show_points

    if arguments.over:
        _over_lengths(arguments)
        return
    request = read_request(arguments)
    if arguments.measure:
        check_device(request)
    choice = with_progress(
        request,
        lambda on_size: choose_for_target(
            request.task, request.launch, request.budget_bytes, on_size=on_size, candidates=every_strategy
        ),
    )
    points = points_of(choice.candidates)
    if arguments.measure:
        points = measured_points(request, points, all_points=arguments.all)
    if arguments.png is None and str(arguments.json) != STDOUT:
        show_points(points, request.remarks, all_rows=arguments.all)
    if arguments.json:
        write_text("--json", arguments.json, to_json(record_of(request, points)))
    if arguments.html:
        page = frontier_page(request.title, request.remarks, points, request.budget_bytes)
        write_text("--html", arguments.html, page)
    if arguments.png:
        _draw(arguments.png, request, points)


def _over_lengths(arguments: argparse.Namespace) -> None:
    from memsave_recipes.cli.largest import curves_over_lengths, record_of_curves
    from memsave_recipes.cli.request import read_request, record_of, to_json
    from memsave_recipes.render.frontier import show_curves

    for flag in ("measure", "html", "all"):
        require(not getattr(arguments, flag), f"--{flag}", "", "left out beside --over, which has no throughput")
    request = read_request(arguments)
    found = curves_over_lengths(arguments)
    if arguments.png is None and str(arguments.json) != STDOUT:
        show_curves(found, request.remarks, request.budget_bytes)
    if arguments.json:
        record = record_of(request, [], **record_of_curves(found, request.budget_bytes))
        write_text("--json", arguments.json, to_json(record))
    if arguments.png:
        with packages_of("plots", "pictures"):
            from memsave_recipes.render.plot import write_curves_png
        with writing(f"--png {arguments.png}"):
            lines = {curve.strategy: [(one.needed_bytes, length) for length, one in curve.points] for curve in found}
            card = {request.launch.target.name: request.budget_bytes}
            write_curves_png(lines, arguments.png, f"{request.title} on {request.place}", card)


def _draw(path: Path, request: "PlanRequest", points: "list[FrontierPoint]") -> None:
    from memsave_recipes.render.frontier import chart_points_of

    with packages_of("plots", "pictures"):
        from memsave_recipes.render.plot import write_frontier_png
    with writing(f"--png {path}"):
        write_frontier_png(chart_points_of(points), path, f"{request.title} on {request.place}", request.budget_bytes)


def add_fit(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder with a config.json, type of transformers (llama, vit), one of ours (vgg16), or a Hub id",
    )
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--card", metavar="DEVICE", help="such as rtx4090; default: this machine's device")
    device.add_argument(
        "--memory", type=memory_gib, metavar="GIB", help="of any GPU, such as 24GiB, at the rates of an A100"
    )
    parser.add_argument(
        "--length", type=int, metavar="N", help="tokens of a sample; default: 2048, for classifiers 512"
    )
    parser.add_argument("--image_size", type=int, metavar="N", help="pixels a side; default: the model's, or 224")
    parser.add_argument(
        "--global_batch_size",
        type=int,
        default=FIT_GLOBAL_BATCH_SIZE,
        metavar="N",
        help="samples of a step; default: 16",
    )
    parser.add_argument("--micro_batch_size", type=int, metavar="N", help="samples of a forward; default: searched")
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help="as of the recipes; default: adamw")
    parser.add_argument(
        "--mixed_precision",
        choices=["no", "bf16", "fp16"],
        help="precision of autocast; default: bf16 on a GPU, fp16 on one without bf16",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file for all data; - prints it in place of the table"
    )
    parser.set_defaults(command=_fit)


def _fit(arguments: argparse.Namespace) -> None:
    from memsave_recipes.planner.ladder import ladder

    page = _open_page(arguments)
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # tracebacks of what becomes one line
    try:
        with ProgressBar(desc="estimating", unit="") as bar:

            def on_estimate(words: str) -> None:
                bar.set_postfix_str(words, refresh=False)
                bar.update()

            adapters = page.subject.is_pretrained
            for rung in ladder(
                page.read, page.launch, page.budget_bytes, takes_adapters=adapters, on_estimate=on_estimate
            ):
                page.add(rung, bar.write)
    except KeyboardInterrupt:
        page.end(is_complete=False)
        sys.exit(INTERRUPTED)
    page.end(is_complete=True)


@dataclass
class _Page:
    """A model on a device, with the rungs that are known.

    Args:
        flags: of the recipe, in all rungs.
        quiet: whether to print nothing but JSON.
    """

    word: str
    subject: "Subject"
    flags: tuple[str, ...]
    launch: "Launch"
    budget_gib: float
    json_file: Path | None
    rungs: "list[Rung]" = field(default_factory=list)

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes."""
        return int(self.budget_gib * GIB)

    @property
    def quiet(self) -> bool:
        """Whether nothing but JSON is printed."""
        return str(self.json_file) == STDOUT

    def read(self, flags: Sequence[str]) -> "Task":
        """The task of the recipe under the flags of all rungs and ``flags``."""
        from memsave_recipes.cli.request import open_flags
        from memsave_recipes.planner.task import read_task
        from memsave_recipes.training.parsing import named_flags

        flags = [*self.flags, *flags]
        return read_task(self.recipe, [*flags, *open_flags(named_flags(flags), self.budget_gib)])

    @property
    def recipe(self) -> Path:
        """The file of the recipe."""
        return recipe_path(self.subject.recipe)

    def request_of(self, rung: "Rung") -> "PlanRequest":
        """The request of ``memsave plan`` for a rung."""
        from memsave_recipes.cli.request import PlanRequest
        from memsave_recipes.training.parsing import named_flags

        flags = (*self.flags, *rung.flags)
        return PlanRequest(
            recipe=self.recipe,
            flags=flags,
            named=named_flags(flags),
            task=self.read(rung.flags),
            launch=replace(self.launch, num_processes=rung.num_processes),
            budget_gib=self.budget_gib,
        )

    def launch_line(self, rung: "Rung") -> str:
        """The command line of a rung."""
        from memsave_recipes.cli.request import launch_line

        return launch_line(self.request_of(rung), rung.candidate)

    def add(self, rung: "Rung", write: Callable[[str], object]) -> None:
        """A rung is known."""
        from memsave_recipes.render.choice import heading, row

        if not self.rungs and not self.quiet:
            write(f"{self.word}, {self.subject.recipe}, for {self.request_of(rung).place}\n\n{heading()}")
        self.rungs.append(rung)
        if not self.quiet:
            write(row(rung, self.rungs[0]))

    def end(self, *, is_complete: bool) -> None:
        """Print the line that launches the best rung, and write the JSON.

        Raises:
            InputError: all rungs are known, and none fits.
        """
        from memsave_recipes.planner.ladder import best_rung

        best = best_rung(self.rungs)
        if best is not None and not self.quiet:
            request = self.request_of(best)
            for remark in (*self.subject.remarks, *request.remarks):
                print(f"{remark}")
            print(f"\n{self.launch_line(best)}")
        if self.json_file is not None:
            write_text("--json", self.json_file, self._json(best, is_complete))
        if best is None and is_complete:
            raise self._nothing_fits()

    def _nothing_fits(self) -> InputError:
        least = min(self.rungs, key=lambda rung: rung.candidate.needed_bytes)
        needed = least.candidate.needed_bytes
        kept = needed * self.launch.target.memory_bytes / self.budget_bytes
        takes_adapters = any(rung.name == "LoRA" for rung in self.rungs)
        return InputError(
            f"MODEL {self.word} does not fit {format_bytes(self.budget_bytes)} of {self.launch.target.name}: "
            f"least is needed with {least.name} (--micro_batch_size {least.candidate.layout.micro_batch_size}, plan "
            f"{least.candidate.strategy}), {gib_that_suffice(needed)} GiB: take a card with {format_bytes(kept)}, a "
            "shorter --length or a smaller model"
            + ("; --lora --load_in_4bit needs less, which cannot be estimated" if takes_adapters else "")
        )

    def _json(self, best: "Rung | None", is_complete: bool) -> str:
        from memsave_recipes.cli.request import record_of_target

        record = {
            "version": FIT_FORMAT_VERSION,
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
        return json.dumps(record, indent=1) + "\n"

    def _record(self, rung: "Rung") -> dict[str, Any]:
        from memsave_recipes.cli.request import record_of_candidate

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


def _open_page(arguments: argparse.Namespace) -> _Page:
    """The page of a command line, without rungs.

    Raises:
        InputError: an unknown model or device, or a value out of range.
    """
    from memsave_recipes.planner.budget import usable_bytes
    from memsave_recipes.planner.ladder import find_subject
    from memsave_recipes.planner.task import Launch

    for flag in ("length", "image_size", "global_batch_size", "micro_batch_size"):
        value = getattr(arguments, flag)
        require(value is None or value >= 1, f"--{flag}", value, "at least 1")
    target = _target(arguments)
    subject = find_subject(arguments.model)
    precision = _precision(arguments.mixed_precision, target)
    return _Page(
        word=arguments.model,
        subject=subject,
        flags=_flags(arguments, subject),
        launch=Launch(target=target, mixed_precision=precision),
        budget_gib=to_gib(usable_bytes(target.memory_bytes, target.device_type)),
        json_file=arguments.json,
    )


def _target(arguments: argparse.Namespace) -> "Target":
    """The device; messages of it have the names of this command's flags."""
    from memsave_recipes.estimation.targets import target_of

    try:
        return target_of(arguments.card, arguments.memory)
    except InputError as error:
        message = str(error)
        for name, flag in FIT_FLAGS.items():
            message = message.replace(name, flag)
        raise InputError(message) from error


def _precision(named: str | None, target: "Target") -> str:
    """The precision that is named, or the one that the device is fast in."""
    if target.device_type == "cpu":
        if named == "fp16":
            raise InputError("--mixed_precision fp16 does not work on the CPU: take bf16 or no")
        return named or "no"
    return named or ("bf16" if "bfloat16" in target.flops_per_s else "fp16")


def _flags(arguments: argparse.Namespace, subject: "Subject") -> tuple[str, ...]:
    """The recipe's flags in all rungs.

    Raises:
        InputError: a size that the model has not.
    """
    sizes = {subject.length_flag: ("--length", subject.length), "image_size": ("--image_size", subject.image_size)}
    flags = list(subject.flags)
    for name, (flag, default) in sizes.items():
        value = getattr(arguments, flag.removeprefix("--"))
        if default is None and value is not None:
            raise InputError(f"{flag} {value}: {arguments.model} has no such size: leave it out")
        if default is not None:
            flags += [f"--{name}", str(value or default)]
    flags += ["--global_batch_size", str(arguments.global_batch_size), "--optimizer", arguments.optimizer]
    if arguments.micro_batch_size is not None:
        flags += ["--micro_batch_size", str(arguments.micro_batch_size)]
    return tuple(flags)
