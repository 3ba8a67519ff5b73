"""``memsave plan``, the fastest run of a recipe that fits, and ``memsave frontier``, memory against throughput.

NOTE [ largest values ] of ``memsave plan --largest FLAG``
1. ``block_size``: in multiples of 64, up to the positions that the model has. What fits is asked for the micro-batch
   size of the flags, else for one sample: the longest rows come one at a time.
2. ``micro_batch_size``: up to a rank's share of the global batch.
3. ``global_batch_size``: in one micro-batch a rank, as any size fits that is accumulated.
The need grows with each of them, so the value is found by halving an interval: it fits, and the next one does not.

NOTE [ ranks that share rows ]
``--sequence_parallel`` is searched where the recipe has it and the flags do not name it. It costs time, so a row is
shared by as few ranks as suffice for its length, and for ``--largest block_size`` by all that the heads allow.
"""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from math import ceil

from memsave_recipes.core.costs.estimate import fake_model
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.search import Choice
from memsave_recipes.core.planner.task import choose_for_target
from memsave_recipes.core.progress import ProgressBar
from memsave_recipes.tools.cli.flags import STDOUT, write_text, writing
from memsave_recipes.tools.cli.request import (
    SHARED,
    PlanRequest,
    check_plan_file,
    choose,
    launch_line,
    read_request,
    record_of,
    to_json,
    without,
)
from memsave_recipes.tools.fit.frontier import every_strategy, points_of, speed_of
from memsave_recipes.tools.pages.choice import best_rows, show_choice, speed_line
from memsave_recipes.tools.pages.frontier import by_family, frontier_page, plan_page, show_points

BLOCK, MICRO, GLOBAL = "block_size", "micro_batch_size", "global_batch_size"
NAMES = (BLOCK, MICRO, GLOBAL)
NO_LIMIT = 2**20
TOKENS_APART = 64


def plan(arguments: argparse.Namespace) -> None:
    """Print the fastest candidate that fits, with its launch line."""
    largest = None
    if arguments.largest:
        arguments.flags, largest = _with_largest(arguments)
    request, choice = _chosen(arguments)
    if choice.chosen is None:
        raise request.no_fit(choice)
    if arguments.plan:
        check_plan_file(request)
        write_text("--plan", arguments.plan, choice.chosen.forecast.plan.to_json())
    line = launch_line(request, choice.chosen, arguments.plan)
    speed = speed_of(request.task, request.launch, choice.chosen)
    remarks = [*request.remarks_on(choice.chosen), speed_line(choice.chosen, speed)]
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
        record = record_of(
            request, points, chosen=choice.candidates.index(choice.chosen), launch=line, speed=asdict(speed), **found
        )
        write_text("--json", arguments.json, to_json(record))
    if arguments.html:
        page = plan_page(request.title, remarks, points, choice.chosen, line)
        write_text("--html", arguments.html, page)


def frontier(arguments: argparse.Namespace) -> None:
    """Print the Pareto-optimal strategies and micro-batch sizes."""
    request = read_request(arguments)
    points = points_of(choose(request, candidates=every_strategy).candidates)
    if arguments.png is None and str(arguments.json) != STDOUT:
        show_points(points, request.remarks, all_rows=arguments.all)
    if arguments.json:
        write_text("--json", arguments.json, to_json(record_of(request, points)))
    if arguments.html:
        page = frontier_page(request.title, request.remarks, points, request.budget_bytes)
        write_text("--html", arguments.html, page)
    if arguments.png:
        from memsave_recipes.tools.pages.plot import frontier_figure

        figure = frontier_figure(by_family(points), f"{request.title} on {request.place}", request.budget_bytes)
        with writing(f"--png {arguments.png}"):
            figure.savefig(arguments.png, format="png")


def _chosen(arguments: argparse.Namespace) -> tuple[PlanRequest, Choice]:
    """Choose for the flags; where nothing fits, for as few ranks that share a row as suffice."""
    request = _read(arguments)
    choice = choose(request)
    for sharing in _sharing_rows(arguments, request) if choice.chosen is None else ():
        with suppress(InputError):
            shared = _read(sharing)
            if (found := choose(shared)).chosen is not None:
                return shared, found
    return request, choice


def _read(arguments: argparse.Namespace) -> PlanRequest:
    """Read the request; a run under a plan in a file reduces gradients for every micro-batch."""
    request = read_request(arguments)
    return request.reducing_every_micro_batch() if arguments.plan else request


