"""``--activation_checkpointing budget --memory_budget_gib F``: the run fits, was predicted, and has plain's curve."""

import pytest
import torch
from lives import curve, share_of, with_context
from samples import sample

RECIPE = "image_classification"
SHORT = ["--global_batch_size", "16", "--max_steps", "3", "--logging_steps", "1", "--full_determinism"]
# Of the peak without a plan; small tensors take blocks of 512 bytes on a device, whatever the plan.
SHARE = 0.9 if torch.cuda.is_available() else 0.75
GEOMETRIES = {"accumulating": ["--micro_batch_size", "8"], "undivided": ["--micro_batch_size", "16"]}


def under(gib):
    return ["--activation_checkpointing", "budget", "--memory_budget_gib", str(gib)]


def within(gib):
    return under(with_context(gib))


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [("accumulating", "adamw"), pytest.param("undivided", "sgd", marks=pytest.mark.slow)],
)
def test_a_run_stays_below_its_budget_and_keeps_its_curve(train, tmp_path, capsys, layout, optimizer):
    flags = ["--model", "densenet_small", *SHORT, *GEOMETRIES[layout], "--optimizer", optimizer]
    plain = train(*flags, output="plain")
    budget = share_of(plain, SHARE)
    planned = train(*flags, *within(budget), output="planned")
    assert planned["memory"]["peak_allocated_gib"] <= budget
    assert planned["memory"]["predicted_peak_gib"] <= budget
    assert abs(planned["memory"]["prediction_error_pct"]) <= 2
    assert curve(tmp_path / "planned") == curve(tmp_path / "plain")
    assert "predicted peak" in capsys.readouterr().out


def test_measuring_does_not_step_an_optimizer_that_steps_in_the_backward(train, tmp_path):
    flags = ["--model", "densenet_small", *SHORT, "--micro_batch_size", "16"]
    flags += ["--optimizer_in_backward", "--max_grad_norm", "0"]
    plain = train(*flags, output="plain")
    budget = share_of(plain, SHARE)
    planned = train(*flags, *within(budget), output="planned")
    assert curve(tmp_path / "planned") == curve(tmp_path / "plain")
    assert planned["memory"]["peak_allocated_gib"] <= budget
    assert abs(planned["memory"]["prediction_error_pct"]) <= 2


def test_the_plan_file_reproduces_it_without_measuring(train, tmp_path, capsys):
    flags = ["--model", "densenet_small", *SHORT, "--micro_batch_size", "16"]
    planned = train(*flags, *within(share_of(train(*flags, output="plain"), SHARE)), output="planned")
    capsys.readouterr()
    again = train(*flags, "--activation_checkpointing", str(tmp_path / "planned" / "plan.json"), output="again")
    assert "predicted peak" not in capsys.readouterr().out
    assert again["plan"] == planned["plan"] != "none"
    assert again["memory"]["peak_allocated_gib"] == planned["memory"]["peak_allocated_gib"]
    assert curve(tmp_path / "again") == curve(tmp_path / "planned")


@pytest.mark.parametrize(
    ("micro_batch_size", "budget"),
    [
        pytest.param("8", 0.0035, id="undivided", marks=pytest.mark.slow),
        pytest.param("4", 0.003, id="accumulating"),
    ],
)
def test_two_ranks_agree_on_a_plan_that_fits_both(train_on_ranks, micro_batch_size, budget):
    flags = ["--model", "densenet_small", *SHORT, "--micro_batch_size", micro_batch_size, *under(budget), "--verify"]
    results, printed = train_on_ranks(2, *flags)
    assert printed.count("predicted peak") == 1
    assert results["equivalence"]["verdict"] == "identical"
    assert results["memory"]["peak_allocated_gib"] <= budget
    assert abs(results["memory"]["prediction_error_pct"]) <= 5


MISTAKES = {
    "too small": (["budget", "--memory_budget_gib", "0.001"], "the smallest that works is"),
    "no number": (["budget"], "needs --memory_budget_gib"),
    "a number that says nothing": (
        ["full", "--memory_budget_gib", "1"],
        "has no effect with --activation_checkpointing full",
    ),
    "below zero": (["budget", "--memory_budget_gib", "-1"], "--memory_budget_gib -1.0: must be"),
    "no ratio": (["compiled:2"], "RATIO in compiled:RATIO is a number from 0 to 1"),
}


@pytest.mark.parametrize("mistake", sample([name for name in MISTAKES if name != "too small"], MISTAKES))
def test_a_mistake_is_one_line_and_exit_code_2(refuse, mistake):
    flags, expected = MISTAKES[mistake]
    assert expected in refuse("--model", "densenet_small", *SHORT, "--activation_checkpointing", *flags)
