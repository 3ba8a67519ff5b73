"""A run's beginning and its figures: a row a logging window while it trains, ``results.json`` when it is done.

Keys are those of ``docs/architecture.md``; the part before the ``/`` becomes a section of a dashboard.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from memsave_recipes.measure.clock import StepClock
from memsave_recipes.training.batching import GlobalBatch, GlobalBatches, MeanLoss
from memsave_recipes.training.memory import MemoryWatch
from memsave_recipes.training.run_folder import claim_run_folder, describe_environment, device_name
from memsave_recipes.training.sample_order import Geometry
from memsave_recipes.training.trackers import log_metrics, start_trackers


def begin_run(
    accelerator: Accelerator,
    folder: Path,
    *,
    project: str,
    work: str,
    flags: dict[str, Any],
    strategy: str,
    plan_json: str,
    geometry: Geometry,
) -> None:
    """Claim the run's folder, write its configuration and start its trackers: what a run does last before it trains.

    Args:
        project: where dashboards keep the runs of a recipe.
        work: what is trained, such as ``vgg16-gbs64-224px``; runs of the same work are meant to be compared.
        flags: of the command line.
        strategy: the words of the memory plan; with the geometry it is the method, and names the run.
        plan_json: the plan itself.

    Raises:
        InputError: the folder cannot be written.
    """
    config = {**flags, "environment": describe_environment(accelerator)}
    if accelerator.is_main_process:
        claim_run_folder(folder, config, plan_json)
    accelerator.wait_for_everyone()
    device = accelerator.device.type
    batches = f"mbs{geometry.micro_batch_size}x{geometry.accumulation_steps}"
    start_trackers(
        accelerator,
        project=project,
        group=work,
        name=f"{strategy}-{batches}-{geometry.num_processes}{device}",
        tags=[strategy, flags["dtype"], device],
        config=config,
        output_dir=folder,
    )


class RunReport:
    """Counts what the loop does and logs it; all methods are for all ranks.

    Args:
        accelerator: for the ranks and the trackers.
        batches: the steps of the run.
        model, optimizer: as prepared.
    """

    def __init__(
        self, accelerator: Accelerator, batches: GlobalBatches, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.accelerator = accelerator
        self.batches = batches
        self.clock = StepClock()
        self.memory = MemoryWatch(accelerator, model, optimizer, num_steps=batches.steps.stop)
        self.mean_loss = MeanLoss(accelerator)
        self.samples_seen = 0
        self.train_loss = float("nan")

    def count(self, batch: GlobalBatch) -> None:
        """Take in a finished step. Reads nothing from the device."""
        self.mean_loss.add(batch)
        self.clock.step(samples=batch.num_samples)
        self.samples_seen += batch.num_samples

    def log_window(self, step: int, *, learning_rate: float, grad_norm: Tensor) -> str:
        """Log the window that ends with ``step`` (from 1); returns its figures in a few words."""
        self.train_loss = self.mean_loss.end_window()  # waits for the device, so the clock reads true
        perf = self.clock.end_window()
        with self.clock.left_out():
            memory = self.memory.end_window()
            train = {"loss": self.train_loss, "lr": learning_rate, "grad_norm": grad_norm.item()}
            progress = {"epoch": step / self.batches.order.steps_per_epoch, "samples_seen": self.samples_seen}
            sections = {"train": train, "perf": perf, "memory": memory, "progress": progress}
            row = {f"{section}/{key}": value for section, figures in sections.items() for key, value in figures.items()}
            log_metrics(self.accelerator, row, step)
        return _in_words(self.train_loss, perf, memory)

    def log_evaluation(self, step: int, figures: dict[str, float]) -> None:
        """Log an evaluation after ``step``."""
        log_metrics(self.accelerator, {f"eval/{key}": value for key, value in figures.items()}, step)

    def results(self) -> dict[str, Any]:
        """The part of ``results.json`` that every recipe fills alike."""
        geometry = self.batches.geometry
        return {
            "global_batch_size": geometry.global_batch_size,
            "micro_batch_size": geometry.micro_batch_size,
            "accumulation_steps": geometry.accumulation_steps,
            "num_processes": geometry.num_processes,
            "device": device_name(self.accelerator.device),
            "mixed_precision": self.accelerator.mixed_precision,
            "steps": self.batches.steps.stop,
            "samples_seen": self.samples_seen,
            "train_loss": self.train_loss,
            "memory": self.memory.results(),
            "perf": {**self.clock.figures(), "train_time_s": self.clock.train_time_s},
        }


def _in_words(loss: float, perf: dict[str, float], memory: dict[str, float]) -> str:
    parts = [f"loss {loss:.4f}"]
    if "samples_per_sec" in perf:
        parts.append(f"{perf['samples_per_sec']:.0f} samples/s")
    if "peak_allocated_gib" in memory:
        parts.append(f"peak {memory['peak_allocated_gib']:.3f} GiB")
    return ", ".join(parts)
