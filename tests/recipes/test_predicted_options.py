"""What an option adds to a step is in its prediction, which is never below the measured peak."""

import pytest
from lives import IMAGES, LABELLED, LENGTH, TEXT, loaded
from samples import sample

SIZE = ["--global_batch_size", "16", *LENGTH, "--max_steps", "4"]
MODELS = {
    "vit": ["image_classification", *IMAGES],
    "vgg": ["image_classification", "--model", "vgg_small_bn", *SIZE],
    "densenet": ["image_classification", "--model", "densenet_small", *SIZE],
    "bert": ["text_classification", *LABELLED],
    "gpt2": ["language_modeling", *TEXT],
}
OPTIONS = {
    "average": ["--ema_decay", "0.9"],
    "smoothing": ["--label_smoothing_factor", "0.1"],
    "weights": ["--class_weights", "balanced"],
    "head": ["--freeze_backbone"],
    "last block": ["--train_last_blocks", "1"],
    "lora": ["--lora", "--lora_rank", "2"],
    "lora, average": ["--lora", "--lora_rank", "2", "--ema_decay", "0.9"],
    "mixed": ["--augmentation", "flip", "mixup", "--label_smoothing_factor", "0.1"],
}
LEFT_OUT = {
    "vgg": {"lora", "lora, average"},
    "densenet": {"lora", "lora, average"},
    "bert": {"mixed"},
    "gpt2": {"smoothing", "weights", "head", "mixed"},
}
LAYOUTS = {"whole": [], "accumulated": ["--micro_batch_size", "4"]}
CASES = [
    (model, option, layout)
    for model in MODELS
    for option in OPTIONS
    for layout in LAYOUTS
    if option not in LEFT_OUT.get(model, ())
]
FEW = [("vgg", "average", "whole"), ("bert", "last block", "whole")]


@pytest.fixture
def recipe(request):
    """The recipe of the model."""
    with loaded(MODELS[request.getfixturevalue("model")][0]) as module:
        yield module


@pytest.mark.parametrize(("model", "option", "layout"), sample(FEW, CASES))
def test_no_peak_is_predicted_too_low(train, model, option, layout):
    plan = ["--activation_checkpointing", "budget:bitwise", "--memory_budget_gib", "0.5"]
    results = train(*MODELS[model][1:], *OPTIONS[option], *LAYOUTS[layout], *plan)
    assert 0 <= results["memory"]["prediction_error_pct"] < 10
