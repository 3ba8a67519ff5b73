"""Is greedy enough? The exact solver, greedy and uniform plans at equal budgets: predicted time lost, and where.

    python benchmarks/solver_ablation.py             # minutes on one core
    python benchmarks/solver_ablation.py --quick

Six models, each with 20 budgets in equal steps from the least that a plan fits to what the plain step needs (that one
left out). Blocks keep everything, save what ``selective`` saves, or recompute; nothing goes to the host. Bytes and
seconds are estimated for a target, nothing is measured.

* **alone**: the solver, with blocks that recompute one by one.
* **greedy**: starts from the plain step, and gives block after block another action, that which saves most bytes
  a second, until the peak fits.
* **every k-th**: ``selective`` or recomputation of every k-th block, whichever action and k lose least.
* **segments**: ``segments:K`` of the K that loses least, as ``checkpoint_sequential`` of torch.

Writes docs/results/solver-ablation.json and .md.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import inf
from operator import itemgetter
from statistics import mean
from typing import Any

import harness
from models import CASES, workload_of_case

from memsave_recipes.core.activations import plan_blocks
from memsave_recipes.core.costs.estimate import Estimator
from memsave_recipes.core.costs.targets import Target, find_target
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Action, Plan, Span, plan_for
from memsave_recipes.core.plans.chain import Chain
from memsave_recipes.core.plans.simulate import keep_all, simulate, span_costs
from memsave_recipes.core.plans.solver import smallest_feasible, solve, solve_with_gap

MODELS = ("vgg16", "densenet121", "vit-h", "bert", "gpt2", "llama-3.1-8b")
QUICK_MODELS = ("gpt2",)
NUM_BUDGETS = 20
WAYS = ("alone", "greedy", "every k-th", "segments")
HEADINGS = ("model", "blocks", *WAYS)
ACTIONS = (Action.SELECT_OPS, Action.RECOMPUTE)


@dataclass(frozen=True)
class Priced:
    """What a plan needs and adds."""

    peak_bytes: int
    added_s: float

    @classmethod
    def of(cls, chain: Chain, plan: Plan) -> "Priced":
        """By simulation."""
        simulated = simulate(chain, plan)
        return cls(simulated.peak_bytes, simulated.added_s)


def chain_of(name: str, target: Target) -> Chain:
    """The costs of a model's blocks on a target, with AdamW's two moments."""
    workload = workload_of_case(name, target.device)
    plans = [plan_blocks(workload.model, strategy) for strategy in ("none", "selective")]
    chain = Estimator(workload.model, target, CASES[name].autocast_dtype).estimate(workload, plans).chain()
    moments_bytes = 2 * sum(parameter.nbytes for parameter in workload.model.parameters())
    return replace(chain, resident_bytes=chain.resident_bytes + moments_bytes)


def plan_of(chain: Chain, actions: Sequence[Action]) -> Plan:
    """Every block by itself under its action."""
    spans = tuple(Span(start=at, stop=at + 1, action=action) for at, action in enumerate(actions))
    return Plan(strategy="budget", blocks=chain.decided_names, spans=spans)


def has(chain: Chain, action: Action) -> bool:
    """Whether the blocks can run under an action."""
    options = (option.action for position in chain.decided for option in chain.blocks[position].options)
    return action is Action.RECOMPUTE or action in options


def every_kth(chain: Chain) -> Iterator[Priced]:
    """The plans of ``every k-th``."""
    count = len(chain.decided)
    for action in ACTIONS:
        for interval in range(1, count + 1) if has(chain, action) else ():
            yield Priced.of(chain, plan_of(chain, [Action.KEEP if at % interval else action for at in range(count)]))


def in_segments(chain: Chain) -> Iterator[Priced]:
    """The plans of ``segments``."""
    decided = [chain.blocks[position] for position in chain.decided]
    stacks = [[block.name for block in group] for _, group in groupby(decided, key=lambda block: block.stack)]
    for count in range(1, len(decided) + 1):
        yield Priced.of(chain, plan_for(f"segments:{count}", stacks))


def held(chain: Chain, plan: Plan) -> tuple[int, float]:
    """The bytes that the forward leaves behind, and the seconds that are added."""
    spans = span_costs(chain, plan)
    return sum(span.held_bytes for span in spans), sum(span.added_s for span in spans)


def greedily(chain: Chain) -> Iterator[Priced]:
    """The plans on the way of ``greedy``, from the plain step to the one from which no action saves more."""
    actions = [Action.KEEP] * len(chain.decided)
    known = [action for action in ACTIONS if has(chain, action)]
    while True:
        plan = plan_of(chain, actions)
        yield Priced.of(chain, plan)
        held_bytes, added_s = held(chain, plan)
        best = (0.0, 0, Action.KEEP)
        for at, action in product(range(len(actions)), known):
            tried_bytes, tried_s = held(chain, plan_of(chain, [*actions[:at], action, *actions[at + 1 :]]))
            if tried_bytes < held_bytes:
                rate = (held_bytes - tried_bytes) / (tried_s - added_s) if tried_s > added_s else inf
                best = max(best, (rate, at, action), key=itemgetter(0))
        rate, at, action = best
        if not rate:
            return
        actions[at] = action


def alone(chain: Chain) -> Chain:
    """The same chain with each block in a stack of its own, which no span leaves."""
    blocks = [b if b.stack is None else replace(b, stack=number) for number, b in enumerate(chain.blocks)]
    return replace(chain, blocks=tuple(blocks))


def solved(chain: Chain, budget_bytes: int) -> float | None:
    """The seconds that the solver's plan adds; ``None`` where none fits."""
    try:
        return simulate(chain, solve(chain, budget_bytes)).added_s
    except InputError:
        return None


