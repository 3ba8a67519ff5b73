"""The memory of this rank in the first steps of a run, and the page of a step that ran out of it.

The first full step counts the bytes that the forward of its first micro-batch saves for backward; under a plan that
compiles, the memory of compiling counts in no figure. The second one is recorded, allocation by allocation: the
optimizer's state is there, so its peak is that of every later step. On a CPU, which has no allocator statistics, that
is the peak of the run. The clock starts after it. ``docs/measuring.md`` says more.

The page says what filled the memory. It allocates nothing on the full device: it uses earlier measurements and the
shapes of existing tensors. The planner's advice follows it (``failures.py``).
"""

import resource
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from torch import nn

from memsave_recipes.core.costs.breakdown import MemoryBreakdown, break_down_peak, persistent_tensors
from memsave_recipes.core.costs.memory import SavedTensors, is_out_of_memory, read_device_use
from memsave_recipes.core.step.batch_layout import SampleOrder
from memsave_recipes.core.text import format_bytes, spaced, to_gib
from memsave_recipes.run.run_plan import RunPlan
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.launch.start import device_name

COUNTS = ("num_alloc_retries", "num_ooms")  # the figures that are no bytes
BREAKDOWN = "breakdown of "


def rss_bytes() -> int:
    """Return the resident set size of this process."""
    return psutil.Process().memory_info().rss


def peak_rss_bytes() -> int:
    """Return the most that the resident set of this process has ever been."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024  # getrusage(2): KiB everywhere else


def read_device_memory(device: torch.device) -> dict[str, int]:
    """Read the figures of ``device`` now, without waiting for its queue; the allocator works ahead of it.

    They are the allocator's peaks since the last reset, the bytes that the driver has in use, how often the allocator
    had to empty its cache and try again since the process began, and how often it failed even so.
    """
    statistics = torch.accelerator.memory_stats(device)
    free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
    return {
        "peak_allocated_bytes": statistics.get("allocated_bytes.all.peak", 0),
        "peak_reserved_bytes": statistics.get("reserved_bytes.all.peak", 0),
        "device_used_bytes": total_bytes - free_bytes,
        "num_alloc_retries": statistics.get("num_alloc_retries", 0),
        "num_ooms": statistics.get("num_ooms", 0),
    }


class ForwardMeter:
    """Counts the bytes that the first forward of ``model`` inside its context saves for backward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._saved = SavedTensors(model)
        self._handles: list[Any] = []
        self._counting = self._has_begun = False

    @property
    def num_bytes(self) -> int:
        """Bytes saved so far."""
        return self._saved.num_bytes

    def __enter__(self) -> "ForwardMeter":
        self._handles = [
            self._model.register_forward_pre_hook(self._begin, prepend=True),
            self._model.register_forward_hook(self._stop, always_call=True),
        ]
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, *_: Any) -> None:
        if not self._has_begun:
            self._saved.__enter__()
            self._counting = self._has_begun = True

    def _stop(self, *_: Any) -> None:
        if self._counting:
            self._saved.__exit__(None, None, None)
            self._counting = False


class MemoryWatch:
    """Measures the memory of this rank.

    Args:
        model, optimizer: as prepared.
        planned: the plan of the run.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: GlobalBatches,
        planned: RunPlan,
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper has no hooks
        self.steps, self.layout = batches.steps, batches.layout
        self.metered_step, self.instrumented_step = full_steps(batches.steps, batches.order)
        self.on_cpu = accelerator.device.type == "cpu"
        self.planned = planned
        self.forward_meter = ForwardMeter(model)
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
        compiles = self.planned.plan.compiles
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
        with break_down_peak(self.model, self.optimizer, self.accelerator.device) as peak:
            yield
        self.breakdown = peak.breakdown
        if self.on_cpu and peak.breakdown is not None:
            self._keep_largest("peak_allocated", peak.breakdown.total_bytes)

    def _read_device(self) -> dict[str, int]:
        device = read_device_memory(self.accelerator.device)
        torch.accelerator.reset_peak_memory_stats(self.accelerator.device)
        window = {name.removesuffix("_bytes"): value for name, value in device.items()}
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
    accelerator, parts = watch.accelerator, _parts(watch)
    held_bytes = read_device_use(accelerator.device).others_bytes
    parts["together"] = sum(parts.values())
    width = max(map(len, parts))
    where = f"rank {accelerator.process_index} of {accelerator.num_processes} ({device_name(accelerator.device)})"
    when = "as far as it had come" if watch.breakdown is None else "at the peak of an earlier step, measured"
    return "\n".join(
        [
            f"out of memory in step {step + 1} on {where}",
            f"  {str(error).strip().splitlines()[0]}",
            *([f"  other processes hold {format_bytes(held_bytes)} of this device"] if held_bytes else []),
            f"what filled it, {when}:",
            *(f"  {name:<{width}}  {format_bytes(size):>9}" for name, size in parts.items()),
        ]
    )


def _parts(watch: MemoryWatch) -> dict[str, int]:
    """Return the bytes by kind: as measured, or computed now."""
    if watch.breakdown is not None:
        return {spaced(name.removesuffix("_bytes")): size for name, size in vars(watch.breakdown).items()}
    stays = persistent_tensors(watch.model, watch.optimizer)
    parts = {spaced(label.use.value): sum(label.storages.values()) for label in stays}
    if watch.on_cpu:
        return {**parts, "saved for the backward": watch.forward_meter.num_bytes}
    peak = torch.accelerator.max_memory_allocated(watch.accelerator.device)
    return {**parts, "activations and temporaries": max(0, peak - sum(parts.values()))}
