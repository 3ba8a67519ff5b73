"""Seconds of `memsave fit` for nine models and six sizes of memory, each in a process of its own.

    python benchmarks/fit.py                            # 54 cases
    python benchmarks/fit.py --quick                    # one

A case is `memsave fit MODEL --memory SIZE` with the defaults, from the start of Python to its end. Seconds are those of
the clock and those of the processor, which other work on the machine changes less. Writes docs/results/fit-cpu.json
and .md.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import fit_models
import harness
import torch
from tqdm import tqdm

MEMORIES = ("8GiB", "12GiB", "16GiB", "24GiB", "48GiB", "80GiB")
LIMIT_S = 20
NO_FIT = 2
HEADINGS = ("model", "memory", "best row", "micro x acc.", "needed GiB", "rows that fit", "seconds", "of the processor")


def measure(model: str, memory: str, folder: Path) -> dict[str, Any]:
    """One case: the seconds, and the rows."""
    file = folder / "fit.json"
    word = fit_models.write(model, folder)
    before, begin = os.times(), perf_counter()
    command = [sys.executable, "-m", "memsave_recipes.tools.cli", "fit", word, "--memory", memory, "--json", str(file)]
    code = subprocess.run(command, capture_output=True, text=True, check=False).returncode
    seconds, after = perf_counter() - begin, os.times()
    if code not in (0, NO_FIT):
        raise RuntimeError(f"{model} at {memory} ended with exit code {code}")
    text = file.read_text(encoding="utf-8").replace(f"{harness.ROOT}/", "").replace(f"{folder}/", "")
    record = json.loads(text)
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    best = None if record["best"] is None else record["rungs"][record["best"]]
    fitting = [rung["name"] for rung in record["rungs"] if rung["fits"]]
    return {"model": model, "memory": memory, "seconds": seconds, "cpu_s": cpu_s, "best": best, "fitting": fitting}


def cells(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The rows of the table."""
    for row in rows:
        best = row["best"]
        yield (
            row["model"],
            row["memory"],
            "nothing fits" if best is None else best["name"],
            "" if best is None else f"{best['micro_batch_size']} x {best['accumulation_steps']}",
            "" if best is None else f"{best['needed_bytes'] / 2**30:.1f}",
            str(len(row["fitting"])),
            f"{row['seconds']:.1f}",
            f"{row['cpu_s']:.1f}",
        )


def summary(results: dict[str, Any]) -> str:
    """How many cases stay below the limit, and the slowest."""
    rows = results["rows"]
    slowest = max(rows, key=lambda row: row["seconds"])
    below = sum(row["seconds"] <= LIMIT_S for row in rows)
    return (
        f"{below} of {len(rows)} cases take at most {LIMIT_S} s; the slowest is {slowest['model']} at "
        f"{slowest['memory']} with {slowest['seconds']:.1f} s. The load average was {results['load_average']:.1f} at "
        f"the beginning, on {os.cpu_count()} cores: {results['machine']['device']}, torch {torch.__version__}."
    )


def to_markdown(results: dict[str, Any]) -> str:
    """The page."""
    table = harness.markdown_table(HEADINGS, cells(results["rows"]))
    return f"# `memsave fit`: seconds\n\nFrom `benchmarks/fit.py`. {summary(results)}\n\n{table}\n"


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure as the flags say; returns the content of the JSON file."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--model", choices=fit_models.MODELS, nargs="+", default=fit_models.MODELS)
    parser.add_argument("--memory", choices=MEMORIES, nargs="+", default=MEMORIES)
    flags = harness.read_flags(parser, args)
    cases = [("ViT-L-16-384", "24GiB")] if flags.quick else list(product(flags.model, flags.memory))
    machine = harness.describe_machine(torch.device("cpu"), "transformers")
    results: dict[str, Any] = {"benchmark": "fit", "machine": machine, "load_average": os.getloadavg()[0], "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        for model, memory in tqdm(cases, unit="case"):
            results["rows"].append(measure(model, memory, Path(folder)))
            harness.write_results(flags.output_dir, "fit-cpu", results, to_markdown(results))
    harness.show(HEADINGS, cells(results["rows"]), summary(results))
    return results


if __name__ == "__main__":
    main()
