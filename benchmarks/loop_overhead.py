"""What the loop costs: ours beside a hand-written torch loop, the Hugging Face Trainer and Lightning Fabric.

    python benchmarks/loop_overhead.py          # a model of 20 ms a step and more
    python benchmarks/loop_overhead.py --tiny   # the worst case: hardly any work in a step

All of them train the same vision transformer in the same way: AdamW, linear schedule, clipping, four micro-batches a
step, a logged loss every 10 steps. Each lives in a process of its own and makes one step when it is its turn, in an
order that is drawn anew every round, so that what else the machine does hits all of them alike. A step's time runs from
one optimizer step to the next, loading and logging included, the waiting for turns not. A ratio is that of two steps of
one round; printed is the median over all rounds, and ours is meant to be at most 1.02 where a step takes 20 ms or more.
A second torch loop shows what chance makes of equal ones. A peer that is not installed is left out.

Writes docs/results/loop_overhead.json, or loop_overhead_tiny.json.
"""

import importlib.util
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
from forked import EndStep, Runner
from models import RandomImages, small_vit
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
)

from memsave_recipes.core.step.batch_layout import Batch, BatchLayout, SampleOrder
from memsave_recipes.run.report import RunReport
from memsave_recipes.run.trackers import RunLabels, resolve_trackers, start_trackers
from memsave_recipes.training.batching import GlobalBatch, GlobalBatches
from memsave_recipes.training.launch.start import Accelerator, describe_environment

LOGGING_STEPS, LEARNING_RATE, MAX_GRAD_NORM, SEED = 10, 3e-4, 1.0, 0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every loop does; sizes are those of the vision transformer."""

    hidden_size: int = 96
    num_hidden_layers: int = 4
    patch_size: int = 8
    micro_batch_size: int = 8
    accumulation_steps: int = 4
    num_warmup_steps: int = 10
    num_steps: int = 200

    @property
    def total_steps(self) -> int:
        """Warm-up included."""
        return self.num_warmup_steps + self.num_steps

    @property
    def global_batch_size(self) -> int:
        """Samples of one step."""
        return self.micro_batch_size * self.accumulation_steps

    def make_model(self) -> nn.Module:
        """Always with the same weights."""
        return small_vit(
            hidden_size=self.hidden_size, num_hidden_layers=self.num_hidden_layers, patch_size=self.patch_size
        )

    def make_optimizer(self, model: nn.Module) -> tuple[AdamW, Any]:
        """And its learning-rate schedule."""
        optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        return optimizer, get_scheduler("linear", optimizer, 0, self.total_steps)

    def make_dataset(self) -> Dataset:
        """As many images as all steps train."""
        return RandomImages(self.total_steps * self.global_batch_size)

    def make_loader(self) -> DataLoader:
        """Plain torch, for the loops that take it."""
        pinned = torch.cuda.is_available()
        return DataLoader(self.make_dataset(), batch_size=self.micro_batch_size, shuffle=True, pin_memory=pinned)


WORKS = {
    "loop_overhead": Work(),
    "loop_overhead_tiny": Work(hidden_size=16, num_hidden_layers=1, patch_size=32, micro_batch_size=1, num_steps=400),
}


def torch_loop(work: Work, end_step: EndStep) -> None:
    """The yardstick: what one would write by hand."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = work.make_model().to(device)
    optimizer, scheduler = work.make_optimizer(model)
    micro_batches = iter(work.make_loader())
    loss_sum = torch.zeros((), device=device)
    history = []
    for step in range(work.total_steps):
        for _ in range(work.accumulation_steps):
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(micro_batches).items()}
            logits = model(batch["pixel_values"]).logits
            loss = F.cross_entropy(logits, batch["labels"]) / work.accumulation_steps
            loss.backward()
            loss_sum += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % LOGGING_STEPS == 0:
            history.append(loss_sum.item() / LOGGING_STEPS)
            loss_sum.zero_()
        end_step()


class Training:
    """A model that learns with our batches, and what the loop of the recipes does in a step."""

    def __init__(self, work: Work, accelerator: Accelerator, layout: type[BatchLayout] = BatchLayout) -> None:
        bare, dataset = work.make_model(), work.make_dataset()
        optimizer, self.scheduler = work.make_optimizer(bare)
        self.accelerator = accelerator
        self.model, self.optimizer = accelerator.prepare(bare, optimizer)
        self.batches = GlobalBatches(
            accelerator,
            dataset,
            order=SampleOrder(num_samples=len(dataset), global_batch_size=work.global_batch_size, seed=SEED),
            layout=layout.of(work.global_batch_size, work.micro_batch_size, accelerator.num_processes),
            num_steps=work.total_steps,
            seed=SEED,
        )

    def loss_of(self, micro_batch: Batch) -> Tensor:
        """Summed over its images."""
        return F.cross_entropy(self.model(micro_batch["pixel_values"]).logits, micro_batch["labels"], reduction="sum")

    def step(self, batch: GlobalBatch) -> Tensor:
        """Train it; returns the gradient's norm."""
        for micro_batch in batch.forwards(self.model):
            loss_sum = self.loss_of(micro_batch)
            batch.accelerator.backward(loss_sum, gradient=batch.share_of(loss_sum))
        grad_norm = self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return grad_norm


