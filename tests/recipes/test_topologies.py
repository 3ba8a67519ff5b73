"""A global batch of 24 trains the same weights on any ranks and micro-batches, through a recipe."""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from lives import TINY_VIT, be_rank
from safetensors.torch import load_file
from samples import sample

NO_DROPOUT = "hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0"
FLAGS = [
    *("--model_type", "vit", "--config_overrides", f"{TINY_VIT},{NO_DROPOUT}", "--augmentation", "digits"),
    *("--logging_steps", "1", "--max_steps", "10", "--global_batch_size", "24", "--warmup_steps", "5"),
    *("--dtype", "float64", "--optimizer", "adamw", "--learning_rate", "1e-3"),
]
# name: ranks, largest micro-batch
GEOMETRIES = {"1x5-uneven": (1, 5), "2x12": (2, 12), "2x3x4": (2, 3), "3x8": (3, 8), "4x2x3": (4, 2)}
TOLERANCE = 1e-12
KEY_BIAS = ".key.bias"

Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(run_on_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """The folder of a run on so many forked ranks, each done once."""

    @cache
    def run(num_ranks: int, *flags: str, recipe: str = "image_classification") -> Path:
        folder = tmp_path_factory.mktemp("run")
        of_a_run = [] if recipe == "ddp_equals_accumulation" else ["--report_to", "none"]
        words = [*flags, *of_a_run, "--output_dir", str(folder)]
        run_on_ranks(partial(be_rank, recipe=recipe, words=words), num_ranks, timeout_s=150)
        return folder

    return run


@pytest.mark.parametrize("layout", sample(["2x12"], GEOMETRIES))
def test_any_geometry_trains_the_same(train: Train, layout: str) -> None:
    num_ranks, micro_batch_size = GEOMETRIES[layout]
    folder = train(num_ranks, *FLAGS, "--micro_batch_size", str(micro_batch_size))
    assert_same_weights(folder, train(1, *FLAGS))
    assert_same_curve(folder, train(1, *FLAGS))


@pytest.mark.slow
def test_mixed_images_train_the_same(train: Train) -> None:
    """With 5 samples on 2 ranks, one of which has a micro-batch of padding."""
    flags = [*FLAGS, "--augmentation", "randaugment", "mixup", "cutmix", "--global_batch_size", "5"]
    folder = train(2, *flags, "--micro_batch_size", "1")
    assert_same_weights(folder, train(1, *flags))
    assert_same_curve(folder, train(1, *flags))


def test_weights_that_the_loss_never_uses_are_left_alone(train: Train) -> None:
    """DDP would wait for the gradient of DINOv2's mask token."""
    sizes = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,image_size=8,patch_size=4"
    flags = [*FLAGS, "--model_type", "dinov2", "--config_overrides", sizes, "--max_steps", "2"]
    flags += ["--bitwise_topology", "--micro_batch_size", "6"]
    one, two = (train(ranks, *flags) / "final" / "model.safetensors" for ranks in (1, 2))
    assert one.read_bytes() == two.read_bytes()


def assert_same_weights(folder: Path, expected_folder: Path) -> None:
    """Each tensor relative to its largest element, in the worst of them.

    A key's bias shifts all scores of a query alike, so its true gradient is zero and it holds rounding alone: of the
    order of the tolerance where a weight would be of the order of 1.
    """
    weights, expected = (load_file(run / "final" / "model.safetensors") for run in (folder, expected_folder))
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = 1 if name.endswith(KEY_BIAS) else tensor.abs().max()
        assert (weights[name] - tensor).abs().max() <= TOLERANCE * scale, name


def assert_same_curve(folder: Path, expected_folder: Path) -> None:
    rows, expected = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (folder, expected_folder)
    )
    curves = [[row["train/loss"] for row in run if "train/loss" in row] for run in (rows, expected)]
    rates = [[row["train/lr"] for row in run if "train/lr" in row] for run in (rows, expected)]
    assert len(curves[0]) == len(rates[0]) == 10
    assert curves[0] == pytest.approx(curves[1], rel=TOLERANCE)
    assert rates[0] == rates[1]


@pytest.mark.slow
def test_the_teaching_recipe_gives_the_same_weights_on_two_ranks(train: Train) -> None:
    recipe, flags = "ddp_equals_accumulation", ["--global_batch_size", "24", "--micro_batch_size", "3"]
    one = train(1, *flags, recipe=recipe)
    two = train(2, *flags, "--compare_with", str(one), recipe=recipe)
    equivalence = json.loads((two / "results.json").read_text())["equivalence"]
    assert equivalence["largest_difference_to_it"] <= 1e-15
    assert equivalence["largest_difference_exact"] <= 1e-15
    assert equivalence["largest_difference_bitwise"] == 0
    assert equivalence["same_bits_as_it"] == {"3": True}
    assert equivalence["largest_difference_usual"] > 0.01
