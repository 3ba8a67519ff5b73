"""The figures of an evaluation, worked out by hand."""

from math import nan

import pytest
import torch
from accelerate import Accelerator

from memsave_recipes.models.labels import MULTI, REGRESSION
from memsave_recipes.training.evaluation import classification_metric, evaluate_classifier

REFERENCES = [1, 1, 1, 0, 0, 0]


@pytest.fixture(scope="module")
def metrics():
    return classification_metric()


def test_accuracy_alone(metrics):
    assert metrics.compute(predictions=[1, 1, 0, 1, 0, 0], references=REFERENCES) == pytest.approx({"accuracy": 4 / 6})


def test_f1_of_two_classes_is_that_of_class_1(metrics):
    # Two of the three ones are found, and one zero is called a one: precision and recall are 2/3.
    figures = metrics.compute(predictions=[1, 1, 0, 1, 0, 0], references=REFERENCES, average="binary")
    assert figures == pytest.approx({"accuracy": 4 / 6, "f1": 2 / 3})
    figures = metrics.compute(predictions=[1] * 6, references=REFERENCES, average="binary")
    assert figures == pytest.approx({"accuracy": 1 / 2, "f1": 2 * 0.5 / 1.5})


def test_macro_f1_is_the_mean_over_classes(metrics):
    # Class 0: precision 1/2, recall 1. Class 1: 1 and 1/2. Class 2: never right.
    figures = metrics.compute(predictions=[0, 0, 1, 1], references=[0, 1, 1, 2], average="macro")
    assert figures == pytest.approx({"accuracy": 1 / 2, "f1_macro": (2 / 3 + 1 / 2 + 0) / 3})


def test_a_class_that_is_never_right_has_f1_0(metrics, recwarn):
    figures = metrics.compute(predictions=[0] * 6, references=REFERENCES, average="binary")
    assert figures == {"accuracy": 1 / 2, "f1": 0.0}
    assert not [warning for warning in recwarn if "ill-defined" in str(warning.message)]


def evaluated(*batches, **options):
    model = torch.nn.Linear(1, 1)
    batches = [{"logits": torch.tensor(logits), "labels": torch.tensor(labels)} for logits, labels in batches]
    return evaluate_classifier(model, Accelerator(), batches, logits_of=lambda _, batch: batch["logits"], **options)


def test_figures_of_each_class():
    one, two, three = [1.0, 0, 0], [0.0, 1, 0], [0.0, 0, 1]
    figures = evaluated(([one, one, two], [0, 1, 1]), ([two, three], [-100, 2]), label_names=("a", "b", "c"))
    assert figures["accuracy"] == 3 / 4
    assert "top5_accuracy" not in figures
    assert figures["classes"] == {
        "a": {"precision": 1 / 2, "recall": 1.0, "support": 1},
        "b": {"precision": 1.0, "recall": 1 / 2, "support": 2},
        "c": {"precision": 1.0, "recall": 1.0, "support": 1},
    }
    assert figures["confusion_matrix"] == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


def test_a_class_that_never_occurs_has_its_row(recwarn):
    figures = evaluated(([[1.0, 0, 0]], [1]), label_names=("a", "b", "c"))
    assert [of_one["support"] for of_one in figures["classes"].values()] == [0, 1, 0]
    assert [of_one["recall"] for of_one in figures["classes"].values()] == [0, 0, 0]
    assert figures["confusion_matrix"] == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert not [warning for warning in recwarn if "ill-defined" in str(warning.message)]


def test_top_5_of_more_than_5_classes():
    logits = [[6.0, 5, 4, 3, 2, 1]] * 3
    figures = evaluated((logits, [0, 4, 5]), label_names=[str(index) for index in range(6)])
    assert figures["accuracy"] == 1 / 3
    assert figures["top5_accuracy"] == 2 / 3
    assert "confusion_matrix" not in evaluated(([[0.0] * 51], [3]), label_names=[str(index) for index in range(51)])


def test_several_labels():
    # Class a: one of two found; class b: one found, and one too many.
    logits, labels = [[1.0, 1], [-1.0, 1], [-1.0, -1]], [[1.0, 1], [1.0, 0], [nan, nan]]
    figures = evaluated((logits, labels), problem_type=MULTI, label_names=("a", "b"))
    assert figures["f1_micro"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert figures["f1_macro"] == pytest.approx((2 / 3 + 2 / 3) / 2)
    assert figures["classes"]["b"] == {"precision": 1 / 2, "recall": 1.0, "support": 1}
    assert "confusion_matrix" not in figures


def test_numbers():
    figures = evaluated(([[1.0], [2.0], [9.0]], [1.0, 4.0, nan]), ([[6.0]], [5.0]), problem_type=REGRESSION)
    assert figures["mse"] == figures["loss"] == pytest.approx((0 + 4 + 1) / 3)
    # Deviations of the predictions: -2, -1, 3; of the labels: -7/3, 2/3, 5/3.
    covariance = 2 * 7 / 3 - 2 / 3 + 3 * 5 / 3
    assert figures["pearson"] == pytest.approx(covariance / (14 * 78 / 9) ** 0.5)
    assert figures["spearmanr"] == pytest.approx(1)


@pytest.mark.parametrize(("answers", "labels"), [((1.0, 1.0), (1.0, 4.0)), ((1.0, 4.0), (1.0, 1.0))])
def test_the_correlation_with_one_answer_or_label_is_not_defined(answers, labels, recwarn):
    figures = evaluated(([[answer] for answer in answers], list(labels)), problem_type=REGRESSION)
    assert figures == pytest.approx({"mse": 4.5, "loss": 4.5, "pearson": nan, "spearmanr": nan}, nan_ok=True)
    assert not recwarn
