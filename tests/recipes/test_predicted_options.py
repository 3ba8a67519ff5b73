"""What an option adds to a step is in its prediction, which is never below the measured peak."""

import pytest
from accelerate.state import AcceleratorState
from lives import IMAGES, LABELLED, LENGTH, TEXT, loaded, write_rows
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
FEW = [("bert", "head", "whole")]


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


PADDED = {
    "text_classification": [*LABELLED, "--freeze_backbone", "--validation_file"],
    "language_modeling": [*TEXT, "--no_packing", "--validation_file"],
}


@pytest.mark.parametrize("name", PADDED)
def test_masks_of_padded_rows_are_predicted(tmp_path, name):
    """The longest rows, which are measured, may have no padding; a step may mix them with shorter ones."""
    rows = [{"text": " ".join(["word"] * (40 if row % 3 else 5)), "label": row % 2} for row in range(48)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    plan = ["--activation_checkpointing", "budget:bitwise", "--memory_budget_gib", "0.5", "--report_to", "none"]
    words = [*PADDED[name], path, "--train_file", path, *plan, "--output_dir", str(tmp_path / "run")]
    AcceleratorState._reset_state(reset_partial_state=True)
    with loaded(name) as recipe:
        assert 0 <= recipe.main(words)["memory"]["prediction_error_pct"] < 10
