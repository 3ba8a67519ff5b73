"""The loss of labelled samples, worked out by hand, and as torch and transformers compute its mean."""

import json
from math import log, nan

import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from transformers import BertConfig, BertForSequenceClassification

from memsave_recipes.core.errors import InputError
from memsave_recipes.models.convnets import ConvnetConfig
from memsave_recipes.models.labels import MULTI, REGRESSION, SINGLE, LabelLoss, label_of
from memsave_recipes.models.pretrained import read_labels, read_problem
from memsave_recipes.training.evaluation import LabelArguments

NAMES = ("cat", "dog", "eel")


def test_smoothing_and_weights_by_hand():
    # Two classes with logits 0 and log 3: probabilities 1/4 and 3/4.
    logits = torch.tensor([[0.0, log(3)]] * 3, dtype=torch.float64)
    labels = torch.tensor([0, 1, -100])
    plain = LabelLoss().sum_of(logits, labels)
    assert plain.item() == pytest.approx(log(4) + log(4 / 3), rel=1e-12)
    loss = LabelLoss(label_smoothing=0.1, class_weights=(2.0, 0.5))
    smooth = 0.1 / 2 * (2 * log(4) + 0.5 * log(4 / 3))  # of each sample: all classes share a tenth
    expected = 0.9 * 2 * log(4) + smooth + 0.9 * 0.5 * log(4 / 3) + smooth
    assert loss.sum_of(logits, labels).item() == pytest.approx(expected, rel=1e-12)
    assert loss.weights_of([0, 1, 1]) == [2.0, 0.5, 0.5]
    assert LabelLoss().weights_of([0, 1]) is None


def test_several_labels_by_hand_and_without_gradient_where_nothing_counts():
    logits = torch.tensor([[0.0, log(3)], [5.0, -5.0]], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1.0, 0.0], [nan, nan]])
    loss = LabelLoss(problem_type=MULTI).sum_of(logits, labels)
    assert loss.item() == pytest.approx((log(2) + log(4)) / 2, rel=1e-12)
    loss.backward()
    assert logits.grad.tolist() == [pytest.approx([-1 / 4, 3 / 8]), [0, 0]]


def test_squared_errors_by_hand_and_without_gradient_where_nothing_counts():
    logits = torch.tensor([[1.5], [3.0]], dtype=torch.float64, requires_grad=True)
    loss = LabelLoss(problem_type=REGRESSION).sum_of(logits, torch.tensor([4.0, nan]))
    assert loss.item() == 6.25
    loss.backward()
    assert logits.grad.tolist() == [[-5.0], [0.0]]


def test_labels_of_samples():
    assert label_of(2, 3, counted=True) == 2
    assert label_of(2, 3, counted=False) == -100
    assert label_of([2, 0], 3, counted=True) == [1.0, 0.0, 1.0]
    assert label_of([], 2, counted=True) == [0.0, 0.0]
    assert label_of(-100.0, 1, counted=True) == -100.0  # a number as any other
    uncounted = torch.tensor([*label_of([1], 3, counted=False), label_of(1.5, 1, counted=False)])
    assert uncounted.isnan().all()


@pytest.mark.parametrize(
    ("problem", "num_labels", "labels"),
    [
        (SINGLE, 3, torch.tensor([0, 2])),
        (MULTI, 3, torch.tensor([[1.0, 0, 1], [0, 0, 0]])),
        (REGRESSION, 1, torch.tensor([2.5, -1])),
    ],
)
def test_the_mean_is_the_loss_of_transformers(problem, num_labels, labels):
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = BertConfig(vocab_size=9, **shape, num_labels=num_labels, problem_type=problem)
    output = BertForSequenceClassification(config).eval()(torch.tensor([[1, 2], [3, 4]]), labels=labels)
    ours = LabelLoss(problem_type=problem).sum_of(output.logits, labels) / 2
    assert ours.item() == pytest.approx(output.loss.item(), rel=1e-6)


