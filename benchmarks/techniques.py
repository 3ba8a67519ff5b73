"""What each technique saves and costs on one small language model: the recipe itself, run with one flag changed.

    python benchmarks/techniques.py

Every method is a launch of recipes/language_modeling.py on the text of Python's own library. Methods take turns, round
after round, so that a slow minute of the machine meets them all; the time ratio is the median over rounds of the ratio
to the baseline's of the same round. Peaks do not vary: on a CPU they are those of one instrumented step, elsewhere the
allocator's. Writes docs/results/techniques-DEVICE.json and .md.
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import harness
from tqdm import tqdm

PLAIN = [
    *("--model_type", "gpt2", "--config_overrides", "n_layer=6,n_head=8,n_embd=192", "--block_size", "128"),
    *("--global_batch_size", "16", "--learning_rate", "1e-3"),
    *("--loss", "full", "--report_to", "none", "--logging_steps", "1000"),
]


@dataclass(frozen=True)
class Method:
    """A technique as the flags that ask for it; ``launch`` are those of ``accelerate launch``."""

    name: str
    flags: str = ""
    launch: str = ""


METHODS = [
    Method("plain"),
    Method("loss without logits", "--loss chunked"),
    Method("accumulation, 4 x 4", "--micro_batch_size 4"),
    Method("checkpoint every block", "--activation_checkpointing full"),
    Method("checkpoint every 2nd block", "--activation_checkpointing every:2"),
    Method("bf16 autocast", "", "--mixed_precision bf16"),
    Method("LoRA", "--lora"),
    Method("Adafactor", "--optimizer adafactor"),
    Method("8-bit AdamW", "--optimizer adamw_8bit"),
    Method("no clipping", "--max_grad_norm 0"),
    Method("optimizer in backward", "--max_grad_norm 0 --optimizer_in_backward"),
    Method("together", "--loss chunked --activation_checkpointing full --micro_batch_size 4 --optimizer adafactor"),
]


def main() -> None:
    """Measure, print the table, write it."""
    flags = harness.read_flags(harness.make_parser(__doc__), None)
    methods, rounds, max_steps = (METHODS[:3], 1, 4) if flags.quick else (METHODS, 2, 8)
    runs = measure(methods, rounds, max_steps)
    rows = [row_of(method, runs) for method in methods]
    environment = next(iter(runs.values()))[0]["environment"]
    results = {"environment": environment, "rows": rows}
    page = as_markdown(rows, environment)
    harness.write_results(flags.output_dir, f"techniques-{harness.this_device().type}", results, page)
    harness.show(COLUMNS, map(cells, rows))


def measure(methods: list[Method], rounds: int, max_steps: int) -> dict[str, list[dict[str, Any]]]:
    """The results of every method in every round."""
    runs: dict[str, list[dict[str, Any]]] = {method.name: [] for method in methods}
    with TemporaryDirectory() as folder, tqdm(total=rounds * len(methods), unit="run") as progress:
        for method in harness.turns(methods, rounds, shuffled=False):
            progress.set_postfix_str(method.name)
            runs[method.name].append(run(method, max_steps, Path(folder) / "run"))
            progress.update()
    return runs


def run(method: Method, max_steps: int, folder: Path) -> dict[str, Any]:
    """One launch of the recipe; what it left in ``results.json`` and, of ``config.json``, the environment."""
    what = [*PLAIN, "--max_steps", max_steps, "--output_dir", folder, "--overwrite", *method.flags.split()]
    command = harness.launch_command("language_modeling", *what, launch=method.launch.split())
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{method.name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    results = json.loads((folder / "results.json").read_text())
    return {**results, "environment": json.loads((folder / "config.json").read_text())["environment"]}


def row_of(method: Method, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A row of the table: figures, and their ratios to the baseline."""
    mine, plain = runs[method.name], runs["plain"]
    times = harness.ratios(*([one["perf"]["step_time_s"] for one in results] for results in (mine, plain)))
    peak, plain_peak = (results[0]["memory"]["peak_allocated_gib"] for results in (mine, plain))
    return {
        "method": method.name,
        "flags": f"{method.launch} {method.flags}".strip(),
        "peak_gib": peak,
        "peak_ratio": peak / plain_peak,
        "time_ratio": median(times),
        "time_ratios": times,
        "tokens_per_sec": median(results["perf"]["tokens_per_sec"] for results in mine),
        "train_loss": mine[0]["train_loss"],
    }


COLUMNS = {
    "method": lambda row: row["method"],
    "flags": lambda row: row["flags"] or "-",
    "peak": lambda row: f"{row['peak_gib'] * 1024:.0f} MiB",
    "of plain": lambda row: f"{100 * row['peak_ratio']:.0f} %",
    "time": lambda row: f"x{row['time_ratio']:.2f}",
    "loss after": lambda row: f"{row['train_loss']:.4f}",
}


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table as text."""
    return [cell(row) for cell in COLUMNS.values()]


def as_markdown(rows: list[dict[str, Any]], environment: dict[str, Any]) -> str:
    """The page."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    about = f"`python benchmarks/techniques.py` on {environment['device']}, {environment['num_threads']} threads"
    table = harness.markdown_table(COLUMNS, map(cells, rows))
    return f"{about}; {versions}.\nThe baseline (plain): `{' '.join(PLAIN)}`.\n\n{table}"


if __name__ == "__main__":
    main()
