"""Kinds of labels, and the loss of labelled samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import wrap_torch_function

from memsave_recipes.core.losses import IGNORED_LABEL

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]  # as transformers'
SINGLE: Final = "single_label_classification"
MULTI: Final = "multi_label_classification"
REGRESSION: Final = "regression"


@dataclass(frozen=True, kw_only=True)
class LabelLoss:
    """The loss of labelled samples by their ``problem_type``, as transformers' models compute it.

    | problem_type | labels | loss of a sample |
    | --- | --- | --- |
    | single_label_classification | int64 (B,), -100: does not count; or shares (B, C) | cross-entropy |
    | multi_label_classification | floating (B, C), 1 for each class it has | mean binary cross-entropy of the classes |
    | regression | floating (B,) | squared error |

    Floating labels that do not count are NaN.

    Args:
        label_smoothing, class_weights: those of ``F.cross_entropy``. The weighted mean of a batch is the sum of its
            losses by the sum of ``class_weights[label]``.
    """

    problem_type: ProblemType = SINGLE
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None

    def sum_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Sum the losses of a micro-batch with logits (B, C); a scalar in their dtype."""
        return _sum_of_labels(logits, labels, self)

    def weights_of(self, labels: Sequence[int]) -> list[float] | None:
        """Return the weights of samples in their mean; ``None`` where all count alike."""
        return None if self.class_weights is None else [self.class_weights[label] for label in labels]

    def labels_for(self, num_samples: int, num_labels: int) -> Tensor:
        """Make labels without values, on the device ``meta``."""
        shape = (num_samples, num_labels) if self.problem_type == MULTI else (num_samples,)
        dtype = torch.int64 if self.problem_type == SINGLE else torch.float32
        return torch.empty(shape, dtype=dtype, device="meta")


@wrap_torch_function(lambda logits, labels, loss: (logits, labels))  # of a wrapper tensor: for each inner one
def _sum_of_labels(logits: Tensor, labels: Tensor, loss: LabelLoss) -> Tensor:
    if loss.problem_type == SINGLE and not labels.is_floating_point():
        weight = None
        if loss.class_weights is not None:  # so few bytes that the host does not wait; a copy is seen by estimates
            weight = torch.tensor(loss.class_weights, dtype=logits.dtype)
            weight = weight.to(logits.device, non_blocking=True, copy=True)
        return F.cross_entropy(logits, labels, weight, reduction="sum", label_smoothing=loss.label_smoothing)
    counted, targets = ~labels.isnan(), labels.nan_to_num().to(logits.dtype)
    if loss.problem_type == SINGLE:
        losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=loss.label_smoothing)
        return losses.where(counted.all(-1), 0).sum()
    if loss.problem_type == MULTI:
        weight = counted.to(logits.dtype)
        summed = F.binary_cross_entropy_with_logits(logits, targets, weight=weight, reduction="sum")
        return summed / logits.shape[-1]
    errors = F.mse_loss(logits.squeeze(-1), targets, reduction="none")
    return errors.where(counted, 0).sum()


def label_of(label: Any, num_labels: int, *, counted: bool) -> Any:
    """Return the label of a sample, as ``LabelLoss`` takes it in a batch, of a class, a list of classes or a number."""
    if isinstance(label, list):
        return [float(index in label) if counted else nan for index in range(num_labels)]
    if isinstance(label, float):
        return label if counted else nan
    return label if counted else IGNORED_LABEL
