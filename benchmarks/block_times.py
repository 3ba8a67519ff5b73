"""Does a larger budget give a step that is no slower, and does planning again give the same one?

    python benchmarks/block_times.py                    # about an hour; keep the machine idle
    python benchmarks/block_times.py --model vit llama  # some of them; the others stay in the files

At 20 budgets from the least that works to what plain needs, each model is planned three times, by three measurements.
All plans then really run, taking turns, and are timed beside plain. Writes docs/results/block_times-DEVICE.json and
.md.

NOTE [ figures ]
1. A model is measured 15 times, in groups of three. The budgets take the groups in turns, so that no budget shares its
   measurements with its neighbours.
2. Before and after each step of a plan plain has one. *time* is the step's time as a multiple of the mean of these two,
   the median over the rounds, and of a budget the median of its three plans. So what slows the machine for seconds
   slows both. A plan that is the same as another one is run once for both, and has the same time.
3. *spread* is by how much the slowest of the three plans is slower than the fastest.
4. *slower than with less* compares the time with the least one of all smaller budgets; 0 where there is no faster one.
5. *noise* is what the planner states of its own prediction, the largest of the three; *error* is the standard error of
   *time*, from the spread of its rounds. Two budgets are told apart only by more than the noise and the error of both
   together.
6. Every plan takes turns in ``--rounds`` rounds, in an order drawn anew each round. Those whose *error* is above 0.6 %
   go on, up to twenty times as many.
7. Steps are shorter than those of other benchmarks (``SMALLER``), so that the machine is more alike under the three
   that are compared.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import pi, sqrt
from operator import itemgetter
from pathlib import Path
from random import Random
from statistics import median, stdev
from typing import Any

import harness
from models import SIZES, TITLES, Work, build_work
from tqdm import tqdm

from memsave_recipes.core.activations import apply_plan, block_names, find_stacks
from memsave_recipes.core.costs.block_costs import Measurement, Workload, measure
from memsave_recipes.core.planner.budget import Forecast, StaticMemory, forecast, plans_to_measure, reserve_bytes
from memsave_recipes.core.plans import Plan
from memsave_recipes.core.plans.simulate import keep_all, simulate
from memsave_recipes.core.plans.solver import smallest_feasible

SMALLER: dict[str, dict[str, int]] = {
    "resnet50": {"batch_size": 2, "image_size": 96},
    "densenet121": {"batch_size": 2, "image_size": 64},
    "vit": {"hidden_size": 128, "intermediate_size": 512},
    "llama": {"vocab_size": 8192, "hidden_size": 128, "intermediate_size": 352},
}
NUM_BUDGETS, QUICK_BUDGETS = 20, 4
NUM_PLANNINGS, NUM_GROUPS, QUICK_GROUPS = 3, 5, 1
MOST_SPREAD_PCT = 3
KNOWN_PCT, TIMES_AS_MANY = 0.6, 20
ERROR_OF_MEDIAN = (pi / 2) ** 0.5
"""As a multiple of the standard error of the mean, for normal errors of many rounds."""

STATIC = StaticMemory()
Rows = list[dict[str, Any]]


@dataclass
class Timed:
    """A plan, and the time of its step in each round as a multiple of plain's."""

    plan: Plan
    ratios: list[float] = field(default_factory=list)

    @property
    def time_ratio(self) -> float:
        """Rule 2 of the NOTE; exactly 1 for plain, which is not run beside itself."""
        return median(self.ratios or [1.0])

    @property
    def error(self) -> float:
        """Of ``time_ratio``, as a part of it."""
        if not self.ratios:
            return 0.0
        return ERROR_OF_MEDIAN * stdev(self.ratios) / sqrt(len(self.ratios)) / self.time_ratio

    def goes_on(self, rounds: int) -> bool:
        """Rule 6 of the NOTE."""
        if len(self.ratios) < rounds:
            return True
        return len(self.ratios) < rounds * TIMES_AS_MANY and 100 * self.error > KNOWN_PCT


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
        return measure(workload, plans_to_measure("budget:bitwise", workload))

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


