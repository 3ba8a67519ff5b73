"""Every claim of the README on the GPU of this machine, one after the other, each with a verdict: 25 minutes.

    bash benchmarks/gpu_day.sh WHEELS                   # installs from a folder of wheels, then runs this; no network
    python benchmarks/gpu_day.py --tiny                 # the same steps on a CPU, small

A step that has a verdict is not run again, so what was stopped goes on. ``--only`` names steps. Models have random
weights, data are digits and the standard library's text; runs go to --runs_dir. Writes gpu_day.json and gpu_day.md, the
results of other benchmarks and rows for the results table to --output_dir, by default docs/results or, with --tiny,
out/benchmarks.

NOTE [ a verdict ]
1. ``holds`` and ``fails`` are for claims; ``figure`` has a measured number that no claim depends on.
2. A step that breaks off, or takes longer than its limit, has the verdict ``fails`` with the last line of its output.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from harness import ROOT
from safetensors.torch import load_file

from memsave_recipes.cli import main as memsave
from memsave_recipes.text import format_bytes

HOLDS, FAILS, FIGURE = "holds", "fails", "figure"
OUT_OF_MEMORY = 3
LIMIT_S = 300
TEXT, IMAGES = "text", "images"
SPEEDS = {"chunked loss": "--loss chunked", "full loss": "--loss full"}
LLAMA = "hidden_size={0},intermediate_size={1},num_hidden_layers={2},num_attention_heads={3},num_key_value_heads={3}"


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of all runs.

    Args:
        precision: ``--mixed_precision`` of most of them; ``half`` where the loss is scaled.
        strategies: that ``--verify`` proves for the Llama, and for the convolutional network.
        offloads: strategies that are compared with recomputation.
        speeds: flags whose speed is measured, by name.
        kinds: of recipes that train in half precision, and that are killed and resumed.
        budgets: of plain's peak.
        cases: of the predictions.
        jobs: steps at once.
    """

    llama: str
    rows: str
    precision: str
    half: str
    convnet: str
    digits: str
    too_large: str
    strategies: tuple[str, ...]
    convnet_strategies: tuple[str, ...]
    offloads: tuple[str, ...]
    speeds: dict[str, str]
    kinds: tuple[str, ...]
    budgets: tuple[float, ...]
    cases: int
    jobs: int = 1
    is_tiny: bool = False


ON_GPU = Size(
    llama=LLAMA.format(1024, 4096, 12, 16),
    rows="--vocab_size 8192 --block_size 1024 --global_batch_size 32 --micro_batch_size 8 --max_eval_samples 64",
    precision="bf16",
    half="fp16",
    convnet="--model densenet121 --image_size 128",
    digits="--global_batch_size 128",
    too_large="--model vgg16 --image_size 512 --global_batch_size 4096",
    strategies=(
        *("full", "segments:2", "selective", "full_tiled"),
        *("offload", "full_offload", "full_tiled_offload", "compiled:0.5"),
    ),
    convnet_strategies=("full", "segments:2", "bottleneck"),
    offloads=("offload", "full_offload", "full_tiled"),
    speeds={**SPEEDS, "compiled": "--activation_checkpointing compiled:1", "liger": "--loss liger"},
    kinds=(TEXT, IMAGES),
    budgets=(0.5, 0.3),
    cases=100,
)
TINY = Size(
    llama=LLAMA.format(64, 256, 4, 4),
    rows="--vocab_size 512 --block_size 128 --global_batch_size 8 --micro_batch_size 4 --max_eval_samples 8",
    precision="bf16",
    half="bf16",
    convnet="--model densenet_small --image_size 16",
    digits="--global_batch_size 16",
    too_large="",
    strategies=("full", "full_tiled"),
    convnet_strategies=("bottleneck",),
    offloads=("full_offload",),
    speeds=SPEEDS,
    kinds=(TEXT,),
    budgets=(0.7,),
    cases=2,
    jobs=2,
    is_tiny=True,
)


@dataclass(frozen=True)
class Verdict:
    """What became of a claim."""

    step: str
    claim: str
    verdict: str
    found: str


@dataclass(frozen=True)
class Run:
    """A run of a recipe that has ended."""

    code: int
    output: str
    folder: Path

    @property
    def results(self) -> dict[str, Any]:
        """Of results.json.

        Raises:
            RuntimeError: the run failed.
        """
        if self.code:
            raise RuntimeError(f"exit code {self.code}: {_last_line(self.output)}")
        results: dict[str, Any] = json.loads((self.folder / "results.json").read_text())
        return results

    @property
    def peak_gib(self) -> float:
        """Of the allocator."""
        return float(self.results["memory"]["peak_allocated_gib"])

    @property
    def step_s(self) -> float:
        """Median of the step."""
        return float(self.results["perf"]["step_time_s"])


