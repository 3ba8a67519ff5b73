"""Is the chosen configuration the fastest that fits? Every candidate run for real, at six budgets.

    python benchmarks/choice.py                         # about 10 minutes; keep the machine idle

For each model the candidates of all budgets (micro-batch x plan, the global batch fixed) are priced as a recipe's run
prices them, by block costs on this device; then each is really run, all taking turns, and the choice at every budget is
held against the fastest of those whose real peak stays below it. Writes docs/results/choice-DEVICE.json and .md.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import harness
from models import RECIPES
from recipe_steps import Real, build, task_of
from tqdm import tqdm

from memsave_recipes.core.activations import apply_plan, block_names, find_stacks, plan_blocks
from memsave_recipes.core.costs.block_costs import Measurement, Workload, measure
from memsave_recipes.core.planner.budget import least_memory, plans_to_measure, static_memory_of
from memsave_recipes.core.planner.search import Candidate, Choice, SearchSpace, open_layouts
from memsave_recipes.core.step.batch_layout import BatchLayout

GLOBAL_BATCH = 8
NUM_BUDGETS, QUICK_BUDGETS = 6, 3


@dataclass
class Tried:
    """A candidate that was really run."""

    candidate: Candidate
    peak_bytes: int
    seconds: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """The median over the rounds."""
        return median(self.seconds)

    @property
    def name(self) -> str:
        """Its micro-batch and plan."""
        return f"{self.candidate.layout.micro_batch_size} x {self.candidate.strategy}"


def price(real: Real, layout: BatchLayout) -> Measurement:
    """The block costs of a micro-batch, as a run measures them."""
    batch = real.batch(layout.micro_batch_size)
    workload = Workload(
        model=real.model,
        forward=lambda: real.task.loss_of(real.trained, batch),
        batch=list(batch.values()),
        device=real.accelerator.device,
        stacks=block_names(find_stacks(real.model)),
    )
    return measure(workload, plans_to_measure("budget:bitwise", workload))


def choices(
    real: Real, measured: dict[int, Measurement], layouts: Sequence[BatchLayout], num_budgets: int
) -> list[Choice]:
    """What is chosen at each budget, from just above the least that works to what the largest plain step needs."""
    static = partial(static_memory_of, real.task.optim, real.model, device=real.accelerator.device)
    space = partial(SearchSpace, strategy="budget:bitwise", static=static, plan_of=partial(plan_blocks, real.model))
    least = min(
        forecast.peak.total_bytes + forecast.reserve_bytes
        for forecast in (least_memory(measured[g.micro_batch_size], static(g)) for g in layouts)
    )
    most = max(
        candidate.needed_bytes
        for g in layouts
        for candidate in space(budget_bytes=0).candidates(measured[g.micro_batch_size], g)
        if candidate.strategy == "none"
    )
    found = []
    for number in range(num_budgets):
        budget = least + (most - least) * number // (num_budgets - 1)
        of_all = [space(budget_bytes=budget).candidates(measured[g.micro_batch_size], g) for g in layouts]
        found.append(Choice(candidates=tuple(candidate for of_one in of_all for candidate in of_one)))
    return found


def try_all(real: Real, candidates: Sequence[Candidate], rounds: int) -> dict[Any, Tried]:
    """Every candidate once for its peak, and ``rounds`` times, in turns, for its seconds; by what it does."""
    tried: dict[Any, Tried] = {}
    for candidate in candidates:
        if identity(candidate) not in tried:
            step = partial(real.step, GLOBAL_BATCH, candidate.layout.micro_batch_size)
            with apply_plan(real.model, candidate.forecast.plan):
                step()
                tried[identity(candidate)] = Tried(candidate, real.peak_bytes(step))
    for one in harness.turns(tried.values(), rounds):
        with apply_plan(real.model, one.candidate.forecast.plan):
            step = partial(real.step, GLOBAL_BATCH, one.candidate.layout.micro_batch_size)
            one.seconds.append(harness.seconds_of(step))
    return tried


def identity(candidate: Candidate) -> Any:
    """What tells two candidates apart that really differ."""
    return candidate.layout.micro_batch_size, candidate.forecast.plan.spans


def judge(name: str, choice: Choice, tried: dict[Any, Tried]) -> dict[str, Any]:
    """A row of the table: the choice at one budget beside the fastest that really fits in it."""
    chosen = choice.chosen
    assert chosen is not None
    mine = tried[identity(chosen)]
    fitting = [one for one in tried.values() if one.peak_bytes <= chosen.budget_bytes]
    fastest = min(fitting, key=lambda one: one.step_s)
    return {
        "model": name,
        "budget_bytes": chosen.budget_bytes,
        "chosen": mine.name,
        "predicted_bytes": chosen.peak_bytes,
        "peak_bytes": mine.peak_bytes,
        "below_budget": mine.peak_bytes <= chosen.budget_bytes,
        "step_s": mine.step_s,
        "fastest": fastest.name,
        "fastest_s": fastest.step_s,
        "slower_pct": 100 * (mine.step_s / fastest.step_s - 1),
        "num_fitting": len(fitting),
    }


def measure_model(name: str, rounds: int, num_budgets: int) -> list[dict[str, Any]]:
    """The rows of a model."""
    sizes = ("--global_batch_size", str(GLOBAL_BATCH), "--micro_batch_size", "auto", "--memory_budget_gib", "1")
    real = build(task_of(name, *sizes))
    layouts = open_layouts(real.task.run, real.task.optim, 1)
    measured = {layout.micro_batch_size: price(real, layout) for layout in layouts}
    found = choices(real, measured, layouts, num_budgets)
    tried = try_all(real, [candidate for choice in found for candidate in choice.candidates], rounds)
    return [judge(name, choice, tried) for choice in found]


def as_markdown(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    """The table, with a verdict above it."""
    below = sum(row["below_budget"] for row in rows)
    near = sum(row["slower_pct"] <= 5 for row in rows)
    lines = [
        f"`python benchmarks/choice.py` on {about['device']}, {about['num_threads']} threads, "
        f"torch {about['versions']['torch']}; "
        f"global batch {GLOBAL_BATCH}, {about['rounds']} rounds.",
        f"{len(rows)} choices: {below} below their budget, {near} within 5 % of the fastest candidate that fits.",
        "",
    ]
    headings = ("model", "budget", "chosen", "peak", "step", "fastest that fits", "its step", "slower by")
    return "\n".join([*lines, harness.markdown_table(headings, map(cells, rows))])


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table as text."""
    return [
        row["model"],
        f"{row['budget_bytes'] / 2**20:.1f} MiB",
        row["chosen"],
        f"{row['peak_bytes'] / 2**20:.1f} MiB",
        f"{1000 * row['step_s']:.0f} ms",
        f"{row['fastest']} of {row['num_fitting']}",
        f"{1000 * row['fastest_s']:.0f} ms",
        f"{row['slower_pct']:.1f} %",
    ]


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure every model; returns what the JSON file holds."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--model", choices=RECIPES, nargs="+", help="default: all; with --quick BERT")
    parser.add_argument("--rounds", type=int, default=5)
    flags = harness.read_flags(parser, args)
    rounds, num_budgets = (1, QUICK_BUDGETS) if flags.quick else (flags.rounds, NUM_BUDGETS)
    device = harness.this_device()
    about = {**harness.describe_machine(device), "rounds": rounds}
    rows: list[dict[str, Any]] = []
    for name in tqdm(flags.model or (["BERT"] if flags.quick else RECIPES), unit="model"):
        rows += measure_model(name, rounds, num_budgets)
        results = {"benchmark": "choice", **about, "rows": rows}
        harness.write_results(flags.output_dir, f"choice-{device.type}", results, as_markdown(rows, about))
    print(json.dumps({"choices": len(rows), "within_5_pct": sum(row["slower_pct"] <= 5 for row in rows)}))
    return results


if __name__ == "__main__":
    main()
