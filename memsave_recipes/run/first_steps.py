"""The first steps of a run: its plan is proven before them, its memory measured in them, on every rank.

The first full step counts the bytes that the forward of its first micro-batch saves for backward; under a plan that
compiles, the memory of compiling counts in no figure. The second one is recorded, allocation by allocation: the
optimizer's state is there, so its peak is that of every later step. On a CPU, which has no allocator statistics, that
is the peak of the run. The clock starts after it. ``docs/measuring.md`` says more.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from memsave_recipes.activations import PlanHandle
from memsave_recipes.equivalence import Verdict, use_deterministic_kernels, verify
from memsave_recipes.profiling.breakdown import MemoryBreakdown, break_down_peak
from memsave_recipes.profiling.memory import (
    ForwardMeter,
    is_out_of_memory,
    peak_rss_bytes,
    read_device_memory,
    record_history,
    rss_bytes,
    write_snapshot,
)
from memsave_recipes.run.failures import VerificationFailed
from memsave_recipes.run.out_of_memory import RunSettings, page_of
from memsave_recipes.step.batch_layout import Batch, SampleOrder
from memsave_recipes.text import first_line, to_gib
from memsave_recipes.training.batching import GlobalBatches

GO_ON = "or go on with --verify warn"
OBJECTIONS = {
    "different": (
        "the plan changes the training step",
        f"train with --activation_checkpointing none or another plan, {GO_ON}",
    ),
    "not repeatable": (
        "two plain runs of one global batch from one state differ, so nothing can be said of the plan",
        f"keep what the model counts or draws in buffers and torch's generators, {GO_ON}",
    ),
    "not synchronised": (
        "ranks do not have the same",
        f"prepare the model after its last change, and let DDP broadcast its buffers, {GO_ON}",
    ),
    "not finite": (
        "the step is the same with and without the plan, but not finite",
        f"look for it in the data, the weights and --dtype, {GO_ON}",
    ),
    "unproven": ("there is no proof that the plan is as exact as plain", f"take a plan that does not compile, {GO_ON}"),
}


def verify_plan(
    mode: str,
    accelerator: Accelerator,
    model: nn.Module,
    handle: PlanHandle,
    batches: GlobalBatches,
    loss_of: Callable[[Batch], Tensor],
) -> dict[str, Any]:
    """Carry out ``--verify`` on the run's first global batch and restore all state; it costs two global batches.

    Args:
        mode: ``off``, ``stop`` or ``warn``.
        model: as prepared, with the plan of ``handle`` applied.
        loss_of: the summed loss of a micro-batch, as in training.

    Returns:
        The ``equivalence`` entry of ``results.json`` under that name; nothing with ``off``.

    Raises:
        VerificationFailed: with ``stop``, if there is no proof.
        torch.OutOfMemoryError: there is no memory left for the proof.
    """
    if mode == "off":
        return {}

    def step() -> Tensor:
        batch = next(iter(batches))
        for micro_batch in batch.forwards(model):
            batch.backward(loss_of(micro_batch))
        return torch.as_tensor(batch.loss)

    try:
        with _without_loss_scaling(accelerator):
            verdict = verify(model, handle, step)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(
            "error: no memory left in --verify, which also runs one global batch without the plan: leave it out, or "
            f"verify once with a smaller --micro_batch_size ({first_line(error)})"
        ) from error
    if verdict.passed:
        accelerator.print(f"--verify: one global batch, without the plan and with it: {verdict.describe()}")
    elif mode == "warn":
        accelerator.print(f"warning: {_objection(verdict, handle)}")
    else:
        raise VerificationFailed(f"error: {_objection(verdict, handle)}")
    return {"equivalence": verdict.to_dict()}


def settle_kernels(
    wanted: bool,
    accelerator: Accelerator,
    model: nn.Module,
    batches: GlobalBatches,
    loss_of: Callable[[Batch], Tensor],
) -> None:
    """Where ``wanted``, train by NOTE [ a fixed order ], and say where there is none; it costs a forward."""
    if not wanted:
        return

    def trial() -> None:
        accelerator.backward(loss_of(batches.largest_forward(batches.layout)()))

    with _without_loss_scaling(accelerator):
        operator = use_deterministic_kernels(model, trial)
    if operator:
        accelerator.print(
            f"warning: --full_determinism: {operator} has no deterministic kernel, so the last bits of two runs may "
            "differ: on a GPU those of attention, too"
        )


def _objection(verdict: Verdict, handle: PlanHandle) -> str:
    found, hint = OBJECTIONS[verdict.status]
    return f"--verify, plan {handle.plan.strategy}: {found} ({verdict.describe()}): {hint}"


@contextmanager
def _without_loss_scaling(accelerator: Accelerator) -> Iterator[None]:
    """Take the loss scaler of fp16 away: its first scales overflow, which would be no result."""
    scaler, accelerator.scaler = accelerator.scaler, None
    try:
        yield
    finally:
        accelerator.scaler = scaler


COUNTS = ("num_alloc_retries", "num_ooms")  # the figures that are no bytes
BREAKDOWN = "breakdown of "


class MemoryWatch:
    """Measures the memory of this rank.

    Args:
        model, optimizer: as prepared.
        settings: without them the out-of-memory page names no flags and nothing is recorded.
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
        recorded_steps = self.steps[: self.settings.flags.get("memory_snapshot") or 0]
        self.last_recorded_step = recorded_steps[-1] if recorded_steps else None
        if recorded_steps:
            record_history()
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
        """Write ``--memory_snapshot`` if ``step`` is the last one of it, which takes a while."""
        compiles = self.planned.plan.compiled_memory_ratio is not None
        if compiles and step < self.instrumented_step and not self.on_cpu:
            torch.accelerator.reset_peak_memory_stats(self.accelerator.device)
        if step == self.last_recorded_step:
            write_snapshot(self.settings.snapshot_path(self.accelerator.process_index))

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
