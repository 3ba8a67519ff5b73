"""Accuracy and F1 as one metric of ``evaluate`` that needs no network: ``evaluate.load(str(METRICS))``."""

from pathlib import Path

from memsave_recipes.errors import packages_of

with packages_of("vision,text", "accuracies"):
    import datasets
    import evaluate

METRICS = Path(__file__)

_DESCRIPTION = """
The share of predictions that equal their references, and F1, the harmonic mean of precision and recall: from 0 to 1.
With ``average="binary"`` F1 is that of class 1, as ``f1``, which is what GLUE reports; with ``"macro"`` the mean over
all classes that occur, each counting the same, as ``f1_macro``; with ``None``, the default, there is no F1.
"""
_INPUTS = "predictions and references: class indices, equally many; average: None (default), binary or macro"


def classification_metrics(
    predictions: list[int], references: list[int], *, average: str | None = None
) -> dict[str, float]:
    """The figures of ``Classification``.

    Args:
        average: ``None``, ``binary`` or ``macro``.
    """
    metric = evaluate.load(str(METRICS))
    figures: dict[str, float] = metric.compute(predictions=predictions, references=references, average=average)
    return figures


class Classification(evaluate.Metric):  # type: ignore[misc, unused-ignore]  # evaluate has no types
    """Exact matches, and scikit-learn's F1, in which a class that is never right has 0."""

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