def time_all(trained: Trained, plain: Plan, found: Sequence[Sequence[Forecast]], rounds: int) -> dict[Any, Timed]:
    """Every plan once, and plain, by their spans: rules 2 and 6 of the NOTE."""
    timed = {one.plan.spans: Timed(one.plan) for forecasts in found for one in forecasts} | {plain.spans: Timed(plain)}
    others = [one for one in timed.values() if one.plan.spans != plain.spans]
    for one in timed.values():
        trained.seconds_of(one.plan)  # to warm up
    order = Random(0)
    with tqdm(total=rounds * TIMES_AS_MANY, desc=f"{len(others)} plans", unit="round", leave=False) as bar:
        while unknown := [one for one in others if one.goes_on(rounds)]:
            before_s = trained.seconds_of(plain)
            for one in order.sample(unknown, len(unknown)):
                seconds, after_s = trained.seconds_of(one.plan), trained.seconds_of(plain)
                one.ratios.append(2 * seconds / (before_s + after_s))
                before_s = after_s
            bar.update()
    return timed


def rows_of(name: str, budgets: Sequence[int], found: Sequence[Sequence[Forecast]], timed: dict[Any, Timed]) -> Rows:
    """A row for each budget: the NOTE."""
    rows: Rows = []
    for budget_bytes, forecasts in zip(budgets, found, strict=True):
        found_times = [timed[one.plan.spans] for one in forecasts]
        times = [one.time_ratio for one in found_times]
        noise = max(one.noise_s / one.micro_batch_s for one in forecasts)
        error = max(one.error for one in found_times)
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
                "num_rounds": [len(one.ratios) for one in found_times],
            }
        )
    return rows


def measure_model(name: str, size: dict[str, Any], rounds: int, num_budgets: int, num_groups: int) -> Rows:
    """The rows of a model."""
    work = build_work(name, size, harness.this_device())
    trained = Trained(work, work.copy())
    bar = tqdm(range(num_groups * NUM_PLANNINGS), desc=TITLES[name], unit="measurement", leave=False)
    measured = [trained.measured() for _ in bar]
    groups = [measured[n : n + NUM_PLANNINGS] for n in range(0, len(measured), NUM_PLANNINGS)]
    budgets = budgets_of(measured[0], num_budgets)
    found = [
        [forecast(one, budget_bytes, STATIC) for one in groups[n % num_groups]]
        for n, budget_bytes in enumerate(budgets)
    ]
    plain = keep_all(measured[0].chain())
    return rows_of(TITLES[name], budgets, found, time_all(trained, plain, found, rounds))


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
        f"torch {about['versions']['torch']}; {about['rounds']} to {about['rounds'] * TIMES_AS_MANY} rounds of a plan, "
        f"until its time is known to {KNOWN_PCT} %.",
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


def earlier_rows(path: Path, names: Sequence[str]) -> Rows:
    """Those of other models than ``names``, from the file of an earlier run."""
    if not path.exists():
        return []
    titles = {TITLES[name] for name in names}
    return [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["model"] not in titles]


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure every model; returns what the JSON file holds."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--model", choices=SMALLER, nargs="+", help="default: all; with --quick ViT")
    parser.add_argument("--rounds", type=int, default=9)
    flags = harness.read_flags(parser, args)
    device = harness.this_device()
    counts = (3, QUICK_BUDGETS, QUICK_GROUPS) if flags.quick else (flags.rounds, NUM_BUDGETS, NUM_GROUPS)
    about = {**harness.describe_machine(device), "rounds": counts[0]}
    names = flags.model or (["vit"] if flags.quick else list(SMALLER))
    name_of_file = f"block_times-{device.type}"
    rows = earlier_rows(flags.output_dir / f"{name_of_file}.json", names)
    for name in tqdm(names, unit="model"):
        size = SIZES["tiny"][name] if flags.quick else SIZES["cpu"][name] | SMALLER[name]
        rows += measure_model(name, size, *counts)
        rows.sort(key=lambda row: [TITLES[one] for one in SMALLER].index(row["model"]))
        results = {"benchmark": "block_times", **about, "rows": rows}
        harness.write_results(flags.output_dir, name_of_file, results, as_markdown(rows, about))
    print(json.dumps(verdict(rows)))
    return results


if __name__ == "__main__":
    main()
