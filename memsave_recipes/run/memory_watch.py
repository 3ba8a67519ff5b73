"""The memory of this rank in the first steps of a run, and the page of a step that ran out of it.

The first full step counts the bytes that the forward of its first micro-batch saves for backward; under a plan that
compiles, the memory of compiling counts in no figure. The second one is recorded, allocation by allocation: the
optimizer's state is there, so its peak is that of every later step. On a CPU, which has no allocator statistics, that
is the peak of the run. The clock starts after it. ``docs/measuring.md`` says more.

The page says what filled the memory, and which flags free how much. It allocates nothing on the full device: it uses
earlier measurements and the shapes of existing tensors.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from memsave_recipes.core.activations.blocks import Block, Layer
from memsave_recipes.core.costs.breakdown import MemoryBreakdown, break_down_peak, persistent_tensors
from memsave_recipes.core.costs.memory import (
    ForwardMeter,
    is_out_of_memory,
    peak_rss_bytes,
    read_device_memory,
    read_device_use,
    rss_bytes,
    write_snapshot,
)
from memsave_recipes.core.plans import plan_for
from memsave_recipes.core.sharding import is_sharded
from memsave_recipes.core.step.batch_layout import SampleOrder
from memsave_recipes.core.text import format_bytes, spaced, to_gib
from memsave_recipes.run.run_plan import RunPlan
from memsave_recipes.tools.fit.savings import Saving, Setup, savings_of
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.launch.start import device_name

UNPLANNED = RunPlan(plan_for("none", ()))
VIEWER = "https://pytorch.org/memory_viz"
HEADLINE_OF_SAVINGS = "what to change, how much it can free at the peak of a step, and the loss curve then:"
NO_SAVINGS_IN_SHARDS = (
    "what to change: a smaller --micro_batch_size, --activation_checkpointing full, or more ranks; how much that frees "
    "is not computed for weights in shards"
)


COUNTS = ("num_alloc_retries", "num_ooms")  # the figures that are no bytes
BREAKDOWN = "breakdown of "


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a run.

    Args:
        flags: all flags of the recipe, with their values.
        blocks: those of its plan.
        name: in dashboards.
    """

    folder: Path
    flags: dict[str, Any]
    planned: RunPlan = UNPLANNED
    blocks: Sequence[Block | Layer] = ()
    name: str = ""

    def snapshot_path(self, rank: int) -> Path:
        """Return the file for the allocator snapshot of a rank."""
        return self.folder / (f"memory_snapshot-rank{rank}.pickle" if rank else "memory_snapshot.pickle")


