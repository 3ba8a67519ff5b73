"""A run ends where its evaluations stop improving, by any of their figures, and to the same end after any life."""

import json
from math import nan

import pytest
import torch
from lives import IMAGES, assert_the_same_run, rows_of, weights_of
from samples import sample

from memsave_recipes.tools.compare import read_run
from memsave_recipes.training.checkpoints.commit import verify_manifest

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


@pytest.mark.parametrize("killed_after", sample([5], [3, 5]))
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
    """``evaluations_find(nan, 0.5, ...)``: one after the other has this for its ``pearson``, and a loss of 1.

    Before them, a few samples are evaluated.
    """

    def script(*found):
        left = iter([nan, *found])
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


@pytest.mark.parametrize("named", ["f2", "eval_f2"])
def test_a_figure_that_evaluations_do_not_have_is_refused_before_the_first_step(train, ending, tmp_path, named):
    code, line = ending(*IMAGES, "--metric_for_best_model", named)
    assert code == 2
    assert (
        line == "error: --metric_for_best_model f2: must be one of accuracy, loss, top5_accuracy; go on with --resume"
    )
    assert not (tmp_path / "run/checkpoints").exists()
    assert train(*IMAGES, "--metric_for_best_model", "eval_accuracy", "--resume")["steps"] == 10
    assert json.loads((tmp_path / "run/config.json").read_text())["metric_for_best_model"] == "accuracy"


WORSE = ["--learning_rate", "0.3", "--optimizer", "sgd", "--eval_steps", "1", "--max_steps", "6", "--save_best"]


@pytest.mark.parametrize("more", sample([[]], [[], ["--lora", "--learning_rate", "3"], ["--ema_decay", "0.5"]]))
def test_the_best_model_is_in_final_at_the_end(train, kill_after, tmp_path, capsys, more):
    """With the figures that it has; resumed, too. Without the flag a line says where it is."""
    flags = [*IMAGES, *WORSE, *more, "--metric_for_best_model", "eval_loss", "--save_every", "2"]
    train(*flags, output="last")
    rows = [row for row in rows_of(tmp_path / "last") if "eval/loss" in row]
    best = min(rows, key=lambda row: row["eval/loss"])
    assert best["step"] < 6
    said = capsys.readouterr().out
    assert f"note: final/ has the last weights, and checkpoints/best-{best['step']} the best" in said
    with kill_after(5):
        train(*flags)
    results = train(*flags, "--load_best_model_at_end", "--resume")
    folder = tmp_path / "run"
    assert f"final/ has the weights of checkpoints/best-{best['step']}" in capsys.readouterr().out
    assert results["eval"]["loss"] == best["eval/loss"]
    assert str(best["eval/accuracy"]) in (folder / "final/README.md").read_text()
    weights = weights_of(folder / "final")
    assert all(
        torch.equal(one, weights[name]) for name, one in weights_of(folder / f"checkpoints/best-{best['step']}").items()
    )
    assert not (folder / "final/evaluation.json").exists()
    verify_manifest(folder / "final")
    again = train("--model_name_or_path", folder / "final", *IMAGES[4:], "--eval_only", output="again")
    assert again["eval"]["loss"] == pytest.approx(best["eval/loss"], rel=1e-6)


def test_the_best_model_in_shards(train_on_ranks, tmp_path):
    flags = [*IMAGES, *WORSE, "--load_best_model_at_end", "--shard", "full"]
    results, _ = train_on_ranks(2, *flags)
    assert results["eval"]["loss"] == min(row["eval/loss"] for row in rows_of(tmp_path / "run") if "eval/loss" in row)
    assert (tmp_path / "run/final/model.safetensors").exists()


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
