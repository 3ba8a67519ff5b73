"""``memsave plan``: the fastest run of a recipe that fits, and the line that launches it.

What the command needs is imported when it runs.
"""

import argparse
from pathlib import Path

from memsave_recipes.cli.flags import STDOUT, add_recipe_flags, write_text


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    add_recipe_flags(parser)
    parser.add_argument("--all", action="store_true", help="show every candidate, not the best of each micro-batch")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="write the chosen plan, and launch with this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything; - prints it instead of the table")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the table and a picture")
    parser.set_defaults(command=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    from memsave_recipes.cli.launch_line import check_plan_file, launch_line
    from memsave_recipes.cli.page import plan_page
    from memsave_recipes.cli.recipe import read_question, with_progress
    from memsave_recipes.cli.records import record_of, to_json
    from memsave_recipes.planner.frontier import points_of
    from memsave_recipes.planner.on_paper import choose_on_paper
    from memsave_recipes.planner.report import best_rows, show_choice

    question = read_question(arguments)
    choice = with_progress(
        question,
        lambda on_size: choose_on_paper(question.sketch, question.launch, question.budget_bytes, on_size=on_size),
    )
    if choice.chosen is None:
        raise question.refused(choice)
    if arguments.plan:
        check_plan_file(question)
        write_text("--plan", arguments.plan, choice.chosen.forecast.plan.to_json())
    line = launch_line(question, choice.chosen, arguments.plan)
    if str(arguments.json) != STDOUT:
        is_cut = not arguments.all and len(best_rows(choice)) < len(choice.candidates)
        remarks = [*question.remarks, *(["--all shows every candidate"] if is_cut else [])]
        show_choice(choice, all_rows=arguments.all, remarks=remarks)
        print(f"\n{line}")
    points = points_of(choice.candidates)
    if arguments.json:
        record = record_of(question, points, chosen=choice.candidates.index(choice.chosen), launch=line)
        write_text("--json", arguments.json, to_json(record))
    if arguments.html:
        write_text("--html", arguments.html, plan_page(question, points, choice.chosen, line))