class MemoryWatch:
    """Measures the memory of this rank.

    Args:
        model, optimizer: as prepared.
        settings: without them the out-of-memory page names no flags.
        average: tensors that count as the optimizer's state.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: GlobalBatches,
        settings: RunSettings | None,
        average: Sequence[Tensor] = (),
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper has no hooks
        self.steps, self.layout = batches.steps, batches.layout
        self.metered_step, self.instrumented_step = full_steps(batches.steps, batches.order)
        self.settings = settings or RunSettings(folder=Path(), flags={})
        self.average = average
        self.on_cpu = accelerator.device.type == "cpu"
        self.planned = self.settings.planned
        self.forward_meter = ForwardMeter(model, self.settings.blocks)
        self.breakdown: MemoryBreakdown | None = None
        self.figures: dict[str, int] = {}  # the largest so far, in bytes
        if not self.on_cpu:
            torch.accelerator.reset_peak_memory_stats(accelerator.device)

    @property
    def num_slow_steps(self) -> int:
        """The number of steps at the start that do not show the speed of the run."""
        return max(2, self.instrumented_step + 1 - self.steps.start)

    @contextmanager
    def measured(self, step: int) -> Iterator[None]:
        """Measure the training step ``step`` inside, if it is one of ``full_steps``.

        Raises:
            torch.OutOfMemoryError: there is no memory left; its message is the page that explains it.
        """
        try:
            with ExitStack() as observers:
                if step == self.metered_step:
                    observers.enter_context(self.forward_meter)
                if step == self.instrumented_step:
                    observers.enter_context(self._recorded())
                yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise torch.OutOfMemoryError(page_of(self, step, error)) from error
            raise

    def end_step(self, step: int) -> None:
        """Forget the peak of a step that compiles."""
        compiles = self.planned.plan.compiled_memory_ratio is not None
        if compiles and step < self.instrumented_step and not self.on_cpu:
            torch.accelerator.reset_peak_memory_stats(self.accelerator.device)

    def end_window(self) -> dict[str, int]:
        """Return bytes and counts of this rank for a logging window that ends now."""
        window = {"host_rss": rss_bytes()}
        if not self.on_cpu:
            return window | self._read_device()
        if "peak_allocated" in self.figures:
            window["peak_allocated"] = self.figures["peak_allocated"]
        return window

    def end_run(self) -> dict[str, int]:
        """Return the bytes of this rank for the whole run."""
        if not self.on_cpu:
            self._read_device()
        parts = {} if self.breakdown is None else vars(self.breakdown)
        return {
            **self.figures,
            "saved_for_backward": self.forward_meter.num_bytes,
            "host_peak_rss": peak_rss_bytes(),
            **{BREAKDOWN + name.removesuffix("_bytes"): size for name, size in parts.items()},
        }

    def results(self, of_ranks: dict[str, list[float]]) -> dict[str, Any]:
        """Return the ``memory`` entry of ``results.json`` from the figures of ``end_run`` on every rank."""
        figures = {name: ranks for name, ranks in of_ranks.items() if not name.startswith(BREAKDOWN)}
        peaks = of_ranks.get("peak_allocated", [0])
        hungriest = peaks.index(max(peaks))
        parts = {name: ranks[hungriest] for name, ranks in of_ranks.items() if name.startswith(BREAKDOWN)}
        return {
            **largest_in_gib(figures),
            **self.prediction(max(peaks)),
            "peak_rank": hungriest,
            "breakdown": {f"{name.removeprefix(BREAKDOWN)}_gib": to_gib(int(size)) for name, size in parts.items()},
            "instrumented_step": self.instrumented_step + 1,
            "source": "allocations of one instrumented step" if self.on_cpu else "device allocator",
        }

    def prediction(self, peak_bytes: float) -> dict[str, float]:
        """Return the predicted peak with its error against that of a step, and the predicted memory of the host."""
        predicted, on_host = self.planned.predicted_peak_bytes, self.planned.predicted_host_bytes
        found = {"predicted_host_gib": to_gib(on_host)} if on_host else {}
        if predicted is None or not peak_bytes:
            return found
        error = 100 * (predicted - peak_bytes) / peak_bytes
        return {**found, "predicted_peak_gib": to_gib(predicted), "prediction_error_pct": error}

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        with break_down_peak(self.model, self.optimizer, self.accelerator.device, self.average) as peak:
            yield
        self.breakdown = peak.breakdown
        if self.on_cpu and peak.breakdown is not None:
            self._keep_largest("peak_allocated", peak.breakdown.total_bytes)

    def _read_device(self) -> dict[str, int]:
        device = read_device_memory(self.accelerator.device)
        torch.accelerator.reset_peak_memory_stats(self.accelerator.device)
        window = {name.removesuffix("_bytes"): value for name, value in vars(device).items()}
        for name, value in window.items():  # in one order on all ranks, which gather them by place
            if name not in COUNTS:
                self._keep_largest(name, value)
        return window

    def _keep_largest(self, name: str, num_bytes: int) -> None:
        self.figures[name] = max(self.figures.get(name, 0), num_bytes)


def full_steps(steps: range, order: SampleOrder) -> tuple[int, int]:
    """Return the first step with as many samples as any, and the next one, or the same where there is none."""
    first = max(steps[: order.steps_per_epoch], key=order.num_samples_in, default=steps.start)
    later = (step for step in steps if step > first and order.num_samples_in(step) == order.num_samples_in(first))
    return first, next(later, first)


def largest_in_gib(of_ranks: dict[str, list[float]]) -> dict[str, float]:
    """Return the largest of every figure over the ranks: bytes in GiB, counts as they are."""
    largest = {name: int(max(ranks)) for name, ranks in of_ranks.items()}
    counts = {name: largest.pop(name) for name in COUNTS if name in largest}
    return {**{f"{name}_gib": to_gib(num_bytes) for name, num_bytes in largest.items()}, **counts}


def page_of(watch: MemoryWatch, step: int, error: RuntimeError) -> str:
    """Return the page of a step, counted from 0, that ran out of memory."""
    accelerator, parts, savings = watch.accelerator, _parts(watch), _savings(watch)
    held_bytes = read_device_use(accelerator.device).others_bytes
    rows = [(name, format_bytes(size), "") for name, size in parts.items()]
    rows.append(("together", format_bytes(sum(parts.values())), ""))
    advice = [
        (one.flags, "not known" if one.freed_bytes is None else format_bytes(one.freed_bytes), one.curve)
        for one in savings
    ]
    width = max(len(name) for name, _, _ in [*rows, *advice])
    where = f"rank {accelerator.process_index} of {accelerator.num_processes} ({device_name(accelerator.device)})"
    when = "as far as it had come" if watch.breakdown is None else "at the peak of an earlier step, measured"
    return "\n".join(
        [
            f"out of memory in step {step + 1} on {where}",
            f"  {str(error).strip().splitlines()[0]}",
            *([f"  other processes hold {format_bytes(held_bytes)} of this device"] if held_bytes else []),
            f"what filled it, {when}:",
            *_table(rows, width),
            NO_SAVINGS_IN_SHARDS if is_sharded(watch.model) else HEADLINE_OF_SAVINGS,
            *_table(advice, width),
            snapshot_line(watch),
        ]
    )


def _parts(watch: MemoryWatch) -> dict[str, int]:
    """Return the bytes by kind: as measured, or computed now."""
    if watch.breakdown is not None:
        return {spaced(name.removesuffix("_bytes")): size for name, size in vars(watch.breakdown).items()}
    stays = persistent_tensors(watch.model, watch.optimizer, watch.average)
    parts = {spaced(label.use.value): sum(label.storages.values()) for label in stays}
    if watch.on_cpu:
        return {**parts, "saved for the backward": watch.forward_meter.num_bytes}
    peak = torch.accelerator.max_memory_allocated(watch.accelerator.device)
    return {**parts, "activations and temporaries": max(0, peak - sum(parts.values()))}


def _savings(watch: MemoryWatch) -> list[Saving]:
    """Return the flags that would help, where that can be computed."""
    if is_sharded(watch.model):
        return []
    measured, meter = watch.breakdown, watch.forward_meter
    activations = meter.num_bytes if measured is None else measured.activations_bytes
    return savings_of(
        Setup(
            flags=watch.settings.flags,
            layout=watch.layout,
            model=watch.model,
            mixed_precision=watch.accelerator.mixed_precision,
            activations_bytes=activations or None,  # 0: it ended before anything was saved
            freed_by_recomputation_bytes=meter.freed_by_recomputation_bytes,
            device_type=watch.accelerator.device.type,
        )
    )


def snapshot_line(watch: MemoryWatch) -> str:
    """Write the allocator snapshot of a CUDA device; return a sentence with its path, or why there is none."""
    if watch.accelerator.device.type != "cuda":
        return "no allocator snapshot: only CUDA devices have one"
    path = watch.settings.snapshot_path(watch.accelerator.process_index)
    try:
        write_snapshot(path)
    except (OSError, RuntimeError) as error:  # the page matters more
        return f"no allocator snapshot: {error}"
    return f"the allocator's state is in {path}: open it at {VIEWER}"


def _table(rows: list[tuple[str, str, str]], width: int) -> list[str]:
    return [f"  {name:<{width}}  {figure:>9}  {remark}".rstrip() for name, figure, remark in rows]
