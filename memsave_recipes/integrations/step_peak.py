"""The peak of training steps beside the prediction, without standing around the steps of a whole training.

A step is measured from its first forward to the optimizer's update. On a device that is every step, by the allocator's
high-water mark, which is reset at the beginning of each. A CPU has none, so there the first step that begins with the
optimizer's state is recorded under torch's profiler, and no other.

The profiler reports no release of memory that it has not seen allocated. So where a step begins with the gradients of
the one before, as in Lightning, which clears them after the forward, the step before the measured one is recorded too.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memsave_recipes.plans.prediction import Prediction
from memsave_recipes.profiling.breakdown import PeakOfStep, break_down_peak, storages_of
from memsave_recipes.profiling.memory import reset_peaks
from memsave_recipes.text import format_bytes


class StepPeak:
    """Measures a step of a training; ``before_forward`` and ``after_step`` are called in all of them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.num_steps = 0
        self._in_step = False
        self._is_compared = self._is_told = False
        self._seen_gradients = False
        self._recording: PeakOfStep | None = None
        self._resident_bytes = 0
        self._open = ExitStack()

    def before_forward(self, resident: Callable[[], Sequence[Tensor]]) -> None:
        """Open the window of a step, where this is its first forward.

        Args:
            resident: tensors on the device that are neither of the model nor of the optimizer.
        """
        if not self._in_step and self.device.type != "cpu":
            reset_peaks(self.device)
        elif not self._in_step and not self._is_compared and self._has_state():
            self._resident_bytes = sum(storages_of(resident()).values())
            self._seen_gradients |= all(parameter.grad is None for parameter in self.model.parameters())
            self._recording = self._open.enter_context(break_down_peak(self.model, self.optimizer, self.device))
        self._in_step = True

    def after_step(self, prediction: Prediction | None, budget_bytes: int | None) -> str | None:
        """A line about the step that has ended: the first with state, or one that took more than a step may take."""
        has_state = self._has_state()
        self._open.close()
        self._in_step = False
        self.num_steps += 1
        peak_bytes = self._peak_bytes()
        if peak_bytes is None or prediction is None or not has_state:
            return None
        limit_bytes = budget_bytes or prediction.peak_bytes
        was_told, self._is_told = self._is_told, self._is_told or peak_bytes > limit_bytes
        if not self._is_compared:
            self._is_compared = True
            return _comparison(self.num_steps, peak_bytes, prediction.peak_bytes, budget_bytes)
        if was_told or not self._is_told:
            return None
        return f"step {self.num_steps} took {format_bytes(peak_bytes)}, above {format_bytes(limit_bytes)}"

    def close(self) -> None:
        """Forget a window that is open; the next forward opens another."""
        self._open.close()
        self._in_step, self._recording = False, None

    def _has_state(self) -> bool:
        return bool(self.num_steps or self.optimizer.state)

    def _peak_bytes(self) -> int | None:
        """Of the window; on a CPU the recorded tensors and those that were there before; ``None`` without one."""
        if self.device.type != "cpu":
            return torch.accelerator.max_memory_allocated(self.device)
        recording, self._recording = self._recording, None
        if recording is None or recording.breakdown is None:
            return None
        seen_gradients, self._seen_gradients = self._seen_gradients, True
        return recording.breakdown.total_bytes + self._resident_bytes if seen_gradients else None


def _comparison(step: int, peak_bytes: int, predicted_bytes: int, budget_bytes: int | None) -> str:
    error = 100 * (predicted_bytes - peak_bytes) / peak_bytes
    predicted = f"predicted {format_bytes(predicted_bytes)} ({error:+.1f} %)"
    line = f"peak of step {step}: {format_bytes(peak_bytes)}, {predicted}"
    return line if budget_bytes is None else f"{line}, budget {format_bytes(budget_bytes)}"
