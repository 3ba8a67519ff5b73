"""``--measure``: the points of a frontier, run on the device that is here."""

from collections.abc import Sequence

import torch
from tqdm import tqdm

from memsave_recipes.cli.recipe import SECONDS_BEFORE_THE_BAR, Question
from memsave_recipes.errors import InputError
from memsave_recipes.planner.frontier import Point, run_points


def check_device(question: Question) -> None:
    """Whether the target is the device that is here.

    Raises:
        InputError: it is another one, or there are several.
    """
    target = question.launch.target
    if target.word != "cpu" and not (torch.cuda.is_available() and target.name == torch.cuda.get_device_name()):
        raise InputError(f"--measure runs on the device that is here, which is no {target.name}: leave out --target")
    if question.launch.num_processes > 1:
        raise InputError("--measure runs on one device: leave out --num_processes")


def measured_points(question: Question, points: Sequence[Point], *, all_points: bool) -> list[Point]:
    """``points``, of which all, or the Pareto-optimal ones alone, were run."""
    chosen = [number for number, point in enumerate(points) if all_points or point.is_optimal]
    with tqdm(desc="measuring", total=len(chosen), unit="point", delay=SECONDS_BEFORE_THE_BAR, leave=False) as bar:
        runs = run_points(question.sketch, question.launch, [points[number] for number in chosen], on_run=bar.update)
    found = list(points)
    for number, run in zip(chosen, runs, strict=True):
        found[number] = run
    return found
