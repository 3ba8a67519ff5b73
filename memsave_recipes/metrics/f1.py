"""F1 as a module of ``evaluate`` that needs no network: ``evaluate.load(str(F1))``."""

import datasets
import evaluate
from sklearn.metrics import f1_score

_DESCRIPTION = """
The harmonic mean of precision and recall, from 0 to 1. With ``average="binary"`` that of class 1, as ``f1``, which is
what GLUE reports; with ``"macro"`` the mean over all classes that occur, each counting the same, as ``f1_macro``.
"""
_INPUTS = "predictions and references: class indices, equally many; average: binary (default) or macro"


class F1(evaluate.Metric):
    """scikit-learn's; a class that is never right has F1 0."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions: list[int], references: list[int], average: str = "binary") -> dict[str, float]:
        score = f1_score(references, predictions, average=average, zero_division=0)
        return {"f1" if average == "binary" else f"f1_{average}": float(score)}
