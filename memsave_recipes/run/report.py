"""A run's figures: a row a logging window while it trains, ``results.json`` and the model card when it is done.

Keys are those of ``docs/measuring.md``. The card is ``final/README.md`` in the Hub's format; as it is made to be
shared, it has the last names of local paths alone.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Template
from torch import Tensor, nn

from memsave_recipes.core.costs.memory import is_out_of_memory
from memsave_recipes.core.costs.preserve_state import freeing_gradients, preserve_state
from memsave_recipes.core.costs.throughput import ModelFlops, utilization_pct
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import plan_for
from memsave_recipes.core.step.batch_layout import Batch
from memsave_recipes.core.text import printable
from memsave_recipes.run.clock import StepClock
from memsave_recipes.run.memory_watch import MemoryWatch, largest_in_gib
from memsave_recipes.run.run_plan import RunPlan
from memsave_recipes.run.trackers import sync_rows, tracker_ids
from memsave_recipes.training.batching import GlobalBatch, GlobalBatches
from memsave_recipes.training.launch.start import device_name
from memsave_recipes.training.optimizers import NotFinite, StepLosses, gather_figures

COUNTED = ("samples_seen", "train_loss", "evaluated", "evaluated_at", "best_figure")
"""The attributes of a ``RunReport`` that a checkpoint keeps as they are."""
UNPLANNED = RunPlan(plan_for("none", ()))
LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte", "mse")


def scalars_of(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of an evaluation that are single values, not of each class."""
    return {name: value for name, value in figures.items() if not isinstance(value, dict | list)}


def _is_nan(figure: Any) -> bool:
    return isinstance(figure, float) and isnan(figure)


def checked_state(state: Any) -> Any:
    """Return a record of ``RunReport.state_dict``, also of an earlier version, which knew the lowest loss alone.

    Raises:
        InputError: something is missing, or is of another kind.
    """
    if isinstance(state, dict) and "best_loss" in state:
        lowest = state["best_loss"]
        state = {**state, "best_figure": None if lowest == inf else lowest}
    match state:
        case {
            "samples_seen": int(),
            "tokens_seen": int(),
            "train_loss": float(),
            "evaluated": dict(),
            "evaluated_at": int() | None,
            "best_figure": float() | None,
            "losses": dict(),
            "clock": dict(),
            "trackers": {"name": str()},
        }:
            return state
    raise InputError(
        "--resume: the record of the checkpoint is not what a run saves: put it back, or start again with --overwrite"
    )


