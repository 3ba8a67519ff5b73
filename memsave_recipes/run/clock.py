"""The clock of a run: samples and tokens a second, the time of a step, and the share of it that waits for data.

Windows end where the loop reads a loss from the device, which waits for the device anyway. So the clock makes no step
wait.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass
class _Tally:
    steps: int = 0
    samples: int = 0
    tokens: Tensor | int = 0  # a sum on the device until a window ends
    seconds: float = 0.0
    waiting_seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        if not self.steps or not self.seconds:
            return {}
        tokens = {"tokens_per_sec": int(self.tokens) / self.seconds} if self.tokens else {}
        return {
            "samples_per_sec": self.samples / self.seconds,
            **tokens,
            "step_time_s": self.seconds / self.steps,
            "data_wait_pct": 100 * self.waiting_seconds / self.seconds,
        }


class StepClock:
    """Counts steps, samples and seconds since the warm-up, and since the last window.

    Args:
        warmup_steps: so many first steps are in no figure (compilation, caches, allocator growth).
    """

    def __init__(self, *, warmup_steps: int = 2, device: torch.device | str = "cpu") -> None:
        self._warmup_steps = warmup_steps
        self._device = torch.device(device)
        self._total = _Tally()
        self._window = _Tally()
        self._started = time.perf_counter()
        self._window_started = self._started
        self._paused_seconds = 0.0
        self._paused_since: float | None = None
        self._earlier_seconds = 0.0

    @property
    def train_time_s(self) -> float:
        """Seconds since the clock was made, and before a resume; with the warm-up, without the time ``paused``."""
        now = time.perf_counter() if self._paused_since is None else self._paused_since
        return self._earlier_seconds + now - self._started - self._paused_seconds

    def state_dict(self) -> dict[str, Any]:
        """Return the windows that have ended and the training time, as Python numbers."""
        return {**asdict(self._total), "train_time_s": self.train_time_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, after a warm-up of this process's own."""
        counted = dict(state)
        self._earlier_seconds = counted.pop("train_time_s")
        self._total = _Tally(**counted)

    def step(self, *, samples: int, tokens: Tensor | int = 0) -> None:
        """Count a step that has been queued, of so many samples and valid tokens over all ranks."""
        if self._warmup_steps:
            self._warmup_steps -= 1
            if not self._warmup_steps:
                self.synchronize()  # warm-up must not run on into the window
            self._window_started = time.perf_counter()
            self._window.waiting_seconds = 0.0
            return
        self._window.steps += 1
        self._window.samples += samples
        self._window.tokens = self._window.tokens + tokens

    def end_window(self) -> dict[str, float]:
        """Return the figures since the last window ended (none during warm-up). Call it when the device is done."""
        now = time.perf_counter()
        self._window.seconds = now - self._window_started
        self._window.tokens = int(self._window.tokens)
        window, self._window, self._window_started = self._window, _Tally(), now
        for name, value in vars(window).items() if window.steps else ():
            setattr(self._total, name, getattr(self._total, name) + value)
        return window.figures()

    def figures(self) -> dict[str, float]:
        """Return the figures of all windows that have ended."""
        return self._total.figures()

    def loading(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield ``batches``, counting the time until each is there as waiting."""
        iterator = iter(batches)
        while True:
            began = time.perf_counter()
            batch = next(iterator, None)
            self._window.waiting_seconds += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def synchronize(self) -> None:
        """Wait for the steps that are queued. That is training time, also while the clock is paused."""
        if self._device.type == "cpu":
            return
        began = time.perf_counter()
        torch.accelerator.synchronize(self._device)
        if self._paused_since is not None:
            self._paused_since += time.perf_counter() - began

    @contextmanager
    def paused(self, *, synchronize: bool = False) -> Iterator[None]:
        """Stop the clock: for an evaluation, saving, an instrumented step.

        Args:
            synchronize: whether the code inside waits for the device, as an evaluation does, and so for earlier steps.
        """
        if synchronize:
            self.synchronize()
        self._paused_since = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - self._paused_since
            self._paused_since = None
            self._window_started += seconds
            self._paused_seconds += seconds
