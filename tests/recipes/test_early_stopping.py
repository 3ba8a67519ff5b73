"""A run ends where its evaluations stop improving, by any of their figures, and to the same end after any life."""

import json
from math import nan

import pytest
from lives import IMAGES, assert_the_same_run, rows_of

from memsave_recipes.compare import read_run

RECIPE = "image_classification"
STUCK = [*IMAGES, "--learning_rate", "0", "--eval_steps", "2", "--early_stopping_patience", "2"]
"""Evaluations after 2, 4 and 6 steps, of which the first is the best: the run ends after 6 of 10."""


def evaluations(folder):
    return [row["step"] for row in rows_of(folder) if "eval/loss" in row]


def test_it_ends_with_all_that_a_run_has(train, tmp_path, capsys):
    results = train(*STUCK, "--save_best", "--save_every", "100")
    folder = tmp_path / "run"
    assert results["steps"] == 6
    assert results["samples_seen"] == 6 * 16
    assert evaluations(folder) == [2, 4, 6]
    assert [row["step"] for row in rows_of(folder) if "train/loss" in row] == [4]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["best-2", "step-6"]
    assert (folder / "final/model.safetensors").exists()
    assert read_run(folder).results["steps"] == 6
    assert "--early_stopping_patience 2: the run ends after step 6" in capsys.readouterr().out


@pytest.mark.parametrize("killed_after", [3, 5])
def test_a_resumed_run_ends_there_too(train, kill_after, tmp_path, killed_after):
    train(*STUCK, output="straight")
    with kill_after(killed_after):
        train(*STUCK, "--save_every", "1")
    train(*STUCK, "--save_every", "1", "--resume")
    assert_the_same_run(tmp_path / "run", tmp_path / "straight")
    train(*STUCK, "--save_every", "1", "--resume")  # it is done
    assert_the_same_run(tmp_path / "run", tmp_path / "straight")


def test_more_patience_goes_on(train, tmp_path):
    train(*STUCK, "--save_every", "1")
    results = train(*STUCK[:-1], "3", "--save_every", "1", "--resume")
    assert results["steps"] == 8
    assert evaluations(tmp_path / "run") == [2, 4, 6, 8]


def test_all_ranks_end(train_on_ranks, tmp_path):
    results, printed = train_on_ranks(2, *STUCK)
    assert results["steps"] == 6
    assert printed.count("the run ends after step 6") == 1


def test_small_gains_do_not_count(train, tmp_path):
    """Of runs that learn: the first evaluation is the best, and no other one is so much better."""
    flags = ["--eval_steps", "1", "--early_stopping_patience", "3", "--early_stopping_threshold", "1000"]
    results = train(*IMAGES, "--learning_rate", "0.01", *flags, "--metric_for_best_model", "accuracy", "--save_best")
    assert results["steps"] == 4
    rows = [row for row in rows_of(tmp_path / "run") if "eval/loss" in row]
    best = max(rows, key=lambda row: row["eval/accuracy"])  # the first of equals
    (folder,) = (tmp_path / "run/checkpoints").glob("best-*")
    assert folder.name == f"best-{best['step']}"


@pytest.fixture
def evaluations_find(recipe, monkeypatch):
    """``evaluations_find(nan, 0.5, ...)``: one after the other has this for its ``pearson``, and a loss of 1."""

    def script(*found):
        left = iter(found)
        monkeypatch.setattr(recipe, "evaluate_classifier", lambda *_, **__: {"loss": 1.0, "pearson": next(left)})

    return script


BY_PEARSON = [*STUCK, "--metric_for_best_model", "pearson", "--save_best", "--save_every", "1"]


def test_a_figure_that_is_not_defined_is_never_better(train, evaluations_find, kill_after, tmp_path, capsys):
    """After 2 steps none, after 4 the best, after 6 and 8 none and no better one: two in a row, and the run ends."""
    evaluations_find(nan, 0.5, nan)
    with kill_after(7):
        train(*BY_PEARSON)
    evaluations_find(0.5)
    results = train(*BY_PEARSON, "--resume")
    assert results["steps"] == 8
    assert results["eval"] == {"loss": 1.0, "pearson": 0.5}
    known = {row["step"]: row.get("eval/pearson") for row in rows_of(tmp_path / "run") if "eval/loss" in row}
    assert known == {2: None, 4: 0.5, 6: None, 8: 0.5}
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("best-*")] == ["best-4"]
    printed = capsys.readouterr().out
    for step in (2, 6):
        assert printed.count(f"note: the pearson of the evaluation after step {step} is not defined") == 1
    assert "evaluations were not better than a pearson of 0.5000" in printed


def test_a_figure_that_is_never_defined_has_no_best(train, evaluations_find, tmp_path, capsys):
    evaluations_find(nan, nan)
    results = train(*BY_PEARSON)
    assert results["steps"] == 4
    assert json.loads((tmp_path / "run/results.json").read_text())["eval"] == {"loss": 1.0}
    assert not list((tmp_path / "run/checkpoints").glob("best-*"))
    assert "after step 4, as its last 2 evaluations were not better\n" in capsys.readouterr().out


def test_a_figure_that_evaluations_do_not_have_costs_no_step(train, ending, tmp_path):
    code, line = ending(*IMAGES, "--metric_for_best_model", "f2")
    assert code == 2
    assert (
        line == "error: --metric_for_best_model f2: must be one of accuracy, loss, top5_accuracy; go on with --resume"
    )
    assert json.loads((tmp_path / "run/checkpoints/step-3/record.json").read_text())
    assert train(*IMAGES, "--metric_for_best_model", "accuracy", "--resume")["steps"] == 10


@pytest.mark.parametrize(
    "flags",
    [
        ["--early_stopping_patience", "0"],
        ["--early_stopping_threshold", "-1"],
        ["--early_stopping_threshold", "nan"],
        ["--ema_decay", "1"],
        ["--adam_beta1", "1"],
        ["--adam_beta2", "-0.1"],
        ["--adam_epsilon", "0"],
        ["--lr_scheduler_kwargs", "[]"],
    ],
)
def test_values_out_of_range_are_refused(refuse, flags):
    assert refuse(*IMAGES, *flags).startswith(f"error: {flags[0]} {flags[1]}"[:20])
