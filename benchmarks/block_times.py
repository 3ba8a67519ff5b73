"""Does a larger budget give a step that is no slower, and does planning again give the same one?

    python benchmarks/block_times.py                    # about an hour; keep the machine idle

At 20 budgets from the least that works to what plain needs, each model is measured and planned three times. All plans
are then really run, taking turns, and timed against plain. Writes docs/results/block_times-DEVICE.json and .md.

NOTE [ figures ]
1. *time* is the median over the three plans of a budget, as a multiple of plain's. A plan that is the same as another
   one is run once for both, so it has the same time.
2. *spread* is by how much the slowest of the three plans is slower than the fastest.
3. *slower than with less* compares the time with the least one of all smaller budgets; 0 where there is no faster one.
4. *noise* is what the planner states of its own prediction, the largest of the three; *error* is the standard error of
   *time*, from the spread of its rounds. Two budgets are told apart only by more than the noise
   and the error of both together.
5. Every plan takes turns in ``--rounds`` rounds, in an order drawn anew each round. Those whose *error* is above 0.8 %
   go on, up to five times as many; where the three plans of a budget are not one and the same, up to twenty times.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import pi, sqrt
from operator import itemgetter
from random import Random
from statistics import median, stdev
from typing import Any

import harness
from models import SIZES, TITLES, Work, build_work
from tqdm import tqdm

from memsave_recipes.activations import apply_plan, block_names, find_stacks
from memsave_recipes.planner.budget import Forecast, StaticMemory, forecast, plans_to_measure, reserve_bytes
from memsave_recipes.plans import Plan
from memsave_recipes.plans.simulate import keep_all, simulate
from memsave_recipes.plans.solver import smallest_feasible
from memsave_recipes.profiling.block_costs import Measurement, Workload, measure

MODELS = ("resnet50", "densenet121", "vit", "llama")
NUM_BUDGETS, QUICK_BUDGETS = 20, 4
NUM_PLANNINGS = 3
MOST_SPREAD_PCT = 3
KNOWN_PCT, TIMES_AS_MANY, TIMES_AS_MANY_OF_SEVERAL = 0.8, 5, 20
ERROR_OF_MEDIAN = (pi / 2) ** 0.5
"""As a multiple of the standard error of the mean, for normal errors of many rounds."""

STATIC = StaticMemory()


@dataclass
class Timed:
    """A plan, the seconds of its latest step, and the ratios to plain's round by round."""

    plan: Plan
    times_as_many: int = 0
    latest_s: float = 0.0
    ratios: list[float] = field(default_factory=list)

    def goes_on(self, rounds: int) -> bool:
        """Rule 5 of the NOTE."""
        if len(self.ratios) < rounds:
            return True
        return len(self.ratios) < rounds * self.times_as_many and 100 * error_of_median(self.ratios) > KNOWN_PCT


@dataclass(frozen=True)
class Trained:
    """A model that is planned and run."""

    work: Work
    model: Any

    @property
    def workload(self) -> Workload:
        """What is measured."""
        return Workload(
            model=self.model,
            forward=lambda: self.work.loss_of(self.model),
            batch=list(self.work.batch.values()),
            device=self.work.device,
            stacks=block_names(find_stacks(self.model)),
        )

    def measured(self) -> Measurement:
        """Its blocks, measured anew."""
        workload = self.workload
        return measure(workload, plans_to_measure("budget:bitwise", workload, device_type=workload.device.type))

    def seconds_of(self, plan: Plan) -> float:
        """A forward and backward under ``plan``."""
        with apply_plan(self.model, plan):
            seconds = harness.seconds_of(lambda: self.work.loss_of(self.model).backward())
        self.work.clear_gradients()
        return seconds


