"""Predicted against real: the peak of a whole training step, estimated on fake tensors and then run on this device.

    python benchmarks/prediction.py                     # 240 cases, about 15 minutes on one core
    python benchmarks/prediction.py --device cuda       # the same on a GPU, against max_memory_allocated

A case is a model, an optimizer, a plan, a precision and a micro-batch. The prediction is `memsave plan`'s: from the
recipe's task, on fake tensors, before anything is built. The real peak is that of the second step (forward, backward,
clipping, update), when the optimizer has its state: all allocations of torch's allocators. Writes
docs/results/prediction-DEVICE.json and .md.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import harness
import torch
from models import RECIPES
from recipe_steps import build, task_of
from tqdm import tqdm

from memsave_recipes.activations import apply_plan, plan_blocks
from memsave_recipes.estimation.estimate import estimate_on_target, fake_model
from memsave_recipes.estimation.targets import find_target
from memsave_recipes.planner.budget import least_memory, plans_to_measure, static_memory_of
from memsave_recipes.planner.search import Candidate, SearchSpace
from memsave_recipes.planner.task import AUTOCAST_DTYPES, Launch, Task, fake_workload
from memsave_recipes.training.batch_layout import BatchLayout

OPTIMIZERS, PRECISIONS = ("sgd", "adamw"), ("no", "bf16")
STRATEGIES = ("none", "full", "segments:3", "selective", "budget")
HALFWAY = 0.5  # the budget of the strategy budget, from the least that works to what plain needs


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is predicted and then run."""

    model: str
    optimizer: str
    strategy: str
    precision: str
    micro_batch_size: int


@dataclass(frozen=True, kw_only=True)
class Row(Case):
    """A case with its two peaks."""

    predicted_bytes: int
    real_bytes: int

    @property
    def error_pct(self) -> float:
        """Above 0 where the prediction is too high."""
        return 100 * (self.predicted_bytes / self.real_bytes - 1)


def cases_of(models: Sequence[str]) -> Iterator[Case]:
    """All cases of these models."""
    for name in models:
        for size, precision, optimizer, strategy in product(RECIPES[name].sizes, PRECISIONS, OPTIMIZERS, STRATEGIES):
            yield Case(model=name, optimizer=optimizer, strategy=strategy, precision=precision, micro_batch_size=size)


def task_of_case(case: Case) -> Task:
    """The recipe with the flags of a case; the global batch is one micro-batch."""
    size = str(case.micro_batch_size)
    sizes = ("--global_batch_size", size, "--micro_batch_size", size)
    return task_of(case.model, "--optimizer", case.optimizer, *sizes)


def predict(case: Case, device: str) -> Candidate:
    """What the planner says, before anything real is there."""
    task = task_of_case(case)
    launch = Launch(target=find_target(device), mixed_precision=case.precision)
    model = fake_model(task.planned_model)
    workload = fake_workload(task, launch, model, case.micro_batch_size, task.losses[0])
    plans = plans_to_measure(case.strategy, workload, device_type=device, compiles=False)
    measured = estimate_on_target(workload, plans, launch.target, autocast_dtype=AUTOCAST_DTYPES[case.precision])
    layout = BatchLayout.of(case.micro_batch_size, case.micro_batch_size, 1)
    static = static_memory_of(task.optim, model, layout)
    space = partial(SearchSpace, static=lambda _: static, plan_of=partial(plan_blocks, model))
    if case.strategy != "budget":
        return space(budget_bytes=0, strategy=case.strategy).candidates(measured, layout)[0]
    (plain,) = space(budget_bytes=0, strategy="none").candidates(measured, layout)
    least = least_memory(measured, static)
    least_bytes = least.peak.total_bytes + least.reserve_bytes
    halfway = int(least_bytes + HALFWAY * (plain.needed_bytes - least_bytes))
    return space(budget_bytes=halfway, strategy="budget").candidates(measured, layout)[-1]


def run(case: Case, candidate: Candidate) -> int:
    """The real peak of the second step, in bytes."""
    real = build(task_of_case(case), case.precision)
    step = partial(real.step, case.micro_batch_size, case.micro_batch_size)
    with apply_plan(real.model, candidate.forecast.plan):
        step()
        return real.peak_bytes(step)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """How good the predictions are."""
    errors = [abs(row.error_pct) for row in rows]
    return {
        "cases": len(rows),
        "within_2_pct": sum(error <= 2 for error in errors),
        "largest_pct": max(errors),
        "median_pct": median(errors),
    }


def as_markdown(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """A line a model, plan and precision, with the errors of its optimizers and sizes."""
    found = summary(rows)
    lines = [
        f"`python benchmarks/prediction.py --device {about['kind']}` on {about['device']}, "
        f"torch {about['versions']['torch']}.",
        f"{found['cases']} cases, {found['within_2_pct']} of them within 2 %; largest error "
        f"{found['largest_pct']:.2f} %, median {found['median_pct']:.3f} %.",
        "",
        "Error of the predicted peak in per cent, above 0 where it is too high; real peak in MiB.",
        "",
    ]
    headings = ("model", "precision", "plan", "real", f"error: {', '.join(OPTIMIZERS)} x 2 micro-batches")
    cells = []
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.precision, row.strategy), []).append(row)
    for (model, precision, strategy), group in groups.items():
        group.sort(key=lambda row: (OPTIMIZERS.index(row.optimizer), row.micro_batch_size))
        real = ", ".join(f"{row.real_bytes / 2**20:.1f}" for row in group)
        errors = ", ".join(f"{row.error_pct:+.2f}" for row in group)
        name = {"no": "float32", "bf16": "bf16 autocast"}[precision]
        cells.append([model, name, strategy, real, errors])
    return "\n".join([*lines, harness.markdown_table(headings, cells)])


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Predict and run every case; returns what the JSON file holds."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=RECIPES, nargs="+", help="default: all; with --quick BERT")
    flags = harness.read_flags(parser, args)
    cases = list(cases_of(flags.model or (["BERT"] if flags.quick else RECIPES)))
    rows = []
    for case in tqdm(cases[: len(STRATEGIES)] if flags.quick else cases, unit="case"):
        candidate = predict(case, flags.device)
        real = run(case, candidate)
        rows.append(Row(**asdict(case), predicted_bytes=candidate.peak_bytes, real_bytes=real))
    about = {"kind": flags.device, **harness.describe_machine(torch.device(flags.device))}
    results = {"benchmark": "prediction", **about, "summary": summary(rows)}
    results["rows"] = [{**asdict(row), "error_pct": row.error_pct} for row in rows]
    harness.write_results(flags.output_dir, f"prediction-{flags.device}", results, as_markdown(rows, about))
    print(json.dumps(results["summary"], indent=1))
    return results


if __name__ == "__main__":
    main()