@dataclass
class Day:
    """The machine, where its runs lie, and where results go."""

    size: Size
    folder: Path
    results: Path
    runs: list[Path] = field(default_factory=list)

    @property
    def config(self) -> str:
        """The launch configuration."""
        return "cpu" if self.size.is_tiny else "single_gpu"

    def launch(self, name: str, recipe: str, flags: str, precision: str) -> subprocess.Popen[str]:
        """Begin a run, with a process group of its own."""
        accelerate = Path(sys.executable).with_name("accelerate")
        program = (
            [str(accelerate)] if accelerate.exists() else [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
        )
        config = ROOT / "accelerate_configs" / f"{self.config}.yaml"
        words = ["launch", "--config_file", config, "--mixed_precision", precision, ROOT / "recipes" / f"{recipe}.py"]
        own = ["--report_to", "none", "--output_dir", self.folder / name, *shlex.split(flags)]
        return subprocess.Popen(
            [*program, *map(str, (*words, *own))],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def ended(self, name: str, process: subprocess.Popen[str]) -> Run:
        """The run, when it has ended."""
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise RuntimeError(f"{name} took longer than {LIMIT_S} s") from None
        if process.returncode == 0:
            self.runs.append(self.folder / name)
        return Run(process.returncode, output, self.folder / name)

    def text(self, name: str, flags: str, precision: str | None = None) -> Run:
        """A run of a Llama."""
        shape = f"--model_type llama --config_overrides {self.size.llama} {self.size.rows}"
        precision = precision or self.size.precision
        return self.ended(name, self.launch(name, "language_modeling", f"{shape} {flags} --overwrite", precision))

    def images(self, name: str, flags: str, precision: str | None = None) -> Run:
        """A run of a convolutional network."""
        words = f"{self.size.convnet} {self.size.digits} {flags} --overwrite"
        return self.ended(name, self.launch(name, "image_classification", words, precision or self.size.precision))


Found = Iterator[tuple[str, bool | None, str]]
"""A claim, whether it holds (``None`` for a figure alone), and what was found."""


def kernels(day: Day) -> Found:
    """The tests that have cases for CUDA."""
    tests = [
        *("tests/test_losses.py", "tests/profiling/test_device_memory.py", "tests/profiling/test_breakdown.py"),
        "tests/models/test_varlen.py",
    ]
    chosen = [tests[0], "-k", "float64"] if day.size.is_tiny else tests
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    yield "losses, memory and packed attention are right on this device", done.returncode == 0, _last_line(done.stdout)


def proofs(day: Day) -> Found:
    """``--verify`` of every strategy."""
    steps = "--max_steps 2 --verify warn --eval_steps 2"
    for strategy in day.size.strategies:
        run = day.text(f"verify-{_word(strategy)}", f"--activation_checkpointing {strategy} {steps}")
        found = run.results["equivalence"]["verdict"]
        rounds = strategy.startswith(("full_tiled", "compiled"))
        yield f"Llama, {strategy}: the step of plain", found == "identical" or (rounds and "exact" in found), found
    for strategy in day.size.convnet_strategies:
        run = day.images(f"verify-densenet-{_word(strategy)}", f"--activation_checkpointing {strategy} {steps}", "no")
        found = run.results["equivalence"]["verdict"]
        yield f"DenseNet, {strategy}: the step of plain", found == "identical", found


def predictions(day: Day) -> Found:
    """Random cases of ``benchmarks/prediction.py``."""
    device = "cpu" if day.size.is_tiny else "cuda"
    words = f"benchmarks/prediction.py --device {device} --cases {day.size.cases} --output_dir {day.results}"
    done = subprocess.run([sys.executable, *words.split()], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(_last_line(done.stderr))
    summary = json.loads((day.results / f"prediction-{device}.json").read_text())["summary"]
    yield "no predicted peak is below the measured one", summary["too_low"] == 0, json.dumps(summary)


def budgets(day: Day) -> Found:
    """Budgets as parts of what plain takes above its weights."""
    plain = day.text("plain", "--max_steps 12 --logging_steps 4")
    yield "peak and seconds a step without a plan", None, f"{_gib(plain.peak_gib)}, {1000 * plain.step_s:.1f} ms"
    for part in day.size.budgets:
        budget = part * plain.peak_gib
        flags = f"--activation_checkpointing budget --memory_budget_gib {budget:.4f} --max_steps 12 --logging_steps 4"
        run = day.text(f"budget-{round(100 * part)}", flags)
        memory = run.results["memory"]
        found = (
            f"{_gib(run.peak_gib)} of {_gib(budget)}, predicted {memory['prediction_error_pct']:+.2f} %, "
            f"x{run.step_s / plain.step_s:.3f} of plain's time"
        )
        yield f"a budget of {part:.0%} of plain's peak is kept", run.peak_gib <= budget, found


def offloading(day: Day) -> Found:
    """Time and memory beside recomputation."""
    length = "--max_steps 12 --logging_steps 4"
    plain, full = (day.text(name, f"--activation_checkpointing {name} {length}") for name in ("none", "full"))
    for name in day.size.offloads:
        run = day.text(name, f"--activation_checkpointing {name} {length}")
        ratios = f"x{run.step_s / plain.step_s:.3f} of plain's time, x{run.step_s / full.step_s:.3f} of full's"
        yield f"{name}: memory and time", None, f"{_gib(run.peak_gib)} (full {_gib(full.peak_gib)}), {ratios}"


def full_device(day: Day) -> Found:
    """A batch that no device has memory for, and the page that follows."""
    if day.size.is_tiny:
        yield "a full device ends in a page with a way out", None, "needs a GPU: a CPU has no limit of its own"
        return
    process = day.launch("too-large", "image_classification", f"{day.size.too_large} --max_steps 2", "no")
    run = day.ended("too-large", process)
    has_way_out = "--activation_checkpointing" in run.output
    found = f"exit code {run.code}, {'with' if has_way_out else 'without'} a plan that fits"
    yield "a full device ends in a page with a way out", run.code == OUT_OF_MEMORY and has_way_out, found


def half_precision(day: Day) -> Found:
    """A loss that is scaled."""
    train = {TEXT: day.text, IMAGES: day.images}
    for name in day.size.kinds:
        run = train[name](f"half-{name}", "--max_steps 30 --logging_steps 10", day.size.half)
        losses = [row["train/loss"] for row in _rows(run.folder) if "train/loss" in row]
        falls = all(loss == loss for loss in losses) and losses[-1] < losses[0]
        yield f"{name} under {day.size.half}: the loss falls", falls, f"{losses[0]:.3f} to {losses[-1]:.3f}"


def resumed(day: Day) -> Found:
    """Killed after the first checkpoint, and gone on."""
    recipes = {
        TEXT: ("language_modeling", f"--model_type llama --config_overrides {day.size.llama} {day.size.rows}"),
        IMAGES: ("image_classification", f"{day.size.convnet} {day.size.digits}"),
    }
    for name in day.size.kinds:
        recipe, shape = recipes[name]
        flags = f"{shape} --full_determinism --max_steps 40 --save_every 10"
        anew = f"{flags} --overwrite"
        straight = day.ended(f"straight-{name}", day.launch(f"straight-{name}", recipe, anew, day.size.precision))
        _ = straight.results
        folder = day.folder / f"killed-{name}"
        process = day.launch(folder.name, recipe, anew, day.size.precision)
        deadline = time.monotonic() + LIMIT_S
        while not any((folder / "checkpoints").glob("step-*")) and process.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no checkpoint in {LIMIT_S} s")
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        again = day.ended(folder.name, day.launch(folder.name, recipe, f"{flags} --resume", day.size.precision))
        _ = again.results
        found = _differing(folder / "final", straight.folder / "final")
        words = f"{len(found)} tensors differ" if found else "equal weights"
        yield f"{name}: killed and resumed, with the weights of a run that nothing ended", not found, words


def throughput(day: Day) -> Found:
    """Tokens a second, and the share of the device's peak rate."""
    for name, flags in day.size.speeds.items():
        run = day.text(f"speed-{_word(name)}", f"{flags} --max_steps 24 --logging_steps 4")
        perf = run.results["perf"]
        share = f", {perf['mfu_pct']:.1f} % of the peak rate" if perf.get("mfu_pct") else ""
        yield f"{name}: speed", None, f"{perf['samples_per_sec']:.1f} samples/s{share}, {_gib(run.peak_gib)}"


def article(day: Day) -> Found:
    """VGG16 as in the article that this project grew from."""
    quick = "--quick" if day.size.is_tiny else ""
    words = f"benchmarks/vgg16_article.py {quick} --output_dir {day.results}"
    done = subprocess.run([sys.executable, *words.split()], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(_last_line(done.stderr))
    (file,) = day.results.glob(f"vgg16_article-{'cpu' if day.size.is_tiny else 'cuda'}*.json")
    rows = json.loads(file.read_text())["rows"]
    plain = rows[0]
    for row in rows:
        peak = format_bytes(row["memory"]["peak_allocated_bytes"])
        ratio = row["step_time_s"] / plain["step_time_s"]
        yield f"VGG16 as in the article, {row['method']}", None, f"{peak}, x{ratio:.3f} of plain's time"


STEPS: dict[str, Callable[[Day], Found]] = {
    "kernels": kernels,
    "proofs": proofs,
    "predictions": predictions,
    "budgets": budgets,
    "offloading": offloading,
    "full_device": full_device,
    "half_precision": half_precision,
    "resumed": resumed,
    "throughput": throughput,
    "article": article,
}
"""In order of value."""


def run_step(step: str, day: Day) -> list[Verdict]:
    """Its verdicts, each printed as it is found."""
    verdicts = []
    for one in verdicts_of(step, day):
        verdicts.append(one)
        print(f"{one.verdict:>6}  {one.claim}: {one.found}", flush=True)
    return verdicts


def verdicts_of(step: str, day: Day) -> Iterator[Verdict]:
    """Rule 2 of the NOTE."""
    try:
        for claim, holds, found in STEPS[step](day):
            yield Verdict(step, claim, FIGURE if holds is None else HOLDS if holds else FAILS, found)
    except (RuntimeError, OSError, KeyError, ValueError) as error:
        yield Verdict(step, STEPS[step].__doc__ or step, FAILS, f"{type(error).__name__}: {error}")


def _differing(folder: Path, expected: Path) -> list[str]:
    ours, theirs = load_file(folder / "model.safetensors"), load_file(expected / "model.safetensors")
    return [name for name in ours.keys() | theirs.keys() if not torch.equal(ours[name], theirs[name])]


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _last_line(output: str) -> str:
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "no output")


def _word(name: str) -> str:
    return name.replace(":", "-").replace(" ", "-").replace("_", "-")


def _gib(size: float) -> str:
    return format_bytes(round(size * 2**30))


def as_markdown(verdicts: Sequence[Verdict], about: dict[str, Any]) -> str:
    """The table, with a count above it."""
    counts = {word: sum(one.verdict == word for one in verdicts) for word in (HOLDS, FAILS, FIGURE)}
    lines = [
        f"`benchmarks/gpu_day.sh` on {about['device']}, torch {about['versions']['torch']}: "
        f"{counts[HOLDS]} claims hold, {counts[FAILS]} fail; {counts[FIGURE]} figures.",
        "",
    ]
    rows = [(one.step, one.claim, one.verdict, one.found) for one in verdicts]
    return "\n".join([*lines, harness.markdown_table(("step", "claim", "verdict", "found"), rows)])


def main(args: Sequence[str] | None = None) -> int:
    """Run what has no verdict yet; returns 1 where a claim fails."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small, on a CPU: shows that every step works")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--runs_dir", type=Path, help="default: out/gpu_day, with --tiny out/gpu_day-tiny")
    flags = harness.read_flags(parser, args)
    if not flags.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device is here: --tiny runs the steps on a CPU")
    name = "gpu_day-tiny" if flags.tiny else "gpu_day"
    is_default = flags.output_dir == harness.RESULTS
    folder = harness.QUICK_RESULTS if flags.tiny and is_default else flags.output_dir
    day = Day(TINY if flags.tiny else ON_GPU, flags.runs_dir or ROOT / "out" / name, folder)
    for path in (day.folder, folder):
        path.mkdir(parents=True, exist_ok=True)
    about = harness.describe_machine(torch.device("cpu") if flags.tiny else harness.this_device())
    file = folder / f"{name}.json"
    verdicts = [Verdict(**one) for one in json.loads(file.read_text())["verdicts"]] if file.exists() else []
    steps = [step for step in flags.only if step not in {one.step for one in verdicts}]
    with ThreadPoolExecutor(day.size.jobs) as pool:
        for found in pool.map(partial(run_step, day=day), steps):
            verdicts += found
            results = {"benchmark": "gpu_day", **about, "verdicts": [asdict(one) for one in verdicts]}
            harness.write_results(folder, name, results, as_markdown(verdicts, about))
    if day.runs:
        memsave(["results", "add", *map(str, dict.fromkeys(day.runs)), "--to", str(folder / "rows")])
    return int(any(one.verdict == FAILS for one in verdicts))


if __name__ == "__main__":
    sys.exit(main())
