"""Every claim of the README on the GPUs of this machine, one after the other, each with a verdict.

    bash benchmarks/gpu_day.sh --prepare                # before a GPU is there: tokenizers and tokens of all runs
    bash benchmarks/gpu_day.sh                          # about 40 minutes on one GPU, no network
    bash benchmarks/gpu_day.sh --list                   # the steps, their claims, and what each needs
    bash benchmarks/gpu_day.sh --tiny                   # the same steps on a CPU, small

The first twelve minutes tell what a step takes (``first_minutes.py``); --only first_minutes ends after them.

A claim that has a verdict is not run again, so what was stopped goes on. --only names steps, and --claims words of the
claims in them. Where time is short, claims that are not of speed may run side by side: a process for some of them, with
a --runs_dir and an --output_dir of its own. A process takes up to 11 GiB, of ``techniques`` 32.

Models have random weights, data are digits and the standard library's text. After each step gpu_day.json, gpu_day.md
and the rows for the results table are written to --output_dir, by default docs/results; of small runs to
out/benchmarks.

NOTE [ a verdict ]
1. ``holds`` and ``fails`` are for claims; ``figure`` has a measured number that no claim depends on; ``skipped`` says
   what this machine lacks.
2. A claim whose command breaks off, or takes longer than its limit, has the verdict ``fails`` with the last line of its
   output.
3. With ``STANDIN`` set the device is a stand-in in the host's memory (``tests/standin``): all is small, no figure is a
   GPU's, claims on speed are not judged, and nothing goes to docs/results.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import harness
import torch
from harness import ROOT
from results_table import main as results_table

from gpu_day.claims import CUDA, FAILS, VERDICTS, Step, Verdict
from gpu_day.day import Day
from gpu_day.exactness import half_precision, kernels, proofs, resumed
from gpu_day.first_minutes import first_minutes, next_minutes, prepare
from gpu_day.loops import loops
from gpu_day.machine import CPU, GPU, STAND_IN, Size, abilities, kind_of_machine, size_of
from gpu_day.memory import budgets, full_device, offloading, predictions, techniques
from gpu_day.ranks import ranks
from gpu_day.speed import article, data_sheets, throughput, waits
from memsave_recipes.core.text import GIB

STEPS = {
    step.__name__: step
    for step in (
        *(
            first_minutes,
            next_minutes,
            ranks,
            kernels,
            proofs,
            waits,
            budgets,
            throughput,
            resumed,
            predictions,
            techniques,
            data_sheets,
        ),
        *(offloading, loops, full_device, half_precision, article),
    )
}
"""In order of value."""

NAMES = {GPU: "gpu_day", STAND_IN: "gpu_day-stand-in", CPU: "gpu_day-tiny"}
WARNINGS = {
    STAND_IN: "The device is a stand-in for CUDA in the host's memory (STANDIN is set): no figure here is a GPU's.",
    CPU: "There is no GPU in this: small runs on a CPU.",
}


def run_step(step: Step, day: Day) -> list[Verdict]:
    """Its verdicts, each printed as it is found."""
    verdicts = []
    for one in day.verdicts_of(step):
        verdicts.append(one)
        print(f"{one.verdict:>7}  {one.step}: {one.claim}: {one.found}", flush=True)
    return verdicts


def describe(size: Size) -> str:
    """The steps with their claims and needs."""
    lines = []
    for name, make in STEPS.items():
        lines.append(f"{name}: {make.__doc__}")
        for claim in make(size).claims:
            needs = f" (needs {', '.join(sorted(claim.needs))})" if claim.needs else ""
            lines.append(f"    {claim.text}{needs}")
    return "\n".join(lines)


def as_markdown(verdicts: Sequence[Verdict], about: dict[str, Any]) -> str:
    """The table, with counts and what is no GPU's above it."""
    counts = Counter(one.verdict for one in verdicts)
    lines = [
        f"`benchmarks/gpu_day.sh` on {about['device']}, torch {about['versions']['torch']}: "
        f"{', '.join(f'{counts[word]} {word}' for word in VERDICTS)}.",
        *([about["warning"]] if about["warning"] else []),
        "",
    ]
    rows = [(one.step, one.claim, one.verdict, one.found.replace("|", "\\|")) for one in verdicts]
    return "\n".join([*lines, harness.markdown_table(("step", "claim", "verdict", "found"), rows)])


