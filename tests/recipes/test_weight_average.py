"""--ema_decay: the average is evaluated, kept by checkpoints and saved as ``final/``; its bytes are predicted."""

from pathlib import Path

import pytest
import torch
from lives import FLAGS, IMAGES, assert_the_same_run, assert_the_same_weights, rows_of
from safetensors.torch import load_file
from samples import sample

from memsave_recipes.training.checkpoints import saver

RECIPE = "image_classification"
AVERAGED = ["--ema_decay", "0.75", "--learning_rate", "0.01"]
CNN = ["--model", "vgg_small_bn", "--global_batch_size", "8", "--max_steps", "6", "--eval_steps", "3"]


def test_final_is_the_average_of_the_steps(train, tmp_path, monkeypatch):
    """Training is that without an average, whose weights are in the checkpoints."""
    monkeypatch.setattr(saver, "KEPT", 9)
    flags = [*CNN, "--learning_rate", "0.01", "--max_steps", "4"]
    train(*flags, "--save_every", "1", output="plain")
    results = train(*flags, "--ema_decay", "0.75")
    steps = [load_file(tmp_path / f"plain/checkpoints/step-{step}/model-0.safetensors") for step in range(1, 5)]
    final = load_file(tmp_path / "run/final/model.safetensors")
    average = {name: tensor.clone() for name, tensor in steps[0].items() if tensor.is_floating_point()}
    for weights in steps[1:]:
        for name, tensor in average.items():
            tensor.lerp_(weights[name], 0.25)
    assert len(average) > 40
    assert all(torch.equal(tensor, final[name.removeprefix("model.")]) for name, tensor in average.items())
    assert [row["train/loss"] for row in rows_of(tmp_path / "run") if "train/loss" in row] == [
        row["train/loss"] for row in rows_of(tmp_path / "plain") if "train/loss" in row
    ]
    model = ["--model_name_or_path", tmp_path / "run/final", "--global_batch_size", "8"]  # in the same micro-batches
    again = train("--eval_only", *model, output="again")
    assert again["eval"] == results["eval"]


@pytest.mark.parametrize("flags", [CNN, pytest.param(IMAGES, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_same(train, kill_after, tmp_path, flags):
    train(*flags, *AVERAGED, output="straight")
    with kill_after(4):
        train(*flags, *AVERAGED, "--save_every", "2")
    train(*flags, *AVERAGED, "--resume")
    assert_the_same_run(tmp_path / "run", tmp_path / "straight")


def test_the_best_weights_are_those_that_were_evaluated(train, tmp_path):
    train(*IMAGES, *AVERAGED, "--save_best", "--eval_steps", "10")
    (best,) = (tmp_path / "run/checkpoints").glob("best-*")
    assert best.name == "best-10"
    assert_the_same_weights(best, tmp_path / "run/final")


@pytest.mark.parametrize("flags", sample([["--shard", "full"]], [["--shard", "full"], []]))
def test_two_ranks_evaluate_and_save_it(train, train_on_ranks, tmp_path, flags):
    """In shards the root's weights stay gathered after an evaluation, and would be the average in the next step."""
    results, _ = train_on_ranks(2, *IMAGES, *AVERAGED, *flags)
    expected = train(*IMAGES, *AVERAGED, output="one")
    assert results["eval"]["loss"] == pytest.approx(expected["eval"]["loss"], rel=1e-4)
    assert results["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)
    final, of_one = (load_file(tmp_path / name / "final/model.safetensors") for name in ("run", "one"))
    names = [
        name for name in of_one if not name.endswith("key.bias")
    ]  # no softmax depends on it: Adam steps by rounding
    assert all(torch.allclose(final[name], of_one[name], atol=1e-4) for name in names)


@pytest.mark.slow
def test_shards_of_it_go_on(train_on_ranks, tmp_path):
    flags = [*IMAGES, *AVERAGED, "--shard", "full", "--lr_scheduler_type", "constant", "--save_every", "2"]
    train_on_ranks(2, *flags, output="straight")
    train_on_ranks(2, *flags, "--max_steps", "4")
    train_on_ranks(2, *flags, "--resume")
    assert_the_same_weights(tmp_path / "run/final", tmp_path / "straight/final")


@pytest.mark.parametrize("recipe", sample(["language_modeling"], FLAGS), indirect=True)
def test_its_bytes_are_predicted(recipe, train):
    """By a plan for a budget, which measures the run's own step."""
    flags = FLAGS[Path(recipe.__file__).stem]
    plan = ["--activation_checkpointing", "budget:bitwise", "--memory_budget_gib", "0.2"]
    without, with_it = train(*flags, *plan, output="plain"), train(*flags, *plan, "--ema_decay", "0.9")
    for results in (without, with_it):
        assert 0 <= results["memory"]["prediction_error_pct"] < 5
    gain = 1024**3 * (with_it["memory"]["peak_allocated_gib"] - without["memory"]["peak_allocated_gib"])
    assert gain == pytest.approx(4 * with_it["num_parameters"], rel=0.01)


def test_it_is_not_for_weights_in_bfloat16(refuse):
    line = refuse(*IMAGES, "--dtype", "bfloat16", "--ema_decay", "0.9")
    assert "--ema_decay averages in the dtype of the weights" in line


def test_an_average_cannot_begin_in_the_middle(train, ending, kill_after):
    with kill_after(4):
        train(*IMAGES, "--save_every", "2")
    code, line = ending(*IMAGES, "--ema_decay", "0.9", "--resume")
    assert code == 2
    assert "--resume: --ema_decay was None and is 0.9" in line