def _sharing_rows(arguments: argparse.Namespace, request: PlanRequest) -> list[argparse.Namespace]:
    """List the command lines under which more and more ranks share a row: NOTE [ ranks that share rows ]."""
    count = request.launch.num_processes
    if SHARED not in vars(request.task.run) or SHARED in request.named:
        return []
    sizes = [size for size in range(2, count + 1) if count % size == 0]
    return [_with_flags(arguments, (*request.flags, f"--{SHARED}", str(size))) for size in sizes]


def _with_largest(arguments: argparse.Namespace) -> tuple[tuple[str, ...], int]:
    """Return the recipe's flags with the largest value of ``--largest`` that fits, and this value."""
    request, name = read_request(arguments), str(arguments.largest)
    step = TOKENS_APART if name == BLOCK else 1
    most = max(_most(request, name) // step, 1)
    ways = [arguments, *(_sharing_rows(arguments, request) if name == BLOCK else [])]
    found, largest = request, 0
    for way in reversed(ways):
        try:
            value = _largest(way, name, step, most)
        except InputError:
            if way is arguments and not largest:
                raise
            continue
        if value >= largest:
            found, largest = read_request(way), value
        if value < most:
            break
    return _flags(found, name, largest * step), largest * step


def _largest(arguments: argparse.Namespace, name: str, step: int, most: int) -> int:
    """Return the most steps of the value that fit, by halving an interval.

    Raises:
        InputError: not even one fits.
    """
    request = read_request(arguments)
    begin = _begin(request, name) // step

    with ProgressBar(desc=f"largest {name}", unit="value") as bar:

        @cache
        def fits(count: int) -> bool:
            bar.set_postfix_str(str(count * step), refresh=False)
            bar.update()
            return _choice(arguments, _probe(request, name, count * step)).chosen is not None

        low, high = 0, max(1, min(begin, most))
        while high <= most and fits(high):
            low, high = high, 2 * high
        high = min(high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0:
        probe = _probe(request, name, step)
        raise read_request(_with_flags(arguments, probe)).no_fit(_choice(arguments, probe))
    return low


def _begin(request: PlanRequest, name: str) -> int:
    """Return the value to begin with: that of the flags, or their default."""
    value = getattr(request.task.run, name, None)
    if value is None and name != MICRO:
        raise InputError(
            f"--largest {name}: {request.recipe.stem} has no such flag: choose another of {', '.join(NAMES)}"
        )
    if name == GLOBAL and MICRO in request.named:
        raise InputError(f"--largest {name}: with --{MICRO} every global batch fits that one step does: leave it out")
    return value if isinstance(value, int) else 1


def _most(request: PlanRequest, name: str) -> int:
    """Return the largest value that makes sense: NOTE [ largest values ]."""
    if name == MICRO:
        return _share(request, request.task.run.global_batch_size)
    if name == GLOBAL:
        return NO_LIMIT
    config = getattr(fake_model(request.task.build_model), "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else NO_LIMIT


def _flags(request: PlanRequest, name: str, value: int) -> tuple[str, ...]:
    """Return the flags of the request with ``value``."""
    changed = {name: str(value)}
    if name == GLOBAL:
        changed[MICRO] = str(_share(request, value))
    return (*without(request.flags, changed), *(word for key, one in changed.items() for word in (f"--{key}", one)))


def _share(request: PlanRequest, global_batch_size: int) -> int:
    """Return the samples of a rank, or of those that share rows."""
    return ceil(global_batch_size * request.task.run.sequence_parallel / request.launch.num_processes)


def _probe(request: PlanRequest, name: str, value: int) -> tuple[str, ...]:
    """Return the flags by which to ask whether ``value`` fits."""
    flags = _flags(request, name, value)
    return (*flags, f"--{MICRO}", "1") if name == BLOCK and MICRO not in request.named else flags


def _with_flags(arguments: argparse.Namespace, flags: Sequence[str]) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(arguments), "flags": list(flags)})


def _choice(arguments: argparse.Namespace, flags: Sequence[str]) -> Choice:
    """Choose with other flags, in shards with what needs least."""
    request = read_request(_with_flags(arguments, flags)).reducing_every_micro_batch()
    return choose_for_target(request.task, request.launch, request.budget_bytes)
