"""People are told by their trackers of a run that ends early or finds no memory."""

import os
import signal

import pytest
import torch

from memsave_recipes.run import run
from memsave_recipes.training.batching import GlobalBatch

RECIPE = "image_classification"
SHORT = ["--model", "vgg_small", "--image_size", "16", "--global_batch_size", "16", "--max_steps", "4"]
SHORT += ["--logging_steps", "1"]


@pytest.fixture
def alerts(monkeypatch):
    """Titles and texts."""
    sent = []
    monkeypatch.setattr(run, "alert", lambda _, title, text: sent.append((title, text)))
    return sent


@pytest.fixture
def at_step(monkeypatch):
    """``at_step({0: change})`` calls ``change(loss)`` in the backward of some steps, from 0."""
    share_of = GlobalBatch.share_of

    def arm(changes):
        def changed(self, loss_sum):
            return share_of(self, changes.get(self.step, lambda loss: loss)(loss_sum))

        monkeypatch.setattr(GlobalBatch, "share_of", changed)

    return arm


def test_a_step_that_is_not_finite(ending, at_step, alerts):
    at_step({0: lambda loss: loss * float("nan")})
    _, line = ending(*SHORT)
    assert alerts == [("the run has ended early", line.removeprefix("error: "))]


def test_a_run_that_finds_no_memory(recipe, at_step, alerts, tmp_path):
    def fail(loss):
        raise torch.OutOfMemoryError("no memory")

    at_step({1: fail})
    with pytest.raises(torch.OutOfMemoryError):
        recipe.main([*SHORT, "--report_to", "none", "--output_dir", str(tmp_path / "run")])
    ((title, text),) = alerts
    assert title == "out of memory"
    assert text.startswith("out of memory in step 2 on rank 0 of 1 (")


def test_a_run_that_a_signal_stops(recipe, at_step, alerts, tmp_path):
    at_step({1: lambda loss: os.kill(os.getpid(), signal.SIGTERM) or loss})
    with pytest.raises(SystemExit):
        recipe.main([*SHORT, "--report_to", "none", "--output_dir", str(tmp_path / "run")])
    ((title, text),) = alerts
    assert title == "the run has ended early"
    assert text.startswith("SIGTERM: stopped after 2 steps, all of them saved in ")


def test_a_run_that_is_done_sends_none(train, alerts):
    train(*SHORT)
    assert alerts == []