def budgets_of(measured: Measurement, count: int) -> list[int]:
    """Even ones, from the least that works to what plain needs."""
    chain = measured.chain()
    least, most = smallest_feasible(chain), simulate(chain, keep_all(chain)).peak_bytes
    return [reserve_bytes(chain) + least + (most - least) * n // (count - 1) for n in range(count)]


def time_all(trained: Trained, plain: Plan, found: Sequence[Sequence[Forecast]], rounds: int) -> dict[Any, list[float]]:
    """The time of every plan as a multiple of plain's, round by round, by its spans; rule 5 of the NOTE."""
    baseline, timed = Timed(plain), timed_plans(found)
    timed.pop(plain.spans, None)
    for one in (baseline, *timed.values()):
        trained.seconds_of(one.plan)  # to warm up
    order = Random(0)
    while unknown := [one for one in timed.values() if one.goes_on(rounds)]:
        for one in order.sample([baseline, *unknown], 1 + len(unknown)):
            one.latest_s = trained.seconds_of(one.plan)
        for one in unknown:
            one.ratios.append(one.latest_s / baseline.latest_s)
    return {plain.spans: [1.0] * rounds, **{spans: one.ratios for spans, one in timed.items()}}


def timed_plans(found: Sequence[Sequence[Forecast]]) -> dict[Any, Timed]:
    """Each plan once, by its spans."""
    timed: dict[Any, Timed] = {}
    for forecasts in found:
        plans = {one.plan.spans: one.plan for one in forecasts}
        times_as_many = TIMES_AS_MANY_OF_SEVERAL if len(plans) > 1 else TIMES_AS_MANY
        for spans, plan in plans.items():
            one = timed.setdefault(spans, Timed(plan))
            one.times_as_many = max(one.times_as_many, times_as_many)
    return timed


def rows_of(
    name: str, budgets: Sequence[int], found: Sequence[Sequence[Forecast]], ratios: Any
) -> list[dict[str, Any]]:
    """A row for each budget: the NOTE."""
    rows: list[dict[str, Any]] = []
    for budget_bytes, forecasts in zip(budgets, found, strict=True):
        times = [median(ratios[one.plan.spans]) for one in forecasts]
        noise = max(one.noise_s / one.micro_batch_s for one in forecasts)
        error = max(error_of_median(ratios[one.plan.spans]) for one in forecasts)
        own = {"time_ratio": median(times), "noise_pct": 100 * noise, "error_pct": 100 * error}
        fastest = min([*rows, own], key=itemgetter("time_ratio"))
        rows.append(
            {
                "model": name,
                "budget_bytes": budget_bytes,
                "predicted_ratios": [one.micro_batch_s / one.baseline_s for one in forecasts],
                "time_ratios": times,
                **own,
                "spread_pct": 100 * (max(times) / min(times) - 1),
                "slower_pct": 100 * (median(times) / fastest["time_ratio"] - 1),
                "least_told_pct": sum(one[name] for one in (own, fastest) for name in ("noise_pct", "error_pct")),
                "num_plans": len({one.plan.spans for one in forecasts}),
            }
        )
    return rows


def error_of_median(ratios: Sequence[float]) -> float:
    """The standard error of the median, as a part of it."""
    return ERROR_OF_MEDIAN * stdev(ratios) / sqrt(len(ratios)) / median(ratios)


def measure_model(name: str, size: str, rounds: int, num_budgets: int) -> list[dict[str, Any]]:
    """The rows of a model."""
    work = build_work(name, SIZES[size][name], harness.this_device())
    trained = Trained(work, work.copy())
    first = trained.measured()
    budgets = budgets_of(first, num_budgets)
    found = []
    for budget_bytes in tqdm(budgets, desc=TITLES[name], unit="budget", leave=False):
        found.append([forecast(trained.measured(), budget_bytes, STATIC) for _ in range(NUM_PLANNINGS)])
    return rows_of(TITLES[name], budgets, found, time_all(trained, keep_all(first.chain()), found, rounds))


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """At how many budgets no smaller one is faster within the noise, and at how many the plans take the same time."""
    return {
        "budgets": len(rows),
        "no_slower": sum(row["slower_pct"] <= row["least_told_pct"] for row in rows),
        "alike": sum(row["spread_pct"] <= MOST_SPREAD_PCT for row in rows),
    }


def as_markdown(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    """The table, with a verdict above it."""
    found = verdict(rows)
    lines = [
        f"`python benchmarks/block_times.py` on {about['device']}, {about['num_threads']} threads, "
        f"torch {about['versions']['torch']}; {about['rounds']} rounds.",
        f"{found['budgets']} budgets: {found['no_slower']} no slower than any smaller one, within noise and error; "
        f"{found['alike']} with three plans that differ by at most {MOST_SPREAD_PCT} % in time.",
        "",
    ]
    headings = ("model", "budget", "time", "predicted", "noise", "error", "spread", "plans", "slower than with less")
    return "\n".join([*lines, harness.markdown_table(headings, map(cells, rows))])


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table as text."""
    return [
        row["model"],
        f"{row['budget_bytes'] / 2**20:.1f} MiB",
        f"x{row['time_ratio']:.3f}",
        f"x{median(row['predicted_ratios']):.3f}",
        f"±{row['noise_pct']:.1f} %",
        f"±{row['error_pct']:.1f} %",
        f"{row['spread_pct']:.1f} %",
        str(row["num_plans"]),
        f"{row['slower_pct']:.1f} %",
    ]


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure every model; returns what the JSON file holds."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, nargs="+", help="default: all; with --quick ViT")
    parser.add_argument("--rounds", type=int, default=9)
    flags = harness.read_flags(parser, args)
    device = harness.this_device()
    size, rounds, num_budgets = ("tiny", 3, QUICK_BUDGETS) if flags.quick else ("cpu", flags.rounds, NUM_BUDGETS)
    about = {**harness.describe_machine(device), "rounds": rounds}
    rows: list[dict[str, Any]] = []
    for name in tqdm(flags.model or (["vit"] if flags.quick else MODELS), unit="model"):
        rows += measure_model(name, size, rounds, num_budgets)
        results = {"benchmark": "block_times", **about, "rows": rows}
        harness.write_results(flags.output_dir, f"block_times-{device.type}", results, as_markdown(rows, about))
    print(json.dumps(verdict(rows)))
    return results


if __name__ == "__main__":
    main()
