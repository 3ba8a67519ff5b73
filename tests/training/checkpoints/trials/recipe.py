"""The image recipe under trial, with its default data and augmentation: what it does goes to the same log."""

import contextlib
import functools
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import sklearn.datasets
from trials.run import NUM_STEPS, Log, Run, digest

from memsave_recipes.run.report import RunReport
from memsave_recipes.training.checkpoints import Checkpoints

sys.path.insert(0, str(Path(__file__).parents[4] / "recipes"))
import image_classification

TINY = "hidden_size=16,num_hidden_layers=2,num_attention_heads=2,intermediate_size=32,patch_size=8"
FLAGS = ["--model_type", "vit", "--config_overrides", TINY, "--global_batch_size", "8", "--micro_batch_size", "2"]
FLAGS += ["--max_steps", str(NUM_STEPS), "--logging_steps", "3", "--eval_steps", "100", "--report_to", "none"]
DIGITS = sklearn.datasets.load_digits()
NUM_DIGITS = 120  # so that a life is short


def train_recipe(run: Run, log: Log) -> dict[str, Any]:
    """Train to the end, from wherever the last life got to; what is left at the end."""
    _log_steps(log)
    _take_few_digits()
    folder = run.folder / "run"
    saving = ["--save_every", str(run.every_steps)] if run.every_steps else []
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        results = image_classification.main([*FLAGS, *saving, "--resume", "--output_dir", str(folder)])
    weights = hashlib.sha256((folder / "final" / "model.safetensors").read_bytes()).hexdigest()
    return {"weights": weights, "eval": results["eval"], "train_loss": results["train_loss"]}


def _take_few_digits() -> None:
    few = {name: DIGITS[name][:NUM_DIGITS] for name in ("images", "target")}
    sklearn.datasets.load_digits = lambda: sklearn.utils.Bunch(**{**DIGITS, **few})


def _log_steps(log: Log) -> None:
    """Where a life goes on, and what each step trained."""
    count, resume = RunReport.count, Checkpoints.resume

    @functools.wraps(count)
    def count_and_tell(self: RunReport, batch: Any, *args: Any) -> None:
        count(self, batch, *args)
        samples = digest([dict(sorted(micro_batch.items())) for micro_batch in batch.micro_batches])
        log.write(step=batch.step, loss=float(batch.loss).hex(), samples=samples)

    @functools.wraps(resume)
    def resume_and_tell(self: Checkpoints) -> Any:
        resumed = resume(self)
        log.write(resumed=resumed.step if resumed else 0)
        return resumed

    RunReport.count, Checkpoints.resume = count_and_tell, resume_and_tell
