"""The best weights by any figure of the evaluations are saved, and are ``final/``, after any life."""

import json
from math import nan

import pytest
import torch
from lives import IMAGES, rows_of, weights_of
from samples import sample

from memsave_recipes.training.checkpoints.commit import verify_manifest

RECIPE = "image_classification"


@pytest.fixture
def evaluations_find(recipe, monkeypatch):
    """``evaluations_find(nan, 0.5, ...)``: one after the other has this for its ``pearson``, and a loss of 1.

    Before them, a few samples are evaluated.
    """

    def script(*found):
        left = iter([nan, *found])
        monkeypatch.setattr(recipe, "evaluate_classifier", lambda *_, **__: {"loss": 1.0, "pearson": next(left)})

    return script


BY_PEARSON = [*IMAGES, "--learning_rate", "0", "--eval_steps", "2", "--max_steps", "8", "--save_best", "pearson"]
BY_PEARSON += ["--save_every", "1"]


def test_a_figure_that_is_not_defined_is_never_better(train, evaluations_find, kill_after, tmp_path, capsys):
    """After 2 steps none, after 4 the best, after 6 none and after 8 no better one."""
    evaluations_find(nan, 0.5, nan)
    with kill_after(7):
        train(*BY_PEARSON)
    evaluations_find(0.5)
    results = train(*BY_PEARSON, "--resume")
    assert results["eval"] == {"loss": 1.0, "pearson": 0.5}
    known = {row["step"]: row.get("eval/pearson") for row in rows_of(tmp_path / "run") if "eval/loss" in row}
    assert known == {2: None, 4: 0.5, 6: None, 8: 0.5}
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("best-*")] == ["best-4"]
    printed = capsys.readouterr().out
    for step in (2, 6):
        assert printed.count(f"note: the pearson of the evaluation after step {step} is not defined") == 1


def test_a_figure_that_is_never_defined_has_no_best(train, evaluations_find, tmp_path, capsys):
    evaluations_find(nan, nan, nan, nan)
    train(*BY_PEARSON)
    assert json.loads((tmp_path / "run/results.json").read_text())["eval"] == {"loss": 1.0}
    assert not list((tmp_path / "run/checkpoints").glob("best-*"))
    assert "note: no evaluation was the best, so final/ has the last weights" in capsys.readouterr().out


@pytest.mark.parametrize("named", ["f2", "eval_f2"])
def test_a_figure_that_evaluations_do_not_have_is_refused_before_the_first_step(train, ending, tmp_path, named):
    code, line = ending(*IMAGES, "--save_best", named)
    assert code == 2
    assert line == "error: --save_best f2: must be one of accuracy, loss, top5_accuracy; go on with --resume"
    assert not (tmp_path / "run/checkpoints").exists()
    assert train(*IMAGES, "--save_best", "eval_accuracy", "--resume")["steps"] == 10
    assert json.loads((tmp_path / "run/config.json").read_text())["save_best"] == "accuracy"


WORSE = ["--learning_rate", "0.3", "--optimizer", "sgd", "--eval_steps", "1", "--max_steps", "6"]


@pytest.mark.parametrize("more", sample([[]], [[], ["--lora", "--learning_rate", "3"], ["--ema_decay", "0.5"]]))
def test_the_best_model_is_in_final_at_the_end(train, kill_after, tmp_path, capsys, more):
    """With the figures that it has; resumed, too."""
    flags = [*IMAGES, *WORSE, *more, "--save_every", "2"]
    train(*flags, output="last")
    rows = [row for row in rows_of(tmp_path / "last") if "eval/loss" in row]
    best = min(rows, key=lambda row: row["eval/loss"])
    assert best["step"] < 6
    flags += ["--save_best", "eval_loss"]
    with kill_after(5):
        train(*flags)
    results = train(*flags, "--resume")
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


@pytest.mark.slow
def test_the_best_model_in_shards(train_on_ranks, tmp_path):
    flags = [*IMAGES, *WORSE, "--save_best", "--shard", "full"]
    results, _ = train_on_ranks(2, *flags)
    assert results["eval"]["loss"] == min(row["eval/loss"] for row in rows_of(tmp_path / "run") if "eval/loss" in row)
    assert (tmp_path / "run/final/model.safetensors").exists()
