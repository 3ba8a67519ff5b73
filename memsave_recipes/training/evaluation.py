"""Evaluation on any number of ranks: every sample once, and the figures of all of them together."""

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data.dataloader import default_collate

from memsave_recipes.errors import packages_of
from memsave_recipes.losses import IGNORED_LABEL
from memsave_recipes.step.batch_layout import Batch, BatchLayout, MicroBatchSampler, SampleOrder
from memsave_recipes.text import ProgressBar
from memsave_recipes.training.batching import exact_sum, make_loader

with packages_of("vision,text", "accuracies"):
    import datasets
    import evaluate

_DESCRIPTION = """
The share of predictions that equal their references, and F1, the harmonic mean of precision and recall: from 0 to 1.
With ``average="binary"`` F1 is that of class 1, as ``f1``, which is what GLUE reports; with ``"macro"`` the mean over
all classes that occur, each counting the same, as ``f1_macro``; with ``None``, the default, there is no F1.
"""
_INPUTS = "predictions and references: class indices, equally many; average: None (default), binary or macro"


def evaluation_batches(
    accelerator: Accelerator,
    dataset: Sized,
    micro_batch_size: int,
    *,
    num_samples: int | None = None,
    layout: type[BatchLayout] = BatchLayout,
    collate_fn: Callable[[list[Any]], Batch] = default_collate,
    num_workers: int = 0,
) -> Iterator[Batch]:
    """This rank's part of a data set, or of its first ``num_samples``, each once over all ranks, on the device.

    All ranks get equally many batches, some of them padding with the label -100; ``gather_counted`` takes it out. With
    a bitwise ``layout`` the batches are the same on any number of ranks, which take them by turns.
    """
    num_processes = accelerator.num_processes
    dealt = layout(
        global_batch_size=micro_batch_size * num_processes,
        micro_batch_size=micro_batch_size,
        num_processes=num_processes,
    )
    num_samples = min(num_samples or len(dataset), len(dataset))
    order = SampleOrder(num_samples=num_samples, global_batch_size=dealt.global_batch_size, seed=None)
    sampler = MicroBatchSampler(
        order=order,
        layout=dealt,
        rank=accelerator.process_index,
        first_step=0,
        last_step=order.steps_per_epoch,
    )
    loader = make_loader(accelerator, dataset, sampler, collate_fn, num_workers)
    for batch in ProgressBar(loader, shown=accelerator.is_main_process, desc="evaluating"):
        yield send_to_device(batch, accelerator.device, non_blocking=True)


def gather_counted(accelerator: Accelerator, predictions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions and labels of all ranks, both (n,), without padding; uneven ranks are welcome."""
    both = torch.stack([predictions, labels], dim=1)  # (B, 2)
    padded = accelerator.pad_across_processes(both, dim=0, pad_index=IGNORED_LABEL)
    gathered = accelerator.gather(padded)
    counted = gathered[gathered[:, 1] != IGNORED_LABEL]
    return counted[:, 0], counted[:, 1]


def sum_over_ranks(accelerator: Accelerator, parts: list[Tensor], *, exact: bool) -> Tensor:
    """The sum of ``parts``, tensors of one shape and dtype of which all ranks have equally many.

    Args:
        exact: in float64 and rounded once, so that the number of ranks does not matter; else in the dtype of the parts.
    """
    if not exact:
        total: Tensor = accelerator.reduce(sum(parts, torch.zeros_like(parts[0])), "sum")
        return total
    of_ranks = accelerator.gather(torch.stack(parts).double())
    columns = of_ranks.view(len(of_ranks), -1).T.tolist()
    return torch.tensor([exact_sum(column) for column in columns], dtype=torch.float64).view(parts[0].shape)


@torch.no_grad()
def evaluate_classifier(
    model: nn.Module,
    accelerator: Accelerator,
    batches: Iterable[Batch],
    *,
    logits_of: Callable[[nn.Module, Batch], Tensor],
    with_f1: bool = False,
    exact: bool = False,
) -> dict[str, float]:
    """``accuracy`` and mean ``loss`` over every sample of ``batches``, each once, however many ranks share them.

    Args:
        logits_of: a batch's logits (B, num_classes), in float32 or float64; its ``labels`` are (B,).
        with_f1: F1 as well: that of the second of two classes, else the mean over the classes.
        exact: add up the losses of the batches without rounding, so that the ranks do not matter.
    """
    predictions: list[int] = []
    references: list[int] = []
    losses: list[Tensor] = []
    num_classes = 0
    model.eval()
    for batch in batches:
        logits, labels = logits_of(model, batch), batch["labels"]
        num_classes = logits.shape[-1]
        losses.append(F.cross_entropy(logits, labels, reduction="sum"))
        predicted, expected = gather_counted(accelerator, logits.argmax(dim=-1), labels)
        predictions += predicted.tolist()
        references += expected.tolist()
    model.train()
    average = ("binary" if num_classes == 2 else "macro") if with_f1 else None
    figures = Classification().compute(predictions=predictions, references=references, average=average)
    return {**figures, "loss": sum_over_ranks(accelerator, losses, exact=exact).item() / len(references)}


class Classification(evaluate.Metric):  # type: ignore[misc, unused-ignore]  # evaluate has no types
    """Accuracy and scikit-learn's F1, a metric of ``evaluate`` without a network; a class that is never right has 0."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions: list[int], references: list[int], average: str | None = None) -> dict[str, float]:
        matches = sum(int(p == r) for p, r in zip(predictions, references, strict=True))
        figures = {"accuracy": matches / len(references)}
        if average is not None:
            from sklearn.metrics import f1_score

            score = f1_score(references, predictions, average=average, zero_division=0)
            figures["f1" if average == "binary" else f"f1_{average}"] = float(score)
        return figures
