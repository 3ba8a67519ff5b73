"""``--batchnorm global``: one curve for any ranks and micro-batches, predicted memory, one line where it cannot be."""

import pytest
from lives import curve, with_context
from safetensors.torch import load_file

RECIPE = "image_classification"
FLAGS = ["--model", "densenet_small", "--batchnorm", "global", "--global_batch_size", "12", "--logging_steps", "1"]
EXACT = ["--dtype", "float64", "--optimizer", "sgd", "--learning_rate", "1e-3", "--max_steps", "2"]
WAYS = {"whole": [], "in micro-batches": ["--micro_batch_size", "5"]}
LOCAL = "BatchNorm layers normalise each of"


def weights(folder):
    return load_file(folder / "final" / "model.safetensors")


def relative_error(one, other):
    return max(float((one[name] - other[name]).double().norm() / other[name].double().norm()) for name in other)


def test_micro_batches_have_the_curve_of_the_whole_batch(train, tmp_path, capsys):
    runs = {way: train(*FLAGS, *EXACT, *flags, output=way) for way, flags in WAYS.items()}
    printed = capsys.readouterr().out
    assert "full: 17 of 17 blocks recomputed in micro-batches of 5" in printed
    assert LOCAL not in printed
    whole, cut = (tmp_path / way for way in WAYS)
    assert curve(cut) == pytest.approx(curve(whole), rel=1e-12)
    assert relative_error(weights(cut), weights(whole)) < 1e-11  # of biases that began at 0, two steps ago
    peaks = {way: run["memory"]["peak_allocated_gib"] for way, run in runs.items()}
    assert peaks["in micro-batches"] < peaks["whole"]


@pytest.mark.slow
def test_a_budget_prices_the_action(train, capsys):
    flags = [*FLAGS[:-4], "--global_batch_size", "32", "--max_steps", "2", "--micro_batch_size", "4"]
    budget = 0.005  # little more than the least: every block in micro-batches takes 0.0046, otherwise 0.0063
    planned = train(*flags, "--activation_checkpointing", "budget", "--memory_budget_gib", str(with_context(budget)))
    printed = capsys.readouterr().out
    assert "recompute in micro-batches" in printed
    assert planned["memory"]["peak_allocated_gib"] <= budget
    assert abs(planned["memory"]["prediction_error_pct"]) <= 5


REFUSED = {
    "no BatchNorm": (["--model", "vgg_small"], "--batchnorm global: VGG has no BatchNorm layers"),
    "auto": (["--micro_batch_size", "auto"], "--batchnorm global needs a --micro_batch_size that is a number"),
    "compiled": (["--activation_checkpointing", "compiled"], "--batchnorm global cannot be compiled"),
    "nothing recomputes": (
        ["--micro_batch_size", "4", "--activation_checkpointing", "selective"],
        "--activation_checkpointing selective recomputes no block, so none can run in micro-batches",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_one_line(refuse, case):
    flags, words = REFUSED[case]
    assert words in refuse(*FLAGS, *flags)


def test_a_plan_in_micro_batches_needs_the_flag(train, refuse, tmp_path):
    train(*FLAGS, "--max_steps", "1", "--micro_batch_size", "4", output="first")
    plan = ["--activation_checkpointing", str(tmp_path / "first" / "plan.json")]
    assert "runs blocks in micro-batches, which takes batchnorm global" in refuse("--model", "densenet_small", *plan)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "size"), [(1, "5"), (2, "6"), (2, "4"), (3, "2")])
def test_ranks_have_the_weights_of_one(train, train_on_ranks, tmp_path, num_ranks, size):
    train(*FLAGS, *EXACT, output="one")
    train_on_ranks(num_ranks, *FLAGS, *EXACT, "--micro_batch_size", size, output="ranks")
    assert relative_error(weights(tmp_path / "ranks"), weights(tmp_path / "one")) < 1e-11
