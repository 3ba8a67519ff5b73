"""Predicted against real: the peak of a whole training step, estimated on fake tensors and then run on this device.

    python benchmarks/prediction.py --cases 1000 --seed 0    # about an hour on one core; goes on where it was stopped
    python benchmarks/prediction.py --device cuda --times 16 # on a GPU, in larger micro-batches
    python benchmarks/prediction.py --cases 100 --compile    # with compiled layers, where a model has some that repeat

A case is a model, a shape, an optimizer, a plan, a precision, a micro-batch and accumulation steps, all drawn
(``prediction_cases.py``). The prediction is `memsave plan`'s: from the recipe's task, on fake tensors, before anything
is built. The real peak is that of the second step (forwards, backwards, clipping, update), when the optimizer has its
state: all allocations of torch's allocators, on a GPU beyond what was there before the case. A GPU's prediction has
constants, for workspaces and rounding: the error is told without them, too. Writes docs/results/prediction-DEVICE.json
and .md, with ``--compile`` prediction_compiled-DEVICE.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch
from prediction_cases import LONGEST_SPANS, OPTIMIZERS, Case, random_case
from recipe_steps import build
from tqdm import tqdm

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.costs.estimate import Estimator, fake_model
from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.planner.budget import (
    COMPILED_RATIOS,
    WORKSPACES,
    Forecast,
    forecast,
    has_layers_to_compile,
    least_memory,
    overheads_of_target,
    plans_to_measure,
    static_memory_of,
)
from memsave_recipes.core.planner.task import AUTOCAST_DTYPES, Launch, Task, fake_workload
from memsave_recipes.core.plans import Action, Plan, Span
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.tools.fit.recipe_task import read_task

COLUMNS = ("model", "precision", "optimizer", "strategy", "predicted_bytes", "real_bytes")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case with its two peaks; ``constant_bytes`` of the predicted one are for workspaces and rounding."""

    case: Case
    predicted_bytes: int
    real_bytes: int
    constant_bytes: int = 0

    @property
    def error_pct(self) -> float:
        """Above 0 where the prediction is too high."""
        return 100 * (self.predicted_bytes / self.real_bytes - 1)

    @property
    def error_without_constants_pct(self) -> float:
        """The same of the tensors alone."""
        return 100 * ((self.predicted_bytes - self.constant_bytes) / self.real_bytes - 1)

    @property
    def cells(self) -> list[Any]:
        """``COLUMNS``."""
        case = self.case
        return [case.model, case.precision, case.optimizer, case.strategy, self.predicted_bytes, self.real_bytes]


def task_of_case(case: Case) -> Task:
    """The recipe with the flags of a case."""
    sizes = ("--global_batch_size", str(global_batch_size(case)), "--micro_batch_size", str(case.micro_batch_size))
    path = harness.ROOT / "recipes" / f"{case.recipe}.py"
    return read_task(path, [*case.flags.split(), *OPTIMIZERS[case.optimizer].split(), *sizes])


def global_batch_size(case: Case) -> int:
    """Of its step."""
    return case.micro_batch_size * case.accumulation_steps


def predict(case: Case, device: str) -> tuple[Plan, int, int]:
    """The plan, the predicted peak and the constants in it, before anything real is there."""
    task = task_of_case(case)
    launch = Launch(target=find_target(device), mixed_precision=case.precision)
    model = fake_model(task.planned_model)
    layout = BatchLayout.of(global_batch_size(case), case.micro_batch_size, 1)
    workload = fake_workload(task, launch, model, layout, task.losses[0])
    of_all = "budget" if case.compiled else "budget:bitwise"
    measured_as = of_all if case.strategy in ("budget", "random") else case.strategy
    plans = plans_to_measure(measured_as, workload, compiled=case.compiled)
    measured = Estimator(model, launch.target, AUTOCAST_DTYPES[case.precision]).estimate(workload, plans)
    static = static_memory_of(task.optim, model, layout, device=launch.target.device)
    rng = random.Random(case.draw)
    if case.strategy == "budget":
        least = least_memory(measured, static)
        least_bytes = least.peak.total_bytes + least.reserve_bytes
        above_bytes = max(0, least.baseline_peak_bytes - least_bytes)
        found = forecast(measured, least_bytes + int(rng.random() * above_bytes), static)
    else:
        is_random = case.strategy == "random"
        plan = random_plan(workload.stacks, rng, case.compiled) if is_random else plan_blocks(model, case.strategy)
        plan = plan.on_compiled_layers() if case.compiled else plan
        found = Forecast(plan=plan, chain=static.added_to(measured.chain_under(plan)))
    constant_bytes = overheads_of_target(launch.target).get(WORKSPACES, 0)
    return found.plan, found.peak.total_bytes + constant_bytes, constant_bytes


def random_plan(stacks: Sequence[Sequence[str]], rng: random.Random, compiled: bool) -> Plan:
    """Spans of up to so many blocks under actions that are drawn; none leaves its stack."""
    longest, ratio = rng.choice(LONGEST_SPANS), rng.choice(COMPILED_RATIOS)
    part: dict[str, Any] = {"action": Action.COMPILE, "ratio": ratio} if compiled else {"action": Action.SELECT_OPS}
    spans: list[Span] = []
    for names in stacks:
        first = spans[-1].stop if spans else 0
        while (start := spans[-1].stop if spans else 0) < first + len(names):
            stop = min(start + rng.randint(1, longest), first + len(names))
            drawn = rng.choice(({"action": Action.KEEP}, {"action": Action.RECOMPUTE}, part))
            spans.append(Span(start=start, stop=stop, **drawn))
    blocks = tuple(name for names in stacks for name in names)
    return Plan(strategy="random", blocks=blocks, spans=tuple(spans), compiled=compiled)