def test_balanced_weights_are_those_of_scikit_learn():
    labels = [0, 0, 0, 1, 2, 2]
    loss = LabelArguments(class_weights="balanced").label_loss(SINGLE, NAMES, labels)
    assert loss.class_weights == (6 / 9, 2.0, 1.0)
    assert loss.class_weights == tuple(compute_class_weight("balanced", classes=torch.arange(3).numpy(), y=labels))
    with_one_more = LabelArguments(class_weights="balanced").label_loss(SINGLE, (*NAMES, "fox"), labels)
    assert with_one_more.class_weights == (6 / 9, 2.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("suffix", "content"), [("json", '{"eel": 3, "cat": 0.5, "dog": 0}'), ("yaml", "eel: 3\ncat: 0.5\ndog: 0\n")]
)
def test_weights_of_a_file_are_found_by_name(tmp_path, suffix, content):
    path = tmp_path / f"weights.{suffix}"
    path.write_text(content)
    assert LabelArguments(class_weights=str(path)).label_loss(SINGLE, NAMES, [0]).class_weights == (0.5, 0.0, 3.0)


MISTAKES = {
    "a class without": ({"cat": 1, "dog": 1}, "has no weight for the class eel: give one for each of cat, dog, eel"),
    "an unknown class": ({"cat": 1, "dog": 1, "eel": 1, "cow": 1}, "has a weight for an unknown class cow"),
    "below zero": ({"cat": -1, "dog": 1, "eel": 1}, "cat: -1: must be a number, 0, or in [1e-10, 1e+10]"),
    "too large to add up": ({"cat": 1e308, "dog": 1, "eel": 1}, "cat: 1e+308: must be a number, 0, or in"),
    "too large for float32": (dict.fromkeys(NAMES, 1e38), "only ratios of weights count"),
    "too small for float32": (dict.fromkeys(NAMES, 1e-45), "cat: 1e-45: must be a number, 0, or in"),
    "not a number": ({"cat": float("nan"), "dog": 1, "eel": 1}, "cat: NaN: must be a number"),
    "a word": ({"cat": "much", "dog": 1, "eel": 1}, "cat: much: must be a number"),
    "none": ({"cat": None, "dog": 1, "eel": 1}, "cat has no value"),
    "all zero": (dict.fromkeys(NAMES, 0), "must be above 0 for at least one class"),
    "a list": ([1, 2, 3], "must hold lines like `name: 1.5`"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_the_file_is_one_line(tmp_path, case):
    content, message = MISTAKES[case]
    path = tmp_path / "weights.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as refused:
        LabelArguments(class_weights=str(path)).label_loss(SINGLE, NAMES, [0])
    assert message in str(refused.value)
    assert str(refused.value).startswith("--class_weights")


def test_flags_that_cannot_be():
    with pytest.raises(InputError, match="--label_smoothing_factor 1: must be in"):
        LabelArguments(label_smoothing_factor=1)
    with pytest.raises(InputError, match=r"--class_weights none\.json is not a file"):
        LabelArguments(class_weights="none.json")
    for problem in (MULTI, REGRESSION):
        with pytest.raises(InputError, match=r"--label_smoothing_factor 0\.1 is for samples of one class each"):
            LabelArguments(label_smoothing_factor=0.1).label_loss(problem, NAMES, None)
        with pytest.raises(InputError, match="--class_weights balanced is for samples of one class each"):
            LabelArguments(class_weights="balanced").label_loss(problem, NAMES, None)


def test_before_the_data_are_there_weights_are_ones():
    assert LabelArguments(class_weights="balanced").label_loss(SINGLE, NAMES).class_weights == (1.0, 1.0, 1.0)


def test_what_labels_are_stands_beside_the_classes_of_adapters(tmp_path):
    path = tmp_path / "id2label.json"
    path.write_text(json.dumps({"0": "cat", "1": "dog", "problem_type": MULTI}))
    assert read_labels(tmp_path) == {0: "cat", 1: "dog"}
    assert read_problem(tmp_path) == MULTI
    for content in (
        '{"0": "cat", "1": "dog"}',
        '{"0": "cat", "problem_type": "guess"}',
        "[1]",
    ):  # of before, and damaged
        path.write_text(content)
        assert read_problem(tmp_path) == SINGLE


def test_what_labels_are_stands_in_the_configuration_of_our_networks(tmp_path):
    options = {"architecture": "vgg_small", "label_names": NAMES, "image_size": 32, "dtype": torch.float32}
    config = ConvnetConfig(**options, problem_type=MULTI)
    config.save(tmp_path)
    assert ConvnetConfig.read(tmp_path) == config
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "problem_type"}))
    assert ConvnetConfig.read(tmp_path) == ConvnetConfig(**options)  # of an earlier version
