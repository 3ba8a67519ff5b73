"""``memsave plan``, the fastest run of a recipe that fits, and ``memsave frontier``, memory against throughput."""

import argparse
from pathlib import Path

from memsave_recipes.cli.flags import STDOUT, write_text, writing
from memsave_recipes.cli.largest import curves_over_lengths, record_of_curves, with_largest
from memsave_recipes.cli.request import (
    PlanRequest,
    check_device,
    check_plan_file,
    choose,
    launch_line,
    measured_points,
    read_request,
    record_of,
    to_json,
)
from memsave_recipes.errors import packages_of, require
from memsave_recipes.planner.task import FrontierPoint, every_strategy, points_of
from memsave_recipes.render.choice import best_rows, show_choice
from memsave_recipes.render.frontier import chart_points_of, frontier_page, plan_page, show_curves, show_points


def plan(arguments: argparse.Namespace) -> None:
    """Print the fastest candidate that fits, with its launch line."""
    largest = None
    if arguments.largest:
        arguments.flags, largest = with_largest(arguments)
    request = read_request(arguments)
    choice = choose(request)
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


def frontier(arguments: argparse.Namespace) -> None:
    """Print the Pareto-optimal strategies and micro-batch sizes, or with ``--over`` the need by the length of rows."""
    if arguments.over:
        _over_lengths(arguments)
        return
    request = read_request(arguments)
    if arguments.measure:
        check_device(request)
    points = points_of(choose(request, candidates=every_strategy).candidates)
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


def _draw(path: Path, request: PlanRequest, points: list[FrontierPoint]) -> None:
    with packages_of("plots", "pictures"):
        from memsave_recipes.render.plot import write_frontier_png
    with writing(f"--png {path}"):
        write_frontier_png(chart_points_of(points), path, f"{request.title} on {request.place}", request.budget_bytes)
