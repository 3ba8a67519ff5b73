"""Numbers that are not finite never reach the weights: such a step is left out, and the run hears of it later.

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

from math import isfinite
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from memsave_recipes.training.batching import GlobalBatch
from memsave_recipes.training.sample_order import SampleOrder

SAMPLES_NAMED = 32
WAY_OUT = (
    "no weight has changed since the step before: look at these samples and at --learning_rate, or go on with --resume "
    "--skip_nonfinite N"
)


class NotFinite(Exception):
    """More steps than allowed had a loss or a gradient that is not finite; all ranks know it. The message is a line."""


class FiniteGate:
    """Lets the optimizer step on finite gradients only: rules 2, 4 and 5 of NOTE [ not finite ].

    Args:
        model, optimizer: as prepared, and as the first step finds them.
        skips: how many steps may be left out; with any, the statistics of BatchNorm layers are looked after.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, *, skips: int) -> None:
        self.has_scaler = accelerator.scaler is not None
        self.optimizer: Any = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper hands nothing on
        self.takes_found_inf = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        self.statistics = [(buffer, buffer.clone()) for buffer in _statistics(model)] if skips else []

    def opens(self, batch: GlobalBatch, grad_norm: Tensor | None) -> bool:
        """Whether to call ``optimizer.step()``; one that is called may have been told, on the device, to do nothing."""
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


def is_finite(loss: float, grad_norm: float, *, has_scaler: bool) -> bool:
    """Whether a step counts: rule 4 of NOTE [ not finite ]."""
    return isfinite(loss) and (has_scaler or isfinite(grad_norm))


def describe_not_finite(order: SampleOrder, step: int, loss: float, grad_norm: float | None) -> str:
    """What to say of a step, numbered from 0, whose samples are known by their places in the data set."""
    _, samples = next(order.steps(step, step + 1))
    more = f" and {len(samples) - SAMPLES_NAMED} more" if len(samples) > SAMPLES_NAMED else ""
    named = ", ".join(map(str, samples[:SAMPLES_NAMED]))
    norm = "" if grad_norm is None else f", gradient norm {grad_norm:g}"
    return f"step {step + 1} is not finite (loss {loss:g}{norm}), its samples are {named}{more}"


def _statistics(model: nn.Module) -> list[Tensor]:
    return [buffer for module in model.modules() if isinstance(module, _BatchNorm) for buffer in module.buffers()]
