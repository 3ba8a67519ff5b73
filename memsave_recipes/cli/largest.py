"""The largest value of a flag with which a run still fits, and memory against the length of rows.

NOTE [ largest values ] of ``memsave plan --largest FLAG``
1. ``block_size``: in multiples of 64, up to the positions that the model has. What fits is asked for the micro-batch
   size of the flags, else for one sample: the longest rows come one at a time.
2. ``micro_batch_size``: up to a rank's share of the global batch.
3. ``global_batch_size``: in one micro-batch a rank, as any size fits that is accumulated.
The need grows with each of them, so the value is found by halving an interval: it fits, and the next one does not.

``memsave frontier --over block_size``: NOTE [ lengths ] of ``planner/lengths.py``, one sample at a time likewise.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import ceil
from typing import Any

from memsave_recipes.cli.request import PlanRequest, read_request, record_of_candidate, without
from memsave_recipes.errors import InputError
from memsave_recipes.estimation.estimate import fake_model
from memsave_recipes.planner.lengths import TOKENS_APART, Curve, curves, under_each
from memsave_recipes.planner.search import Choice
from memsave_recipes.planner.task import choose_for_target
from memsave_recipes.step.settings import AUTO, PER_MICRO_BATCH
from memsave_recipes.text import ProgressBar

BLOCK, MICRO, GLOBAL = "block_size", "micro_batch_size", "global_batch_size"
NAMES = (BLOCK, MICRO, GLOBAL)
NO_LIMIT = 2**20


def with_largest(arguments: argparse.Namespace) -> tuple[tuple[str, ...], int]:
    """Return the recipe's flags with the largest value of ``--largest`` that fits, and this value.

    Raises:
        InputError: the recipe has no such flag, another one rules it out, or not even the smallest value fits.
    """
    request, name = read_request(arguments), str(arguments.largest)
    step = TOKENS_APART if name == BLOCK else 1
    begin, most = _begin(request, name) // step, _most(request, name) // step

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
    return _flags(request, name, low * step), low * step


def curves_over_lengths(arguments: argparse.Namespace) -> list[Curve]:
    """Return the need of the request under each strategy, by ``--block_size``; with the last of several losses.

    Raises:
        InputError: the recipe has no such flag, or refuses another one.
    """
    first = read_request(arguments)
    _begin(first, BLOCK, "--over")
    with ProgressBar(desc="estimating", unit="length") as bar:

        def choose(length: int) -> Choice:
            bar.set_postfix_str(f"{length} tokens", refresh=False)
            bar.update()
            request = read_request(_with_flags(arguments, _probe(first, BLOCK, length)))
            task = replace(request.task, losses=request.task.losses[-1:])
            return choose_for_target(task, request.launch, request.budget_bytes, candidates=under_each)

        return curves(choose, _most(first, BLOCK))


def record_of_curves(found: Sequence[Curve], budget_bytes: int) -> dict[str, Any]:
    """Return the curves as data."""
    return {
        "over": BLOCK,
        "curves": [
            {
                "strategy": curve.strategy,
                "longest": curve.longest(budget_bytes),
                "points": [{BLOCK: length, **record_of_candidate(one)} for length, one in curve.points],
            }
            for curve in found
        ],
    }


def _begin(request: PlanRequest, name: str, flag: str = "--largest") -> int:
    """Return the value to begin with: that of the flags, or their default."""
    value = getattr(request.task.run, name, None)
    if value is None and name != MICRO:
        raise InputError(
            f"{flag} {name}: {request.recipe.stem} has no such flag: "
            + (f"choose another of {', '.join(NAMES)}" if flag == "--largest" else "leave it out")
        )
    if name == GLOBAL and MICRO in request.named:
        raise InputError(f"--largest {name}: with --{MICRO} every global batch fits that one step does: leave it out")
    return value if isinstance(value, int) else 1


def _most(request: PlanRequest, name: str) -> int:
    """Return the largest value that makes sense: NOTE [ largest values ]."""
    if name == MICRO:
        return ceil(request.task.run.global_batch_size / request.launch.num_processes)
    if name == GLOBAL:
        return NO_LIMIT
    config = getattr(fake_model(request.task.build_model), "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else NO_LIMIT


def _flags(request: PlanRequest, name: str, value: int) -> tuple[str, ...]:
    """Return the flags of the request with ``value``."""
    changed = {name: str(value)}
    if name == GLOBAL:
        changed[MICRO] = str(ceil(value / request.launch.num_processes))
    return (*without(request.flags, changed), *(word for key, one in changed.items() for word in (f"--{key}", one)))


def _probe(request: PlanRequest, name: str, value: int) -> tuple[str, ...]:
    """Return the flags by which to ask whether ``value`` fits; in shards those that need least."""
    flags, run = _flags(request, name, value), request.task.run
    if run.in_shards and run.reduce_gradients == AUTO:
        flags = (*flags, "--reduce_gradients", PER_MICRO_BATCH)
    return (*flags, f"--{MICRO}", "1") if name == BLOCK and MICRO not in request.named else flags


def _with_flags(arguments: argparse.Namespace, flags: Sequence[str]) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(arguments), "flags": list(flags)})


def _choice(arguments: argparse.Namespace, flags: Sequence[str]) -> Choice:
    request = read_request(_with_flags(arguments, flags))
    return choose_for_target(request.task, request.launch, request.budget_bytes)
