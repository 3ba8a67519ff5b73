"""``memsave frontier``: memory against throughput of a recipe, for every strategy and micro-batch.

What the command needs is imported when it runs.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from memsave_recipes.cli.flags import STDOUT, add_recipe_flags, write_text, writing
from memsave_recipes.errors import InputError

if TYPE_CHECKING:
    from memsave_recipes.cli.recipe import Question
    from memsave_recipes.planner.frontier import Point


def add_frontier(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    add_recipe_flags(parser)
    parser.add_argument("--all", action="store_true", help="show, and measure, all points, not the optimal ones alone")
    parser.add_argument("--measure", action="store_true", help="run the points too, on the device that is here")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the picture, and print no table")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the table and the picture")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything; - prints it instead of the table")
    parser.set_defaults(command=_frontier)


def _frontier(arguments: argparse.Namespace) -> None:
    from memsave_recipes.cli.frontier_table import show_points
    from memsave_recipes.cli.measuring import check_device, measured_points
    from memsave_recipes.cli.page import frontier_page
    from memsave_recipes.cli.recipe import read_question, with_progress
    from memsave_recipes.cli.records import record_of, to_json
    from memsave_recipes.planner.frontier import every_strategy, points_of
    from memsave_recipes.planner.on_paper import choose_on_paper

    question = read_question(arguments)
    if arguments.measure:
        check_device(question)
    choice = with_progress(
        question,
        lambda on_size: choose_on_paper(
            question.sketch, question.launch, question.budget_bytes, on_size=on_size, candidates=every_strategy
        ),
    )
    points = points_of(choice.candidates)
    if arguments.measure:
        points = measured_points(question, points, all_points=arguments.all)
    if arguments.png is None and str(arguments.json) != STDOUT:
        show_points(question, points, all_rows=arguments.all)
    if arguments.json:
        write_text("--json", arguments.json, to_json(record_of(question, points)))
    if arguments.html:
        write_text("--html", arguments.html, frontier_page(question, points))
    if arguments.png:
        _draw(arguments.png, question, points)


def _draw(path: Path, question: "Question", points: "list[Point]") -> None:
    from memsave_recipes.cli.picture import spots_of

    try:
        from memsave_recipes.evidence.plot import write_frontier_png
    except ImportError as error:
        raise InputError("--png needs a package: pip install matplotlib") from error
    with writing(f"--png {path}"):
        write_frontier_png(spots_of(points), path, f"{question.title} on {question.place}", question.budget_bytes)
