"""F1 loads from here without a network and is worked out by hand."""

import evaluate
import pytest

from memsave_recipes.metrics import F1

REFERENCES = [1, 1, 1, 0, 0, 0]


@pytest.fixture(scope="module")
def f1():
    return evaluate.load(str(F1))


def test_of_two_classes_it_is_that_of_class_1(f1):
    # Two of the three ones are found, and one zero is called a one: precision and recall are 2/3.
    assert f1.compute(predictions=[1, 1, 0, 1, 0, 0], references=REFERENCES) == pytest.approx({"f1": 2 / 3})
    assert f1.compute(predictions=[1] * 6, references=REFERENCES) == pytest.approx({"f1": 2 * 0.5 / 1.5})


def test_macro_is_the_mean_over_classes(f1):
    # Class 0: precision 1/2, recall 1. Class 1: 1 and 1/2. Class 2: never right.
    figures = f1.compute(predictions=[0, 0, 1, 1], references=[0, 1, 1, 2], average="macro")
    assert figures == pytest.approx({"f1_macro": (2 / 3 + 1 / 2 + 0) / 3})


def test_a_class_that_is_never_right_has_f1_0(f1, recwarn):
    assert f1.compute(predictions=[0] * 6, references=REFERENCES) == {"f1": 0.0}
    assert not [warning for warning in recwarn if "ill-defined" in str(warning.message)]