def compiled_cases(seed: int) -> Iterator[Case]:
    """Those of a seed whose models have layers that repeat, with these compiled."""
    for number in count():
        case = replace(random_case(seed, number), compiled=True)
        if has_layers_to_compile(fake_model(task_of_case(case).planned_model)):
            yield case


def run(case: Case, plan: Plan) -> int:
    """The real peak of the second step, in bytes."""
    before_bytes = held_bytes()
    real = build(task_of_case(case), case.precision)
    step = partial(real.step, global_batch_size(case), case.micro_batch_size)
    with apply_plan(real.model, plan):
        step()
        return real.peak_bytes(step) - before_bytes


def held_bytes() -> int:
    """What an accelerator holds before a case, with the workspaces of both threads that multiply."""
    harness.empty_device()
    if not torch.accelerator.is_available():
        return 0
    factor = torch.ones(8, 8, device=harness.this_device(), requires_grad=True)
    (factor @ factor).sum().backward()
    del factor
    return torch.accelerator.memory_allocated()


def row_of(case: Case, device: str) -> Row:
    """Predict a case, then run it."""
    plan, predicted, constant = predict(case, device)
    return Row(case=case, predicted_bytes=predicted, real_bytes=run(case, plan), constant_bytes=constant)


def rows_of(cases: Sequence[Case], device: str, done: Path) -> Iterator[Row]:
    """The rows of ``cases``; peaks that the file has are taken from there, others are appended to it."""
    done.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in done.read_text().splitlines()] if done.exists() else []
    yield from (Row(case=case, **peaks) for case, peaks in zip(cases, known, strict=False))
    with done.open("a") as file:
        for case in cases[len(known) :]:
            row = row_of(case, device)
            peaks = {name: getattr(row, name) for name in ("predicted_bytes", "real_bytes", "constant_bytes")}
            file.write(json.dumps(peaks) + "\n")
            file.flush()
            yield row


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """How good the predictions are."""
    errors = [row.error_pct for row in rows]
    return {
        "cases": len(rows),
        "too_low": sum(row.predicted_bytes < row.real_bytes for row in rows),
        "exact": sum(row.predicted_bytes == row.real_bytes for row in rows),
        "within_2_pct": sum(abs(error) <= 2 for error in errors),
        "median_pct": median(map(abs, errors)),
        "lowest_pct": min(errors),
        "highest_pct": max(errors),
        "lowest_without_constants_pct": min(row.error_without_constants_pct for row in rows),
    }


def as_markdown(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """A line a model, with the errors of its cases."""
    found = summary(rows)
    lines = [
        f"`python benchmarks/prediction.py --device {about['kind']} --cases {found['cases']} --seed {about['seed']}"
        f"{' --compile' if about['compile'] else ''}` "
        f"on {about['device']}, torch {about['versions']['torch']}.",
        f"{found['cases']} random cases, {found['too_low']} of them predicted too low, {found['exact']} to the byte, "
        f"{found['within_2_pct']} within 2 %. Errors from {found['lowest_pct']:+.3f} to {found['highest_pct']:+.2f} %, "
        f"the median {found['median_pct']:.3f} %.",
        "",
        "Error of the predicted peak in per cent, above 0 where it is too high; real peak in MiB.",
        "",
    ]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.case.model, []).append(row)
    cells = []
    for model, group in sorted(groups.items()):
        own, sizes = summary(group), [row.real_bytes / 2**20 for row in group]
        figures = (own["lowest_pct"], own["median_pct"], own["highest_pct"])
        errors = [f"{figure:+.3f}" for figure in figures]
        cells.append([model, str(len(group)), str(own["too_low"]), f"{min(sizes):.0f} to {max(sizes):.0f}", *errors])
    headings = ("model", "cases", "too low", "real peak", "lowest", "median of sizes", "highest")
    return "\n".join([*lines, harness.markdown_table(headings, cells)])


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Predict and run every case; returns what the JSON file holds."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", type=int, default=1000, help="how many; with --quick 2")
    parser.add_argument("--seed", type=int, default=0, help="of the cases")
    parser.add_argument("--times", type=int, default=1, help="how many times larger micro-batches are")
    parser.add_argument("--compile", action="store_true", help="layers, which takes about a minute a case")
    flags = harness.read_flags(parser, args)
    name = f"prediction{'_compiled' if flags.compile else ''}-{flags.device}"
    numbered = compiled_cases(flags.seed) if flags.compile else (random_case(flags.seed, one) for one in count())
    drawn = islice(numbered, 2 if flags.quick else flags.cases)
    cases = [replace(case, micro_batch_size=flags.times * case.micro_batch_size) for case in drawn]
    done = harness.QUICK_RESULTS / f"{name}-seed-{flags.seed}-x{flags.times}.jsonl"
    rows = list(tqdm(rows_of(cases, flags.device, done), total=len(cases), unit="case"))
    about = {
        "kind": flags.device,
        "seed": flags.seed,
        "times": flags.times,
        "compile": flags.compile,
        **harness.describe_machine(torch.device(flags.device)),
    }
    results = {"benchmark": "prediction", **about, "summary": summary(rows), "columns": COLUMNS}
    results["rows"] = [row.cells for row in rows]
    harness.write_results(flags.output_dir, name, results, as_markdown(rows, about))
    done.unlink(missing_ok=True)
    print(json.dumps(results["summary"], indent=1))
    return results


if __name__ == "__main__":
    main()
