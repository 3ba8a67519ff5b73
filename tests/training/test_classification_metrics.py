"""Accuracy and F1, worked out by hand."""

import pytest

from memsave_recipes.training.evaluation import Classification

REFERENCES = [1, 1, 1, 0, 0, 0]


@pytest.fixture(scope="module")
def metrics():
    return Classification()


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