class RunReport:
    """Counts what the loop does and logs it; all methods are for all ranks.

    Args:
        model, optimizer: as prepared.
        planned: the plan of the run.
        name: in dashboards.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        batches: GlobalBatches,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        planned: RunPlan = UNPLANNED,
        name: str = "",
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.batches = batches
        self.device = device_name(accelerator.device)
        self.memory = MemoryWatch(accelerator, model, optimizer, batches, planned)
        self.name = name
        self.clock = StepClock(warmup_steps=self.memory.num_slow_steps, device=accelerator.device)
        self.flops_per_sample: dict[str, float] = {}  # by precision
        self.losses = StepLosses(accelerator, batches.order, exact=batches.layout.is_bitwise)
        self.samples_seen = 0
        self.tokens_seen: Tensor | int = 0
        self.train_loss = float("nan")
        self.evaluated: dict[str, Any] = {}
        self.evaluated_at: int | None = None
        self.best_figure: float | None = None

    def count_flops(self, batch: GlobalBatch, loss_of: Callable[[Batch], Tensor]) -> None:
        """Count the model's FLOPs once, on the first micro-batch of the run, before it is trained on.

        Under a ``TorchDispatchMode``, as the counter is, torch takes other kernels, with other last bits. So it counts
        a forward and a backward of its own, of which nothing stays. A run of one step has no figure that needs it.

        Args:
            loss_of: the summed loss of a micro-batch, as in training.
        """
        if batch.step != self.batches.steps.start or len(self.batches) == 1:
            return
        try:
            with self.clock.paused(), preserve_state(self.model, self.accelerator.device), ModelFlops() as counted:
                self._forward_and_backward(batch.micro_batches[0], loss_of)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return  # the training step will find no memory either, and explain it
        samples = self._samples_in_first_micro_batch(batch.step) / self.batches.layout.sequence_parallel
        self.flops_per_sample = {precision: flops / samples for precision, flops in counted.by_precision.items()}

    @contextmanager
    def measured(self, step: int) -> Iterator[None]:
        """Measure the memory of the training step ``step`` (from 0) inside.

        Raises:
            torch.OutOfMemoryError: there is no memory left; its message is a page that explains it.
        """
        with self.memory.measured(step):
            yield
        with self.clock.paused():
            self.memory.end_step(step)

    def count(self, batch: GlobalBatch, grad_norm: Tensor | None = None) -> None:
        """Take in a finished step. Reads nothing from the device."""
        self.losses.add(batch, grad_norm)
        tokens = batch.num_valid if self.batches.count_valid else 0
        self.clock.step(samples=batch.num_samples, tokens=tokens)
        self.samples_seen += batch.num_samples
        self.tokens_seen = self.tokens_seen + tokens

    def end_window(self, step: int, *, learning_rate: float) -> tuple[dict[str, Any], str]:
        """Return the figures of the window that ends with ``step`` (from 1), and some of them in words.

        Raises:
            NotFinite: one of its steps is not finite.
        """
        losses = self.losses.parts()  # waits for the device, so the clock reads true
        perf = self.clock.end_window()
        with self.clock.paused():
            perf |= self._utilization(perf)
            of_ranks = gather_figures(self.accelerator, {**losses, **self.memory.end_window()})
            self.losses.take_in({name: of_ranks.pop(name) for name in losses})
            self.train_loss = self.losses.end_window()
            memory = largest_in_gib(of_ranks) | self.memory.prediction(max(of_ranks.get("peak_allocated", [0])))
            train = {"loss": self.train_loss, "lr": learning_rate}
            if self.losses.grad_norm is not None:
                train["grad_norm"] = self.losses.grad_norm
            progress = {"epoch": step / self.batches.order.steps_per_epoch, **self._seen()}
            sections = {"train": train, "perf": perf, "memory": memory, "progress": progress}
            row = {f"{section}/{key}": value for section, figures in sections.items() for key, value in figures.items()}
        return row, _in_words(self.train_loss, perf, memory)

    def evaluation_is_due(self, step: int, *, every: int | None) -> bool:
        """Return whether one is to follow ``step``: after ``every`` steps or each epoch, and the last; never twice."""
        is_time = step % (every or self.batches.order.steps_per_epoch) == 0 or step == self.batches.steps.stop
        return is_time and step != self.evaluated_at

    def log_evaluation(self, step: int, figures: dict[str, Any], *, metric: str) -> bool:
        """Log an evaluation after ``step``, but not those of each class; return whether it is the best by ``metric``.

        Figures that are NaN, which is never better, are left out; the loss has to be finite.

        Raises:
            NotFinite: its loss is not finite.
        """
        figures = {name: figure for name, figure in figures.items() if name == "loss" or not _is_nan(figure)}
        self.accelerator.log({f"eval/{key}": value for key, value in scalars_of(figures).items()}, step=step)
        if not isfinite(figures["loss"]):
            raise NotFinite(
                f"the evaluation after step {step} is not finite (loss {figures['loss']:g}), although the steps were: "
                "lower --learning_rate and --weight_decay, or look at the held-out data"
            )
        self.evaluated, self.evaluated_at = figures, step
        sign = -1 if metric in LOWER_IS_BETTER else 1
        before = -sign * inf if self.best_figure is None else self.best_figure
        gain: float = sign * (figures.get(metric, nan) - before)
        if gain > 0:
            self.best_figure = figures[metric]
        return gain > 0

    def state_dict(self) -> dict[str, Any]:
        """Bring the rows so far to the disk, and return what a resumed run has to know, in plain values.

        Raises:
            NotFinite: a step is not finite.
        """
        self.clock.synchronize()  # waits for the device follow, in time that does not count
        return {
            **{name: getattr(self, name) for name in COUNTED},
            "tokens_seen": int(self.tokens_seen),
            "losses": self.losses.state_dict(),
            "clock": self.clock.state_dict(),
            "num_rows": sync_rows(self.accelerator),
            "trackers": {"name": self.name, **tracker_ids(self.accelerator)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts of ``state_dict``."""
        state = checked_state(state)
        for name in (*COUNTED, "tokens_seen"):
            setattr(self, name, state[name])
        self.losses.load_state_dict(state["losses"])
        self.clock.load_state_dict(state["clock"])

    def results(self) -> dict[str, Any]:
        """Return what ``results.json`` has of every recipe; of a training, its figures as well."""
        layout = self.batches.layout
        results = {
            "global_batch_size": layout.global_batch_size,
            "micro_batch_size": layout.micro_batch_size,
            "accumulation_steps": layout.accumulation_steps,
            "num_processes": layout.num_processes,
            "device": self.device,
            "mixed_precision": self.accelerator.mixed_precision,
            "steps": self.batches.steps.stop,
            **self._seen(),
        }
        if not self.batches.steps.stop:
            return results
        perf = self.clock.figures()
        perf |= self._utilization(perf) | {"train_time_s": self.clock.train_time_s}
        if model_flops := sum(self.flops_per_sample.values()):
            perf["model_gflops_per_sample"] = model_flops / 1e9
        memory = self.memory.results(gather_figures(self.accelerator, self.memory.end_run()))
        return results | {"train_loss": self.train_loss, "memory": memory, "perf": perf}

    def _forward_and_backward(self, micro_batch: Batch, loss_of: Callable[[Batch], Tensor]) -> None:
        """Run both; DDP does not reduce, by its forward, and shards leave no gradient unreduced, by their backward."""
        with self.accelerator.no_sync(self.model):
            loss = loss_of(self.batches.outside_of_steps(micro_batch))
        with freeing_gradients(self.model.parameters()):  # all of them may take more memory than a step has
            loss.backward()

    def _samples_in_first_micro_batch(self, step: int) -> int:
        """Return the samples of this rank; at least one, as a padding sample fills an empty micro-batch."""
        shares = self.batches.layout.micro_batches(self.batches.order.num_samples_in(step))
        return max(1, len(shares[self.accelerator.process_index][0]))

    def _utilization(self, perf: dict[str, float]) -> dict[str, float]:
        """Return the model FLOPs utilisation, where the samples per second and the device's peak are known."""
        samples_per_sec = perf.get("samples_per_sec", 0) / self.accelerator.num_processes
        flops_per_sec = {precision: flops * samples_per_sec for precision, flops in self.flops_per_sample.items()}
        percentage = utilization_pct(flops_per_sec, self.device)
        return {} if percentage is None else {"mfu_pct": percentage}

    def _seen(self) -> dict[str, int]:
        tokens = {"tokens_seen": int(self.tokens_seen)} if self.batches.count_valid else {}
        return {"samples_seen": self.samples_seen, **tokens}


