"""``memsave plan``, the fastest run of a recipe that fits, and ``memsave frontier``, memory against throughput.

They import their dependencies when they run, so that ``--help`` is fast.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from memsave_recipes.cli.flags import STDOUT, add_recipe_flags, recipes_folder, write_text, writing
from memsave_recipes.errors import packages_of

if TYPE_CHECKING:
    from memsave_recipes.cli.request import PlanRequest
    from memsave_recipes.planner.task import FrontierPoint


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
    if str(arguments.json) != STDOUT:
        is_cut = not arguments.all and len(best_rows(choice)) < len(choice.candidates)
        remarks = [*request.remarks, *(["--all shows every candidate"] if is_cut else [])]
        show_choice(choice, all_rows=arguments.all, remarks=remarks)
        if largest is not None:
            print(f"\nthe largest --{arguments.largest} that fits: {largest:,}")
        print(f"\n{line}")
    points = points_of(choice.candidates)
    if arguments.json:
        found = {} if largest is None else {"largest": {"flag": arguments.largest, "value": largest}}
        record = record_of(request, points, chosen=choice.candidates.index(choice.chosen), launch=line, **found)
        write_text("--json", arguments.json, to_json(record))
    if arguments.html:
        page = plan_page(request.title, request.remarks, points, choice.chosen, line)
        write_text("--html", arguments.html, page)


def _take_largest(arguments: argparse.Namespace) -> int:
    """The largest value of ``--largest`` that fits, now among the recipe's flags."""
    from memsave_recipes.cli.request import with_largest

    arguments.flags, value = with_largest(arguments)
    return value


def add_frontier(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add_recipe_flags(parser)
    parser.add_argument("--all", action="store_true", help="every point, not only the Pareto-optimal")
    parser.add_argument("--measure", action="store_true", help="measurements of the points on this machine's device")
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


def _draw(path: Path, request: "PlanRequest", points: "list[FrontierPoint]") -> None:
    from memsave_recipes.render.frontier import chart_points_of

    with packages_of("plots", "pictures"):
        from memsave_recipes.render.plot import write_frontier_png
    with writing(f"--png {path}"):
        write_frontier_png(chart_points_of(points), path, f"{request.title} on {request.place}", request.budget_bytes)