def add_rows(day: Day) -> None:
    """Rows of the runs that have a speed, of all steps so far: a ratio of times needs the run without a plan."""
    files = sorted(day.folder.glob("*/results.json"))
    runs = [file.parent for file in files if "samples_per_sec" in json.loads(file.read_text()).get("perf", {})]
    if runs:
        words = ["add", *map(str, runs), "--to", str(day.results / "rows")]
        memory = torch.cuda.mem_get_info()[1] if CUDA in day.has else None
        results_table([*words, *([] if memory is None else ["--device_memory", f"{memory / GIB:.2f}GiB"])])


def main(args: Sequence[str] | None = None) -> int:
    """Run what has no verdict yet; returns 1 where a claim fails."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small, on a CPU: shows that every step works")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--claims", nargs="+", default=[""], metavar="TEXT", help="those with one of these in them")
    parser.add_argument("--list", action="store_true", help="print the steps and their claims, and run nothing")
    parser.add_argument("--prepare", action="store_true", help="make what the runs read, and run nothing")
    parser.add_argument(
        "--runs_dir", type=Path, help="default: out/gpu_day; of small runs with what they are behind it"
    )
    flags = harness.read_flags(parser, args)
    kind = kind_of_machine(is_tiny=flags.tiny)
    if flags.prepare:
        num_runs = prepare([STEPS[name](size_of(kind)) for name in flags.only])
        print(f"what {num_runs} runs read is in {os.environ.get('HF_DATASETS_CACHE', 'the cache of datasets')}")
        return 0
    if flags.list:
        print(describe(size_of(kind)))
        return 0
    if kind != CPU and not torch.cuda.is_available():
        parser.error("no CUDA device is here: --tiny runs the steps on a CPU")
    is_default = flags.output_dir is harness.RESULTS
    folder = harness.QUICK_RESULTS if kind != GPU and is_default else flags.output_dir
    if kind == STAND_IN and folder.resolve().is_relative_to(harness.RESULTS):
        parser.error(f"--output_dir {folder}: {WARNINGS[kind]} Name a folder outside of docs/results")
    day = Day(abilities(kind), kind == GPU, flags.runs_dir or ROOT / "out" / NAMES[kind], folder)
    return spend(day, kind, flags.only, flags.claims)


def spend(day: Day, kind: str, names: Sequence[str], texts: Sequence[str]) -> int:
    """Run the claims that have no verdict, and write after each step."""
    for path in (day.folder, day.results):
        path.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu") if kind == CPU else harness.this_device()
    about = {"kind": kind, "warning": WARNINGS.get(kind), **harness.describe_machine(device)}
    file = day.results / f"{NAMES[kind]}.json"
    verdicts = [Verdict(**one) for one in json.loads(file.read_text())["verdicts"]] if file.exists() else []
    done = {(one.step, one.claim) for one in verdicts}
    print(about["warning"] or f"{torch.cuda.device_count()} x {about['device']}", flush=True)
    for step in (STEPS[name](size_of(kind)) for name in names):
        asked_for = [one for one in step.claims if any(text in one.text for text in texts)]
        open_claims = [one for one in asked_for if (step.name, one.text) not in done]
        if not open_claims:
            continue
        verdicts += run_step(replace(step, claims=open_claims), day)
        results = {"benchmark": "gpu_day", **about, "verdicts": [asdict(one) for one in verdicts]}
        harness.write_results(day.results, NAMES[kind], results, as_markdown(verdicts, about))
        add_rows(day)
    if about["warning"]:
        print(about["warning"])
    return int(any(one.verdict == FAILS for one in verdicts))


if __name__ == "__main__":
    sys.exit(main())
