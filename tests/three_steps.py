"""A run of three steps through our trackers: ``python three_steps.py REPORT_TO FOLDER NAME LIMITS``.

Tests run it in a process of its own, or take its parts. ``LIMITS`` is JSON of time limits of ``trackers``, so that a
test need not wait for the real ones.
"""

import json
import sys
import time
from pathlib import Path

from accelerate import Accelerator

from memsave_recipes.run import trackers
from memsave_recipes.run.trackers import (
    RunLabels,
    alert,
    finish_trackers,
    resolve_trackers,
    start_trackers,
)

CONFIG = {"seed": 0, "plan": {"strategy": "segments:2", "spans": [3, 8]}}
LABELS = {
    "project": "memsave",
    "group": "vgg11-gbs64-32px",
    "name": "segments:2-mbs16x4",
    "tags": ["segments:2", "cpu"],
}
CONFUSION = {"cat": [3, 1], "dog": [0, 2]}
RESULTS = {
    "steps": 3,
    "model": "vgg11",
    "eval": {"accuracy": 0.95},
    "memory": {"peak_allocated_gib": 1 / 3},
    "classes": {"cat": {"recall": 0.75}, "dog": {"recall": 1.0}},
    "confusion_matrix": list(CONFUSION.values()),
}
FLAT_RESULTS = {
    "result/steps": 3,
    "result/eval/accuracy": 0.95,
    "result/memory/peak_allocated_gib": 1 / 3,
    "result/classes/cat/recall": 0.75,
    "result/classes/dog/recall": 1.0,
}
ALERT = {"title": "skipped steps", "text": "1 of at most 2 up to step 3: not finite"}
ROWS = [{"step": step, "train/loss": 1 / step} for step in (1, 2, 3)]


def run(accelerator: Accelerator, folder: Path, name: str = LABELS["name"]) -> None:
    began = time.monotonic()
    start_trackers(accelerator, RunLabels(**{**LABELS, "name": name}, config=CONFIG, output_dir=folder))
    print(f"training starts after {time.monotonic() - began:.1f} s")
    for row in ROWS:
        accelerator.log({"train/loss": row["train/loss"]}, step=row["step"])
    alert(accelerator, **ALERT)
    print(f"last step at {time.time():.1f}")
    finish_trackers(accelerator, RESULTS)
    print("the run is done")


if __name__ == "__main__":
    report_to, folder, run_name, limits = sys.argv[1:]
    for limit, seconds in json.loads(limits).items():
        setattr(trackers, limit, seconds)
    run(Accelerator(cpu=True, log_with=resolve_trackers(report_to.split(), Path(folder))), Path(folder), run_name)