def _in_words(loss: float, perf: dict[str, float], memory: dict[str, float]) -> str:
    parts = [f"loss {loss:.4f}"]
    if "tokens_per_sec" in perf:
        parts.append(f"{perf['tokens_per_sec']:,.0f} tokens/s")
    elif "samples_per_sec" in perf:
        parts.append(f"{perf['samples_per_sec']:.0f} samples/s")
    if "peak_allocated_gib" in memory:
        parts.append(f"peak {memory['peak_allocated_gib']:.3f} GiB")
    return ", ".join(parts)


LIBRARY = "memsave-recipes"
PIPELINES = {
    "image_classification": "image-classification",
    "language_modeling": "text-generation",
    "image_text": "image-text-to-text",
    "text_classification": "text-classification",
}
"""Tasks of the Hub, by recipe."""
METRICS = (
    *("accuracy", "f1", "f1_macro", "f1_micro", "top5_accuracy", "mse", "pearson", "spearmanr", "loss", "perplexity"),
    *("bits_per_byte", "exact_match"),
)


def write_model_card(
    folder: Path, model: nn.Module, flags: dict[str, Any], results: dict[str, Any], **facts: Any
) -> None:
    """Write ``README.md`` by ``model_card.md`` into ``folder``, in place of peft's empty one.

    Args:
        model: of transformers, peft or torch.
        results: ``results.json`` as far as it is known before ``final/`` is written.
        facts: ``steps``, the optimizer steps that were trained, none with ``--eval_only``; ``batch``, the layout of a
            global batch in words; ``versions`` of the packages, by name; ``mixed_precision``.
    """
    base: str = flags.get("model_name_or_path") or ""
    is_local = os.path.exists(base)
    name, before = shown(base) if is_local else results["model"], base or flags.get("weights")
    metadata = _metadata(model, flags, results, name, None if is_local else base or None)
    text = resources.files("memsave_recipes.run").joinpath("model_card.md").read_text(encoding="utf-8")
    content = Template(text, trim_blocks=True, keep_trailing_newline=True).render(
        metadata=metadata.to_yaml(),
        name=name,
        data=_data(flags),
        origin=f"`{shown(before)}`" if before else "random weights",
        flags=flags,
        results=results,
        **facts,
    )
    ModelCard(content, ignore_metadata_errors=True).save(folder / "README.md")


def shown(name_or_path: str) -> str:
    """Return a Hub id as it is, and of a local path the last name, with the folder of the run before ``final``."""
    path = Path(name_or_path)
    if not os.path.exists(path):
        return printable(name_or_path)
    path = path.resolve()
    return printable(f"{path.parent.name}/{path.name}" if path.name == "final" else path.name)


def _data(flags: dict[str, Any]) -> str:
    """Return the data sets, folders or files."""
    named = flags.get("dataset") or flags.get("data_dir") or flags.get("train_file") or "own data"
    names = [shown(name) for name in ([named] if isinstance(named, str) else named)]
    return ", ".join(filter(None, [*names, flags.get("dataset_config_name")]))


def _metadata(
    model: nn.Module, flags: dict[str, Any], results: dict[str, Any], name: str, base: str | None
) -> ModelCardData:
    dataset, data, pipeline = flags.get("dataset") or "", _data(flags), PIPELINES.get(results["recipe"])
    library = "transformers" if hasattr(model, "save_pretrained") else LIBRARY
    evaluated = [
        EvalResult(pipeline or "other", dataset_type=data, dataset_name=data, metric_type=name, metric_value=value)
        for name, value in results["eval"].items()
        if name in METRICS
    ]
    return ModelCardData(
        model_name=name,
        library_name="peft" if hasattr(model, "peft_config") else library,
        pipeline_tag=pipeline,
        base_model=base,
        datasets=[dataset] if "/" in dataset and not os.path.exists(dataset) else None,
        tags=[LIBRARY],
        eval_results=evaluated or None,
    )