def our_loop(work: Work, end_step: EndStep) -> None:
    """The loop of recipes/image_classification.py, with all that it measures and writes."""
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(log_with=resolve_trackers(["none"], Path(folder)))
        training = Training(work, accelerator)
        labels = RunLabels(project="", group="", name="", tags=[], config={}, output_dir=Path(folder))
        start_trackers(accelerator, labels)
        report = RunReport(accelerator, training.batches, training.model, training.optimizer)
        for batch in report.clock.loading(training.batches):
            learning_rate = training.scheduler.get_last_lr()[0]
            report.count_flops(batch, training.loss_of)
            with report.measured(batch.step):
                grad_norm = training.step(batch)
            report.count(batch, grad_norm)
            if (batch.step + 1) % LOGGING_STEPS == 0:
                accelerator.log(report.end_window(batch.step + 1, learning_rate=learning_rate)[0], step=batch.step + 1)
            end_step()


def trainer_loop(work: Work, end_step: EndStep) -> None:
    """The Trainer of transformers."""

    class Turns(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            end_step()

    with tempfile.TemporaryDirectory() as folder:
        flags = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=work.micro_batch_size,
            gradient_accumulation_steps=work.accumulation_steps,
            max_steps=work.total_steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="linear",
            max_grad_norm=MAX_GRAD_NORM,
            logging_steps=LOGGING_STEPS,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            remove_unused_columns=False,
        )
        trainer = Trainer(work.make_model(), flags, train_dataset=work.make_dataset(), callbacks=[Turns()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def fabric_loop(work: Work, end_step: EndStep) -> None:
    """Lightning Fabric, as its guide to accumulation and clipping writes the loop."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cuda" if torch.cuda.is_available() else "cpu", devices=1)
    fabric.launch()
    model = work.make_model()
    optimizer, scheduler = work.make_optimizer(model)
    model, optimizer = fabric.setup(model, optimizer)
    micro_batches = iter(fabric.setup_dataloaders(work.make_loader()))
    loss_sum = torch.zeros((), device=fabric.device)
    history = []
    for step in range(work.total_steps):
        for index in range(work.accumulation_steps):
            batch = next(micro_batches)
            with fabric.no_backward_sync(model, enabled=index < work.accumulation_steps - 1):
                logits = model(batch["pixel_values"]).logits
                loss = F.cross_entropy(logits, batch["labels"]) / work.accumulation_steps
                fabric.backward(loss)
            loss_sum += loss.detach()
        fabric.clip_gradients(model, optimizer, max_norm=MAX_GRAD_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % LOGGING_STEPS == 0:
            history.append(loss_sum.item() / LOGGING_STEPS)
            loss_sum.zero_()
        end_step()


LOOPS: dict[str, tuple[Callable[[Work, EndStep], None], str]] = {
    "torch, by hand": (torch_loop, "torch"),
    "the same again": (torch_loop, "torch"),  # how far two equal loops are apart
    "memsave_recipes": (our_loop, "accelerate"),
    "transformers Trainer": (trainer_loop, "transformers"),
    "Lightning Fabric": (fabric_loop, "lightning_fabric"),
}
YARDSTICK = "torch, by hand"


def measure(work: Work, names: list[str]) -> dict[str, list[float]]:
    """The seconds of every step after the warm-up, by loop; those at one place were measured in one round."""
    runners = {name: Runner(partial(LOOPS[name][0], work)) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in harness.turns(names, work.total_steps):
        seconds[name].append(runners[name].step())
    for runner in runners.values():
        runner.close()
    return {name: steps[work.num_warmup_steps :] for name, steps in seconds.items()}


def summarize(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """For every loop its median step and its ratio to the yardstick: the median and the middle half."""
    rows = []
    for name, steps in seconds.items():
        ratio, quartiles = harness.median_and_quartiles(harness.ratios(steps, seconds[YARDSTICK]))
        step_ms = 1000 * statistics.median(steps)
        rows.append({"loop": name, "step_ms": step_ms, "ratio": ratio, "ratio_quartiles": quartiles})
    return rows


def show(rows: list[dict[str, Any]], work: Work, missing: list[str]) -> None:
    """Print the table."""
    cells = []
    for row in rows:
        low, high = row["ratio_quartiles"]
        cells.append([row["loop"], f"{row['step_ms']:.2f} ms", f"{row['ratio']:.3f}", f"{low:.3f} to {high:.3f}"])
    title = f"{work.num_steps} steps of {work.accumulation_steps} x {work.micro_batch_size} images"
    headings = ("loop", "median step", "ratio to torch", "middle half")
    harness.show(headings, cells, *(f"{name} is not installed." for name in missing), title=title)


def main() -> None:
    """Measure all loops that are installed."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="hardly any work in a step")
    flags = harness.read_flags(parser, None)
    name = "loop_overhead_tiny" if flags.tiny or flags.quick else "loop_overhead"
    work = replace(WORKS[name], num_steps=10, num_warmup_steps=2) if flags.quick else WORKS[name]
    installed = [loop for loop, (_, module) in LOOPS.items() if importlib.util.find_spec(module)]
    missing = [loop for loop in LOOPS if loop not in installed]
    rows = summarize(measure(work, installed))
    show(rows, work, missing)
    environment = describe_environment(Accelerator())
    if "Lightning Fabric" in installed:
        environment["versions"]["lightning"] = version("lightning")
    environment["num_cpus"] = os.cpu_count()
    content = {"work": asdict(work), "loops": rows, "not_installed": missing, "environment": environment}
    harness.write_results(flags.output_dir, name, content)


if __name__ == "__main__":
    main()
