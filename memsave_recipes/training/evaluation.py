"""Labelled samples: the flags of their loss, and evaluation on any number of ranks, every sample once."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import nan
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data.dataloader import default_collate

from memsave_recipes.core.errors import InputError, packages_of, require
from memsave_recipes.core.losses import IGNORED_LABEL
from memsave_recipes.core.progress import ProgressBar
from memsave_recipes.core.step.batch_layout import Batch, BatchLayout, MicroBatchSampler, SampleOrder
from memsave_recipes.core.text import join_names
from memsave_recipes.models.flags import RULES, Rules, check_ranges, option
from memsave_recipes.models.labels import MULTI, REGRESSION, SINGLE, LabelLoss, ProblemType
from memsave_recipes.training.batching import exact_sum, make_loader
from memsave_recipes.training.optimizers import place_of_figures
from memsave_recipes.training.parsing import read_mapping

if TYPE_CHECKING:
    import evaluate

with packages_of("vision,text", "accuracies"):  # before the training; they are imported where something is evaluated
    for package in ("datasets", "evaluate", "sklearn"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(name=package)

_DESCRIPTION = """
The share of predictions that equal their references, and F1, the harmonic mean of precision and recall: from 0 to 1.
With ``average="binary"`` F1 is that of class 1, as ``f1``, which is what GLUE reports; with ``"macro"`` the mean over
all classes that occur, each counting the same, as ``f1_macro``; with ``None``, the default, there is no F1.
"""
BALANCED = "balanced"
LARGEST_WEIGHT = 1e10
TOP_K, MAX_NAMED = 5, 12
MAX_CONFUSED = 50
"""Classes up to which the results have a confusion matrix."""
_INPUTS = "predictions and references: class indices, equally many; average: None (default), binary or macro"


@dataclass(kw_only=True)
class LabelArguments:
    """The loss of labelled samples.

    Attributes:
        weights_by_class: what the file of ``--class_weights`` says, by name, so that a resumed run has the same.
    """

    label_smoothing_factor: float = option(
        0.0, "share of the target that is spread evenly over all classes; 0: none", within="[0, 1)"
    )
    class_weights: str | None = option(
        None, "weights of classes in the mean loss: balanced, or a .json or .yaml with one for each name"
    )
    weights_by_class: dict[str, float] | None = field(
        default=None, init=False, metadata={RULES: Rules(file_of="--class_weights")}
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.class_weights is not None and self.class_weights != BALANCED:
            self.weights_by_class = _read_weights(self.class_weights)

    def label_loss(
        self, problem_type: ProblemType | None, label_names: Sequence[str], labels: Sequence[Any] | None = None
    ) -> LabelLoss:
        """Return the loss of the flags.

        Args:
            problem_type: ``None`` before the labels are there: one class a sample.
            labels: of the samples to train on, indices of classes; ``None`` before they are there.

        Raises:
            InputError: smoothing or weights for other labels than one class a sample; a file without a weight for each
                of the classes.
        """
        if problem_type in (None, SINGLE):
            weights = None if self.class_weights is None else self._weights_of(label_names, labels)
            return LabelLoss(label_smoothing=self.label_smoothing_factor, class_weights=weights)
        for flag in ("label_smoothing_factor", "class_weights"):
            if value := getattr(self, flag):
                raise InputError(f"--{flag} {value} is for samples of one class each, not {problem_type}: leave it out")
        return LabelLoss(problem_type=problem_type or SINGLE)

    def _weights_of(self, label_names: Sequence[str], labels: Sequence[int] | None) -> tuple[float, ...]:
        if labels is None:
            return (1.0,) * len(label_names)
        if self.class_weights == BALANCED:
            from sklearn.utils import compute_sample_weight  # by the formula of compute_class_weight

            found = dict(zip(labels, compute_sample_weight(BALANCED, labels).tolist(), strict=True))
            return tuple(found.get(index, 1.0) for index in range(len(label_names)))
        given = self.weights_by_class or {}
        for name in [*label_names, *given]:
            if (name in label_names) != (name in given):
                what = "has no weight for the class" if name in label_names else "has a weight for an unknown class"
                raise InputError(
                    f"--class_weights {self.class_weights} {what} {name}: give one for each of "
                    f"{join_names(label_names, MAX_NAMED)}"
                )
        return tuple(given[name] for name in label_names)


def _read_weights(path: str) -> dict[str, float]:
    entries = read_mapping("--class_weights", path)
    weights = {name: _weight(f"--class_weights {path}: {name}", words) for name, words in entries.items()}
    require(any(weights.values()), "--class_weights", path, "above 0 for at least one class")
    return weights


def _weight(place: str, words: Sequence[str]) -> float:
    try:
        (weight,) = map(float, words)
    except ValueError:
        weight = nan
    if not (weight == 0 or 1 / LARGEST_WEIGHT <= weight <= LARGEST_WEIGHT):  # float32 has to hold products and sums
        rule = f"0, or in [{1 / LARGEST_WEIGHT:g}, {LARGEST_WEIGHT:g}]: only ratios of weights count"
        raise InputError(f"{place}: {' '.join(words)}: must be a number, {rule}")
    return weight


def evaluation_batches(
    accelerator: Accelerator,
    dataset: Sized,
    micro_batch_size: int,
    *,
    num_samples: int | None = None,
    layout: type[BatchLayout] = BatchLayout,
    sequence_parallel: int = 1,
    collate_fn: Callable[[list[Any]], Batch] = default_collate,
    num_workers: int = 0,
) -> Iterator[Batch]:
    """This rank's part of a data set, or of its first ``num_samples``, each once over all ranks, on the device.

    All ranks get equally many batches, some of them padding with the label -100; ``gather_counted`` takes it out. With
    a bitwise ``layout`` the batches are the same on any number of ranks, which take them by turns. As many neighbours
    as ``sequence_parallel`` get the same ones.
    """
    num_processes = accelerator.num_processes
    dealt = layout(
        global_batch_size=micro_batch_size * num_processes // sequence_parallel,
        micro_batch_size=micro_batch_size,
        num_processes=num_processes,
        sequence_parallel=sequence_parallel,
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
    """Predictions (B,) or (B, K), labels (B,) or (B, C) of all ranks, without padding; uneven ranks are welcome."""
    columns = torch.cat([one.reshape(len(labels), -1) for one in (labels, predictions)], dim=1)
    padding = nan if columns.is_floating_point() else IGNORED_LABEL
    gathered = accelerator.gather(accelerator.pad_across_processes(columns, dim=0, pad_index=padding))
    is_padding = gathered[:, 0].isnan() if columns.is_floating_point() else gathered[:, 0] == IGNORED_LABEL
    width = labels[:1].numel()
    of_labels, of_predictions = gathered[~is_padding].tensor_split([width], dim=1)
    return of_predictions.reshape(-1, *predictions.shape[1:]), of_labels.reshape(-1, *labels.shape[1:])


def sum_over_ranks(accelerator: Accelerator, parts: list[Tensor], *, exact: bool) -> Tensor:
    """The sum of ``parts``, tensors of one shape, dtype and device of which all ranks have equally many.

    Args:
        exact: in float64 and rounded once, so that the number of ranks does not matter; else in the dtype of the parts.
    """
    device = place_of_figures(accelerator)
    if not exact:
        total: Tensor = accelerator.reduce(sum(parts, torch.zeros_like(parts[0])).to(device), "sum")
        return total
    of_ranks = accelerator.gather(torch.stack(parts).to(device))
    columns = of_ranks.view(len(of_ranks), -1).T.tolist()
    return torch.tensor([exact_sum(column) for column in columns], dtype=torch.float64).view(parts[0].shape)


def summed_loss(model: nn.Module, batch: Batch, *, logits_of: Callable[..., Tensor], loss: LabelLoss) -> Tensor:
    """Sum the losses of a micro-batch; ``logits_of(model, batch)`` are its logits (B, C)."""
    return loss.sum_of(logits_of(model, batch), batch["labels"])


@torch.no_grad()
def evaluate_classifier(
    model: nn.Module,
    accelerator: Accelerator,
    batches: Iterable[Batch],
    *,
    logits_of: Callable[[nn.Module, Batch], Tensor],
    problem_type: ProblemType = SINGLE,
    label_names: Sequence[str] = (),
    with_f1: bool = False,
    exact: bool = False,
) -> dict[str, Any]:
    """Figures over every sample of ``batches``, each once, however many ranks share them.

    Args:
        logits_of: a batch's logits (B, C), in float32 or float64; its ``labels`` are those of ``LabelLoss``.
        label_names: the classes, for ``classes``; without them it is left out.
        with_f1: of samples with one class, F1 as well: that of the second of two classes, else the mean over classes.
        exact: add up the losses of the batches without rounding, so that the ranks do not matter.

    Returns:
        The mean ``loss``, without smoothing and weights. Of one class a sample ``accuracy``, and of more than 5 classes
        ``top5_accuracy``; of several ``f1_micro`` and ``f1_macro``; of numbers ``mse``, and ``pearson`` and
        ``spearmanr``, which are NaN where all answers or all labels are equal. Of classes also ``classes``, by name
        ``precision``, ``recall`` and ``support``; and of at most 50 ``confusion_matrix``: a row a class, a column a
        prediction.
    """
    loss = LabelLoss(problem_type=problem_type)
    outcomes: list[tuple[Tensor, Tensor]] = []
    losses: list[Tensor] = []
    model.eval()
    for batch in batches:
        logits, labels = logits_of(model, batch), batch["labels"]
        losses.append(loss.sum_of(logits, labels).cpu())  # as many as there are batches
        answers = _answers(logits, labels, problem_type)
        predicted, expected = gather_counted(accelerator, answers, labels)
        outcomes.append((predicted.cpu(), expected.cpu()))
    model.train()
    predictions, references = (torch.cat(parts) for parts in zip(*outcomes, strict=True))
    mean = sum_over_ranks(accelerator, losses, exact=exact).item() / len(references)
    if problem_type == REGRESSION:
        return {**_of_numbers(predictions, references), "loss": mean}
    figures: dict[str, Any] = {}
    if problem_type == SINGLE:
        average = ("binary" if logits.shape[-1] == 2 else "macro") if with_f1 else None
        top, is_among_top = predictions[:, 0], predictions[:, 1:]
        pairs = {"predictions": top.tolist(), "references": references.tolist()}
        figures = classification_metric().compute(**pairs, average=average)
        if logits.shape[-1] > TOP_K:
            figures[f"top{TOP_K}_accuracy"] = is_among_top.sum().item() / len(references)
        predictions = top
    return {**figures, **_of_classes(predictions, references, label_names), "loss": mean}


def _answers(logits: Tensor, labels: Tensor, problem_type: ProblemType) -> Tensor:
    """Return numbers (B,), the classes that are found (B, C), or (B, 2): the class and whether the label is near."""
    if problem_type == REGRESSION:
        return logits.squeeze(-1)
    if problem_type == MULTI:
        return logits > 0  # a probability above one half
    best = logits.topk(min(TOP_K, logits.shape[-1])).indices
    return torch.stack([logits.argmax(dim=-1), (best == labels[:, None]).any(dim=-1)], dim=1)


def _of_numbers(predictions: Tensor, references: Tensor) -> dict[str, float]:
    """Return the figures of GLUE's STS-B and the mean squared error, whatever the order of the samples."""
    from scipy.stats import pearsonr, spearmanr

    pairs = sorted(zip(references.tolist(), predictions.tolist(), strict=True))
    figures = {"mse": exact_sum((predicted - expected) ** 2 for expected, predicted in pairs) / len(pairs)}
    expected, predicted = zip(*pairs, strict=True)
    is_defined = len(set(expected)) > 1 and len(set(predicted)) > 1
    figures["pearson"] = float(pearsonr(predicted, expected).statistic) if is_defined else nan
    figures["spearmanr"] = float(spearmanr(predicted, expected).statistic) if is_defined else nan
    return figures


