"""A run's beginning and its figures: a row a logging window while it trains, ``results.json`` when it is done.

Keys are those of ``docs/architecture.md``; the part before the ``/`` becomes a section of a dashboard.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from memsave_recipes.errors import InputError
from memsave_recipes.measure.clock import StepClock
from memsave_recipes.measure.flops import ModelFlops
from memsave_recipes.measure.peak_flops import utilization_pct
from memsave_recipes.planner.run_plan import RunPlan
from memsave_recipes.reporting.memory import MemoryWatch, largest_in_gib
from memsave_recipes.reporting.out_of_memory import RunSettings
from memsave_recipes.reporting.run_folder import claim_run_folder, describe_environment, device_name
from memsave_recipes.reporting.trackers import log_metrics, start_trackers
from memsave_recipes.training.batching import GlobalBatch, GlobalBatches
from memsave_recipes.training.sample_order import Geometry


def begin_run(
    accelerator: Accelerator,
    folder: Path,
    *,
    project: str,
    work: str,
    flags: dict[str, Any],
    planned: RunPlan,
    geometry: Geometry,
) -> RunSettings:
    """Claim the run's folder, write its configuration and start its trackers: what a run does last before it trains.

    Args:
        project: where dashboards keep the runs of a recipe.
        work: what is trained, such as ``vgg16-gbs64-224px``; runs of the same work are meant to be compared.
        flags: of the command line.
        planned: the memory plan. Its strategy's words and the geometry are the method, and name the run.

    Returns:
        What ``RunReport`` wants to know of it.

    Raises:
        InputError: the folder cannot be written, or this device cannot do what a flag asks for.
    """
    if flags.get("memory_snapshot") and accelerator.device.type != "cuda":
        raise InputError(f"--memory_snapshot needs a CUDA device and this is {accelerator.device.type}: leave it out")
    sizes = {**asdict(geometry), "accumulation_steps": geometry.accumulation_steps}
    plan = planned.plan
    about = {"plan": json.loads(plan.to_json()), "geometry": sizes, "environment": describe_environment(accelerator)}
    config = {**flags, **about}
    if accelerator.is_main_process:
        claim_run_folder(folder, config, plan.to_json())
    accelerator.wait_for_everyone()
    device = "gpu" if accelerator.device.type == "cuda" else accelerator.device.type
    batches = f"mbs{geometry.micro_batch_size}x{geometry.accumulation_steps}"
    start_trackers(
        accelerator,
        project=project,
        group=work,
        name=f"{plan.strategy}-{batches}-{geometry.num_processes}{device}",
        tags=[plan.strategy, flags["dtype"], device],
        config=config,
        output_dir=folder,
    )
    return RunSettings(
        folder=folder,
        flags=flags,
        blocks=plan.blocks,
        compiles=not plan.is_bitwise,
        predicted_peak_bytes=planned.predicted_peak_bytes,
    )


class RunReport:
    """Counts what the loop does and logs it; all methods are for all ranks.

    Args:
        accelerator: for the ranks and the trackers.
        batches: the steps of the run.
        model, optimizer: as prepared.
        settings: what ``begin_run`` returned; without it nobody is told which flags would free memory.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        batches: GlobalBatches,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: RunSettings | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.batches = batches
        self.device = device_name(accelerator.device)
        self.memory = MemoryWatch(
            accelerator, model, optimizer, steps=batches.steps, geometry=batches.geometry, settings=settings
        )
        self.clock = StepClock(warmup_steps=self.memory.num_slow_steps)
        self.flops_per_sample: dict[str, float] = {}  # by precision
        self.losses: list[Tensor] = []  # this rank's parts, since the last window
        self.samples_seen = 0
        self.tokens_seen: Tensor | int = 0
        self.train_loss = float("nan")

    def run(self, step: int, train_step: Callable[[], Any]) -> Any:
        """``train_step()``, with all that is measured in it: the memory, and in the first one the model's FLOPs.

        A run of one step has no figure that needs the FLOPs.

        Raises:
            torch.OutOfMemoryError: there is no memory left; its message is a page that explains it.
        """
        if step == self.batches.steps.start and len(self.batches) > 1:
            result = self._run_counted(step, train_step)
        else:
            result = self.memory.run(step, train_step)
        with self.clock.left_out():
            self.memory.end_step(step)
        return result

    def count(self, batch: GlobalBatch) -> None:
        """Take in a finished step. Reads nothing from the device."""
        self.losses.append(torch.as_tensor(batch.loss))
        tokens = batch.num_valid if self.batches.count_valid else 0
        self.clock.step(samples=batch.num_samples, tokens=tokens)
        self.samples_seen += batch.num_samples
        self.tokens_seen = self.tokens_seen + tokens

    def log_window(self, step: int, *, learning_rate: float, grad_norm: Tensor | None) -> str:
        """Log the window that ends with ``step`` (from 1); returns its figures in a few words."""
        part_of_loss = torch.stack(self.losses).mean().item()  # waits for the device, so the clock reads true
        self.losses = []
        perf = self.clock.end_window()
        with self.clock.left_out():
            perf |= self._utilization(perf)
            of_ranks = gather_figures(self.accelerator, {"loss": part_of_loss, **self.memory.end_window()})
            self.train_loss = sum(of_ranks.pop("loss"))
            memory = largest_in_gib(of_ranks)
            train = {"loss": self.train_loss, "lr": learning_rate}
            if grad_norm is not None:
                train["grad_norm"] = grad_norm.item()
            progress = {"epoch": step / self.batches.order.steps_per_epoch, **self._seen()}
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
        perf = self.clock.figures()
        perf |= self._utilization(perf) | self._model_flops() | {"train_time_s": self.clock.train_time_s}
        return {
            "global_batch_size": geometry.global_batch_size,
            "micro_batch_size": geometry.micro_batch_size,
            "accumulation_steps": geometry.accumulation_steps,
            "num_processes": geometry.num_processes,
            "device": self.device,
            "mixed_precision": self.accelerator.mixed_precision,
            "steps": self.batches.steps.stop,
            **self._seen(),
            "train_loss": self.train_loss,
            "memory": self.memory.results(gather_figures(self.accelerator, self.memory.end_run())),
            "perf": perf,
        }

    def _run_counted(self, step: int, train_step: Callable[[], Any]) -> Any:
        with ModelFlops() as counted:
            result = self.memory.run(step, train_step)
        samples = self._samples_computed_in(step)
        self.flops_per_sample = {precision: flops / samples for precision, flops in counted.by_precision.items()}
        return result

    def _model_flops(self) -> dict[str, float]:
        total = sum(self.flops_per_sample.values())
        return {"model_gflops_per_sample": total / 1e9} if total else {}

    def _samples_computed_in(self, step: int) -> int:
        """By this rank; where its share has run out, a padding sample stands in."""
        shares = self.batches.geometry.micro_batches(self.batches.order.num_samples_in(step))
        return sum(max(1, len(micro_batch)) for micro_batch in shares[self.accelerator.process_index])

    def _utilization(self, perf: dict[str, float]) -> dict[str, float]:
        """The model FLOPs utilisation, where the samples per second and the device's peak are known."""
        samples_per_sec = perf.get("samples_per_sec", 0) / self.accelerator.num_processes
        flops_per_sec = {precision: flops * samples_per_sec for precision, flops in self.flops_per_sample.items()}
        percentage = utilization_pct(flops_per_sec, self.device)
        return {} if percentage is None else {"mfu_pct": percentage}

    def _seen(self) -> dict[str, int]:
        tokens = {"tokens_seen": int(self.tokens_seen)} if self.batches.count_valid else {}
        return {"samples_seen": self.samples_seen, **tokens}


def gather_figures(accelerator: Accelerator, figures: Mapping[str, float]) -> dict[str, list[float]]:
    """Every figure of every rank, in one collective; all ranks must have the same. Whole numbers are exact to 2^53."""
    device = accelerator.device if accelerator.num_processes > 1 else "cpu"
    values = torch.tensor([list(figures.values())], dtype=torch.float64, device=device)
    return dict(zip(figures, accelerator.gather(values).T.tolist(), strict=True))


def _in_words(loss: float, perf: dict[str, float], memory: dict[str, float]) -> str:
    parts = [f"loss {loss:.4f}"]
    if "tokens_per_sec" in perf:
        parts.append(f"{perf['tokens_per_sec']:,.0f} tokens/s")
    elif "samples_per_sec" in perf:
        parts.append(f"{perf['samples_per_sec']:.0f} samples/s")
    if "peak_allocated_gib" in memory:
        parts.append(f"peak {memory['peak_allocated_gib']:.3f} GiB")
    return ", ".join(parts)
