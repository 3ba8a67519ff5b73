"""Steps whose loss or gradient is not finite: they change no weight, and stop the run or are counted.

NOTE [ not finite ]
1. A loss that is NaN or infinite makes the gradient NaN (``GlobalBatch.backward``), DDP's all-reduce carries that to
   all ranks, and the norm that clipping computes anyway is NaN on each of them. So one number says it all, and no rank
   has to ask another one.
2. The host does not look at the norm before the optimizer steps: it would have to wait for the device in each step, and
   could no longer queue the next one meanwhile. The fused optimizers take a ``found_inf`` on the device, as gradient
   scalers give it to them, and then change neither weights nor their own state. Those that take none (Adafactor, AdamW
   in 8 bits) are waited for.
3. The host looks where it waits for the device in any case: at the end of a logging window, and before a checkpoint is
   saved. There ``StepLosses`` stops the run or counts the step, so the steps in between are computed in vain.
4. With fp16 the scaler leaves steps out whose gradient overflows, as a matter of course; then the loss alone is judged.
5. The running statistics of a BatchNorm are wrong as soon as the forward is, so they are put back where a run goes on.
6. ``--optimizer_in_backward`` has changed the weights before there is anything to look at, and a finite gradient makes
   them infinite where the rate is large. So the weights themselves are looked at before they are saved.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from memsave_recipes.training.batch_layout import SampleOrder
from memsave_recipes.training.batching import GlobalBatch

MAX_NAMED_SAMPLES = 32
WAY_OUT = (
    "no weight has changed since the step before: look at these samples and at --learning_rate, or go on with --resume "
    "--skip_nonfinite N"
)


class NotFinite(Exception):
    """More steps than allowed had a loss or a gradient that is not finite; all ranks know it. The message is a line."""


class NonFiniteGuard:
    """Lets the optimizer step on finite gradients only: rules 2, 4 and 5 of NOTE [ not finite ].

    Args:
        model, optimizer: as prepared, and as the first step finds them.
        skips: how many steps may be left out; with any, BatchNorm's statistics are put back after such a step.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, *, skips: int) -> None:
        self.has_scaler = accelerator.scaler is not None
        self.optimizer: Any = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper hands nothing on
        self.takes_found_inf = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        self.statistics = [(buffer, buffer.clone()) for buffer in _statistics(model)] if skips else []

    def should_step(self, batch: GlobalBatch, grad_norm: Tensor | None) -> bool:
        """Whether to call ``optimizer.step()``; sets its ``found_inf``, and puts BatchNorm's statistics back.

        With ``found_inf`` set on the device the step that is called changes nothing.
        """
        if grad_norm is None:
            return True
        is_bad = ~torch.isfinite(torch.as_tensor(batch.loss) if self.has_scaler else grad_norm)
        for buffer, before in self.statistics:
            before.copy_(torch.where(is_bad, before, buffer))
            buffer.copy_(before)
        if self.has_scaler:
            return True
        if self.takes_found_inf:
            self.optimizer.found_inf = is_bad.to(torch.float32)
            return True
        return not is_bad.item()


def _statistics(model: nn.Module) -> list[Tensor]:
    return [buffer for module in model.modules() if isinstance(module, _BatchNorm) for buffer in module.buffers()]


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
        """The losses of the window and the count of skipped steps, as plain values. Waits for the device.

        Raises:
            NotFinite: more steps than allowed are not finite.
        """
        self.take_in(gather_figures(self.accelerator, self.parts()))
        return {"losses": list(self._read), "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``."""
        self._read, self.skipped_steps = list(state["losses"]), state["skipped_steps"]

    def _leave_out(self, description: str) -> None:
        self.skipped_steps += 1
        if self.skipped_steps > self.skips:
            raise NotFinite(f"{description}; {WAY_OUT}")
        self.accelerator.print(f"note: {description}; skipped, {self.skipped_steps} of at most {self.skips}")


def is_finite(loss: float, grad_norm: float, *, has_scaler: bool) -> bool:
    """Whether a step counts: rule 4 of NOTE [ not finite ]."""
    return isfinite(loss) and (has_scaler or isfinite(grad_norm))


def describe_not_finite(order: SampleOrder, step: int, loss: float, grad_norm: float | None) -> str:
    """A line on ``step``, numbered from 0: its loss, gradient norm and samples, by their places in the data set."""
    _, samples = next(order.steps(step, step + 1))
    more = f" and {len(samples) - MAX_NAMED_SAMPLES} more" if len(samples) > MAX_NAMED_SAMPLES else ""
    named = ", ".join(map(str, samples[:MAX_NAMED_SAMPLES]))
    norm = "" if grad_norm is None else f", gradient norm {grad_norm:g}"
    return f"step {step + 1} is not finite (loss {loss:g}{norm}), its samples are {named}{more}"


def gather_figures(accelerator: Accelerator, figures: Mapping[Any, float]) -> dict[Any, list[float]]:
    """Every figure of every rank, in one collective; all ranks must have the same. Whole numbers are exact to 2^53."""
    device = accelerator.device if accelerator.num_processes > 1 else "cpu"
    values = torch.tensor([list(figures.values())], dtype=torch.float64, device=device)
    return dict(zip(figures, accelerator.gather(values).T.tolist(), strict=True))
