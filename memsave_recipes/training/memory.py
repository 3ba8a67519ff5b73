"""The memory of a run over all ranks: one instrumented step at the start, then the allocator's figures.

The second optimizer step is the instrumented one (the first if there is no second): from then on the optimizer's state
is there, so its peak is that of every later step. What it adds: the bytes that the first micro-batch's forward keeps
for the backward, on any device, and on a CPU, which has no allocator statistics, the exact peak.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from memsave_recipes.measure.device_memory import DeviceMemory, read_device_memory, reset_peaks
from memsave_recipes.measure.host_memory import instrumented_peak_bytes, peak_rss_bytes, resident_bytes, rss_bytes
from memsave_recipes.measure.saved_tensors import SavedTensors
from memsave_recipes.units import to_gib

INSTRUMENTED_STEP = 1


class MemoryWatch:
    """Measures memory; figures are the largest over ranks.

    Args:
        accelerator: for the device and the ranks.
        model: as prepared; the model whose forward keeps tensors.
        optimizer: its state counts as resident on a CPU.
        num_steps: of the run.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, *, num_steps: int
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self.instrumented_step = min(INSTRUMENTED_STEP, num_steps - 1)
        self.on_cpu = accelerator.device.type == "cpu"
        self.figures: dict[str, int] = {}  # in bytes
        if not self.on_cpu:
            reset_peaks(accelerator.device)

    @property
    def peak_bytes(self) -> int | None:
        """The largest peak so far on this rank, if one is known."""
        return self.figures.get("peak_allocated")

    def run(self, step: int, train_step: Callable[[], Any]) -> Any:
        """``train_step()``, instrumented if it is its turn."""
        if step != self.instrumented_step:
            return train_step()
        with _ForwardMeter(self.model) as meter:
            result = self._run_with_peak(train_step) if self.on_cpu else train_step()
        self._keep_largest("saved_for_backward", meter.num_bytes)
        return result

    def end_window(self) -> dict[str, float]:
        """The ``memory/*`` figures of a logging window. Collective: call it on all ranks."""
        window = {"host_rss": rss_bytes()}
        if not self.on_cpu:
            device = read_device_memory(self.accelerator.device)
            reset_peaks(self.accelerator.device)
            self._take(device)
            window |= _bytes_by_name(device)
        elif self.peak_bytes is not None:
            window["peak_allocated"] = self.peak_bytes
        figures = {f"{key}_gib": to_gib(value) for key, value in self._largest(window).items()}
        if not self.on_cpu:
            figures |= {"num_alloc_retries": device.num_alloc_retries, "num_ooms": device.num_ooms}
        return figures

    def results(self) -> dict[str, Any]:
        """The ``memory`` entry of ``results.json``. Collective."""
        source = (
            f"allocations of step {self.instrumented_step + 1}, instrumented" if self.on_cpu else "device allocator"
        )
        largest = self._largest({**self.figures, "host_peak_rss": peak_rss_bytes()})
        figures = {f"{key}_gib": to_gib(value) for key, value in largest.items()}
        return {**figures, "source": source}

    def _run_with_peak(self, train_step: Callable[[], Any]) -> Any:
        results: list[Any] = []
        resident = resident_bytes(self.model, self.optimizer)
        peak = instrumented_peak_bytes(lambda: results.append(train_step()))
        self._keep_largest("peak_allocated", resident + peak)
        return results[0]

    def _take(self, device: DeviceMemory) -> None:
        for key, num_bytes in _bytes_by_name(device).items():
            self._keep_largest(key, num_bytes)

    def _keep_largest(self, key: str, num_bytes: int) -> None:
        self.figures[key] = max(self.figures.get(key, 0), num_bytes)

    def _largest(self, figures: dict[str, int]) -> dict[str, int]:
        values = torch.tensor([list(figures.values())], dtype=torch.int64, device=self.accelerator.device)
        largest = self.accelerator.gather(values).max(dim=0).values.tolist()
        return dict(zip(figures, largest, strict=True))


def _bytes_by_name(device: DeviceMemory) -> dict[str, int]:
    return {
        "peak_allocated": device.peak_allocated_bytes,
        "peak_reserved": device.peak_reserved_bytes,
        "device_used": device.device_used_bytes,
    }


class _ForwardMeter:
    """Counts what the next forward of ``model`` keeps for its backward."""

    def __init__(self, model: nn.Module) -> None:
        self.num_bytes = 0
        self._saved = SavedTensors(model)
        self._handles = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end),
        ]

    def _begin(self, *_: Any) -> None:
        if not self.num_bytes:
            self._saved.__enter__()

    def _end(self, *_: Any) -> None:
        if not self.num_bytes:
            self._saved.__exit__()
            self.num_bytes = self._saved.num_bytes

    def __enter__(self) -> "_ForwardMeter":
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()
