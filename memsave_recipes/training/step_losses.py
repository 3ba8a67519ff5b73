"""The loss of every step over all ranks, read from the device only where the run waits for it anyway.

Rule 3 of NOTE [ not finite ]: here a step that is not finite stops the run, or is counted.
"""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from memsave_recipes.training.batching import GlobalBatch
from memsave_recipes.training.finite import WAY_OUT, NotFinite, describe_not_finite, is_finite
from memsave_recipes.training.sample_order import SampleOrder


class StepLosses:
    """The steps since the last logging window. All methods are for all ranks.

    Args:
        skips: so many steps may be not finite.
    """

    def __init__(self, accelerator: Accelerator, order: SampleOrder, *, skips: int) -> None:
        self.accelerator = accelerator
        self.order = order
        self.skips = skips
        self.skipped_steps = 0
        self.grad_norm: float | None = None
        """Of the last step that has been read; ``None`` where no step had one."""
        self._read: list[float] = []
        self._unread: dict[int, tuple[Tensor, Tensor | None]] = {}  # this rank's part of the loss, gradient norm

    def add(self, batch: GlobalBatch, grad_norm: Tensor | None) -> None:
        """Take in a finished step. Reads nothing from the device."""
        self._unread[batch.step] = torch.as_tensor(batch.loss), grad_norm

    def parts(self) -> dict[int, float]:
        """This rank's parts of the losses that nobody has read yet, by step. Waits for the device."""
        return {step: loss.item() for step, (loss, _) in self._unread.items()}

    def take_in(self, of_ranks: Mapping[int, list[float]]) -> None:
        """The ``parts`` of all ranks.

        Raises:
            NotFinite: more steps than allowed are not finite.
        """
        for step, parts in of_ranks.items():
            loss, (_, norm) = sum(parts), self._unread.pop(step)
            self.grad_norm = None if norm is None else norm.item()
            if is_finite(loss, self.grad_norm or 0.0, has_scaler=self.accelerator.scaler is not None):
                self._read.append(loss)
            else:
                self._leave_out(describe_not_finite(self.order, step, loss, self.grad_norm))

    def end_window(self) -> float:
        """The mean loss of its steps, NaN where none is finite."""
        steps, self._read = self._read, []
        return sum(steps) / len(steps) if steps else float("nan")

    def skipped(self) -> dict[str, int]:
        """How many steps have been left out, where that is allowed."""
        return {"skipped_steps": self.skipped_steps} if self.skips else {}

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on has to know, in plain values. Waits for the device.

        Raises:
            NotFinite: more steps than allowed are not finite.
        """
        self.take_in(gather_figures(self.accelerator, self.parts()))
        return {"losses": list(self._read), "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self._read, self.skipped_steps = list(state["losses"]), state["skipped_steps"]

    def _leave_out(self, words: str) -> None:
        self.skipped_steps += 1
        if self.skipped_steps > self.skips:
            raise NotFinite(f"{words}; {WAY_OUT}")
        self.accelerator.print(f"note: left out {words}: {self.skipped_steps} of {self.skips} that may be")


def gather_figures(accelerator: Accelerator, figures: Mapping[Any, float]) -> dict[Any, list[float]]:
    """Every figure of every rank, in one collective; all ranks must have the same. Whole numbers are exact to 2^53."""
    device = accelerator.device if accelerator.num_processes > 1 else "cpu"
    values = torch.tensor([list(figures.values())], dtype=torch.float64, device=device)
    return dict(zip(figures, accelerator.gather(values).T.tolist(), strict=True))
