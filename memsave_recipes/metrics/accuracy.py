"""Accuracy as a module of ``evaluate`` that needs no network: ``evaluate.load(str(ACCURACY))``."""

import datasets
import evaluate

_DESCRIPTION = "The share of predictions that equal their references, from 0 to 1."
_INPUTS = "predictions and references: class indices, equally many"


class Accuracy(evaluate.Metric):
    """Exact matches over all predictions."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        matches = sum(int(p == r) for p, r in zip(predictions, references, strict=True))
        return {"accuracy": matches / len(references)}