def least(found: Sequence[Priced], budget_bytes: int) -> float | None:
    """The fewest seconds that a plan of these adds which fits."""
    return min((one.added_s for one in found if one.peak_bytes <= budget_bytes), default=None)


def first(found: Sequence[Priced], budget_bytes: int) -> float | None:
    """The seconds that the first of these adds which fits."""
    return next((one.added_s for one in found if one.peak_bytes <= budget_bytes), None)


def compare(name: str, target: Target, num_budgets: int) -> dict[str, Any]:
    """One model at its budgets."""
    chain = chain_of(name, target)
    lone, greedy, kth, cut = alone(chain), [*greedily(chain)], [*every_kth(chain)], [*in_segments(chain)]
    ways: dict[str, Callable[[int], float | None]] = {
        "alone": lambda num_bytes: solved(lone, num_bytes),
        "greedy": lambda num_bytes: first(greedy, num_bytes),
        "every k-th": lambda num_bytes: least(kth, num_bytes),
        "segments": lambda num_bytes: least(cut, num_bytes),
    }
    plain_s = sum(block.forward_s + block.backward_s for block in chain.blocks)
    low, high = smallest_feasible(chain), Priced.of(chain, keep_all(chain)).peak_bytes
    rows = []
    for number in range(num_budgets):
        budget_bytes = low + (high - low) * number // num_budgets
        began = time.process_time()
        plan, gap_s = solve_with_gap(chain, budget_bytes)
        solver_s = time.process_time() - began
        added_s = Priced.of(chain, plan).added_s
        found = {way: of_budget(budget_bytes) for way, of_budget in ways.items()}
        lost = {way: None if s is None else (s - added_s) / (plain_s + added_s) for way, s in found.items()}
        exact = {"added": added_s / plain_s, "gap": gap_s / plain_s, "solver_s": solver_s}
        rows.append({"budget_bytes": budget_bytes, "of_saving": 1 - number / num_budgets, **exact, "lost": lost})
    return {"model": name, "blocks": len(chain.decided), "plain_s": plain_s, "budgets": rows}


def summary(rows: Sequence[dict[str, Any]], way: str) -> dict[str, Any]:
    """How much a way loses: on average and at most where it has a plan, at which budget, and where it has none."""
    lost = {row["of_saving"]: row["lost"][way] for row in rows if row["lost"][way] is not None}
    worst_at = max(lost, key=lambda saving: lost[saving], default=None)
    return {
        "mean": mean(lost.values()) if lost else None,
        "worst": None if worst_at is None else lost[worst_at],
        "worst_at": worst_at,
        "without_plan": len(rows) - len(lost),
    }


def cell(found: dict[str, Any]) -> str:
    """``1.2 %, at most 4.5 % at 0.35, none at 3``."""
    none = f"none at {found['without_plan']}" if found["without_plan"] else ""
    if found["mean"] is None:
        return none
    at = f" at {found['worst_at']:.2f}" if found["worst"] >= 0.0005 else ""
    words = [f"{abs(found['mean']):.1%}, at most {found['worst']:.1%}{at}", none]
    return "<br>".join(filter(None, words))


def page_of(models: Sequence[dict[str, Any]], target: Target, table: str) -> str:
    """The page."""
    slowest = max(row["solver_s"] for model in models for row in model["budgets"])
    gap = max(row["gap"] for model in models for row in model["budgets"])
    return (
        f"From `benchmarks/solver_ablation.py`: estimated for {target.name}, nothing is measured. Predicted time of a "
        f"step beyond that of the exact plan at the same budget: the mean over {NUM_BUDGETS} budgets of those with a "
        "plan, the most and where (1: the least memory that works, 0: that of the plain step), and at how many budgets "
        f"there is no plan.\n\n{table}\n\nThe solver took at most {slowest:.1f} s for a plan, and proved it optimal to "
        f"{gap:.2%} of a step.\n"
    )


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Compare the ways on all models; returns the content of the JSON file."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--target", default="h100", help="the device that costs are estimated for")
    flags = harness.read_flags(parser, args)
    target = find_target(flags.target)
    models = [
        compare(name, target, 4 if flags.quick else NUM_BUDGETS) for name in (QUICK_MODELS if flags.quick else MODELS)
    ]
    for model in models:
        model["summary"] = {way: summary(model["budgets"], way) for way in WAYS}
    rows = [(model["model"], str(model["blocks"]), *(cell(model["summary"][way]) for way in WAYS)) for model in models]
    harness.show(HEADINGS, rows)
    results = {"target": target.name, "models": models}
    page = page_of(models, target, harness.markdown_table(HEADINGS, rows))
    harness.write_results(flags.output_dir, "solver-ablation", results, page)
    return results


if __name__ == "__main__":
    main()
