"""What a run's telemetry costs: the loop of the recipes with and without it, at one log every 10 steps.

    python benchmarks/telemetry_cost.py

The loops live in one process and take turns, a step each, in an order that is drawn anew every round: one bare, one
that measures and writes ``metrics.jsonl``, one that tells trackio as well. All train the same small vision transformer
on the same images. One step in ten logs, so windows of 10 steps are compared: a ratio is that of two windows of the
same rounds; printed is the median over all windows, and the middle half. A second bare loop shows what chance makes of
equal ones. The target is 1.005.

That ratio drowns in the noise of a busy machine. So the calls into the telemetry are timed as well, and their sum is
set against the time of the bare steps.

Writes docs/results/telemetry_cost.json and .md.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import torch
from loop_overhead import LEARNING_RATE, LOGGING_STEPS, Training, Work

from memsave_recipes.run.report import RunReport
from memsave_recipes.run.trackers import RunLabels, finish_trackers, resolve_trackers, start_trackers
from memsave_recipes.training.launch.start import Accelerator, describe_environment

WARMUP_WINDOWS, WINDOWS, QUICK_WINDOWS = 2, 40, 2
BARE, AGAIN = "no telemetry", "the same again"
LOOPS: dict[str, list[str] | None] = {  # what --report_to says; None measures nothing
    BARE: None,
    AGAIN: None,
    "metrics.jsonl": ["none"],
    "metrics.jsonl and trackio": ["trackio"],
}


@dataclass
class Calls:
    """Adds up the seconds of calls."""

    seconds: float = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose time counts."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - began
            return result

        return call


@dataclass
class Loop:
    """A loop that makes a step when it is told to."""

    report_to: list[str] | None
    folder: Path
    work: Work
    calls: Calls = field(default_factory=Calls)
    step_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._steps = self._run()

    def step(self) -> None:
        """Make a step and note its time."""
        began = time.perf_counter()
        next(self._steps)
        self.step_seconds.append(time.perf_counter() - began)

    def _run(self) -> Iterator[None]:
        accelerator = Accelerator()
        training = Training(self.work, accelerator)
        if self.report_to is None:
            yield from self._run_bare(training)
        else:
            accelerator.log_with = resolve_trackers(self.report_to, self.folder)
            yield from self._run_with_telemetry(training)

    def _run_bare(self, training: Training) -> Iterator[None]:
        for batch in training.batches:
            training.step(batch)
            if (batch.step + 1) % LOGGING_STEPS == 0:
                torch.as_tensor(batch.loss).item()  # every loop reads where it is
            yield

    def _run_with_telemetry(self, training: Training) -> Iterator[None]:
        accelerator = training.accelerator
        report = RunReport(accelerator, training.batches, training.model, training.optimizer)
        labels = RunLabels(project="telemetry", group="", name="", tags=[], config={}, output_dir=self.folder)
        start_trackers(accelerator, labels)
        count, end_window = self.calls.timed(report.count), self.calls.timed(report.end_window)
        log = self.calls.timed(accelerator.log)
        for batch in report.clock.loading(training.batches):
            report.count_flops(batch, training.loss_of)
            with report.measured(batch.step):
                grad_norm = training.step(batch)
            count(batch, grad_norm)
            if (batch.step + 1) % LOGGING_STEPS == 0:
                figures, _ = end_window(batch.step + 1, learning_rate=LEARNING_RATE)
                log(figures, step=batch.step + 1)
            if batch.step + 1 == self.work.total_steps:
                finish_trackers(accelerator, {})
            yield


def main() -> None:
    """Measure, print, write."""
    flags = harness.read_flags(harness.make_parser(__doc__), None)
    windows = QUICK_WINDOWS if flags.quick else WINDOWS
    num_steps = LOGGING_STEPS * (WARMUP_WINDOWS + windows)
    work = Work(micro_batch_size=32, accumulation_steps=1, num_warmup_steps=0, num_steps=num_steps)
    environment = describe_environment(Accelerator()) | {"num_cpus": os.cpu_count()}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRACKIO_DIR"] = folder
        loops = {
            name: Loop(report_to, Path(folder) / str(index), work)
            for index, (name, report_to) in enumerate(LOOPS.items())
        }
        take_turns(loops, num_steps)
    rows = summarize(loops)
    content = {"steps": num_steps, "logging_steps": LOGGING_STEPS, "loops": rows, "environment": environment}
    page = as_markdown(rows, windows, environment["device"])
    harness.write_results(flags.output_dir, "telemetry_cost", content, page)
    print(page)


def take_turns(loops: dict[str, Loop], num_steps: int) -> None:
    """All steps of all loops; the warm-up is in no figure."""
    num_warmup_steps = LOGGING_STEPS * WARMUP_WINDOWS
    for name in harness.turns(loops, num_warmup_steps):
        loops[name].step()
    for loop in loops.values():
        loop.step_seconds.clear()
        loop.calls.seconds = 0.0
    for name in harness.turns(loops, num_steps - num_warmup_steps):
        loops[name].step()


def summarize(loops: dict[str, Loop]) -> list[dict[str, Any]]:
    """A row a loop: its median step, its windows against the bare ones, its calls against the bare steps."""
    bare = windows_of(loops[BARE])
    rows = []
    for name, loop in loops.items():
        ratio, quartiles = harness.median_and_quartiles(harness.ratios(windows_of(loop), bare))
        rows.append(
            {
                "loop": name,
                "step_ms": 1000 * statistics.median(loop.step_seconds),
                "ratio": ratio,
                "ratio_quartiles": quartiles,
                "calls_us_per_step": 1e6 * loop.calls.seconds / len(loop.step_seconds),
                "calls_pct": 100 * loop.calls.seconds / sum(bare),
            }
        )
    return rows


def windows_of(loop: Loop) -> list[float]:
    """Seconds of every ten steps."""
    steps = loop.step_seconds
    return [sum(steps[first : first + LOGGING_STEPS]) for first in range(0, len(steps), LOGGING_STEPS)]


def as_markdown(rows: list[dict[str, Any]], windows: int, device: str) -> str:
    """The page."""
    headings = (
        "loop",
        "median step",
        "ratio to no telemetry",
        "middle half",
        "calls, a step",
        "calls, of the step time",
    )
    cells = []
    for row in rows:
        low, high = row["ratio_quartiles"]
        ratio = (f"{row['ratio']:.4f}", f"{low:.3f} to {high:.3f}")
        calls = (f"{row['calls_us_per_step']:.0f} us", f"{row['calls_pct']:.2f} %")
        cells.append([row["loop"], f"{row['step_ms']:.1f} ms", *ratio, *calls])
    return (
        f"# What telemetry costs, at one log every {LOGGING_STEPS} steps\n\n"
        f"`python benchmarks/telemetry_cost.py`, {windows} windows of {LOGGING_STEPS} steps on {device}.\n\n"
        f"{harness.markdown_table(headings, cells)}"
    )


if __name__ == "__main__":
    main()