def _of_classes(predictions: Tensor, references: Tensor, label_names: Sequence[str]) -> dict[str, Any]:
    """Return the figures of each class, and of indicators (N, C) F1 over all."""
    from sklearn.metrics import confusion_matrix, f1_score, precision_recall_fscore_support

    both = references.numpy(), predictions.numpy()
    figures: dict[str, Any] = {}
    if references.ndim > 1:
        averages = ("micro", "macro")
        figures = {f"f1_{one}": float(f1_score(*both, average=one, zero_division=0)) for one in averages}
    if not label_names:
        return figures
    every_class = list(range(len(label_names)))
    scores = precision_recall_fscore_support(*both, labels=every_class, zero_division=0)
    columns = zip(label_names, scores[0].tolist(), scores[1].tolist(), scores[3].tolist(), strict=True)
    figures["classes"] = {name: {"precision": p, "recall": r, "support": n} for name, p, r, n in columns}
    if references.ndim == 1 and len(label_names) <= MAX_CONFUSED:
        figures["confusion_matrix"] = confusion_matrix(*both, labels=every_class).tolist()
    return figures


def classification_metric() -> "evaluate.EvaluationModule":
    """Accuracy and scikit-learn's F1, a metric of ``evaluate`` without a network; a class that is never right has 0."""
    import datasets  # all three take half a second
    import evaluate
    from sklearn.metrics import f1_score

    class Classification(evaluate.Metric):  # type: ignore[misc, unused-ignore]  # evaluate has no types
        def _info(self) -> evaluate.MetricInfo:
            indices = datasets.Value("int64")
            features = datasets.Features({"predictions": indices, "references": indices})
            words = {"description": _DESCRIPTION, "citation": "", "inputs_description": _INPUTS}
            return evaluate.MetricInfo(**words, features=features)

        def _compute(
            self, predictions: list[int], references: list[int], average: str | None = None
        ) -> dict[str, float]:
            matches = sum(int(p == r) for p, r in zip(predictions, references, strict=True))
            figures = {"accuracy": matches / len(references)}
            if average is not None:
                score = f1_score(references, predictions, average=average, zero_division=0)
                figures["f1" if average == "binary" else f"f1_{average}"] = float(score)
            return figures

    return Classification()
