"""Numbers that are not finite stop a run before they reach a weight, or are left out and counted."""

import json
from itertools import count
from threading import Event

import pytest
import torch
from safetensors.torch import load_file
from samples import sample

from memsave_recipes.data.vision.images import ImageDataset
from memsave_recipes.run.failures import NOT_FINITE
from memsave_recipes.run.training_run import TrainingRun
from memsave_recipes.training.batching import GlobalBatch
from memsave_recipes.training.checkpoints.saver import Checkpoints, _Writing

RECIPE = "image_classification"
SHORT = ["--model", "vgg_small", "--global_batch_size", "16", "--max_steps", "6", "--logging_steps", "6"]
SHORT += ["--dataloader_num_workers", "0"]


@pytest.fixture
def spoil(monkeypatch):
    """Makes the loss of some steps (from 0) a number that is none."""
    backward = GlobalBatch.backward

    def arm(*steps, factor=float("nan")):
        def spoiled(self, loss_sum):
            backward(self, loss_sum * (factor if self.step in steps else 1))

        monkeypatch.setattr(GlobalBatch, "backward", spoiled)

    return arm


@pytest.fixture
def loaded(monkeypatch):
    """The places of the training samples in the data set, as they are loaded."""
    places, get = [], ImageDataset.__getitems__

    def get_noted(self, keys):
        places.extend(key.index for key in keys)
        return get(self, keys)

    monkeypatch.setattr(ImageDataset, "__getitems__", get_noted)
    return places


def test_a_save_beside_the_training_ends_first(ending, spoil, tmp_path, monkeypatch):
    waited_for, finish_writing = Event(), Checkpoints.finish_writing

    def save(self, step, state, *, in_background=False):
        self._writing = _Writing(step, lambda: waited_for.wait() and (tmp_path / "written").touch())

    monkeypatch.setattr(Checkpoints, "save", save)
    monkeypatch.setattr(Checkpoints, "finish_writing", lambda self: waited_for.set() or finish_writing(self))
    spoil(3)
    assert ending(*SHORT, "--save_every", "2")[0] == NOT_FINITE
    assert (tmp_path / "written").exists()


@pytest.mark.parametrize(("optimizer", "factor"), [("adamw", float("nan")), ("sgd", float("inf"))])
def test_a_step_that_is_not_finite_stops_the_run(ending, spoil, loaded, tmp_path, factor, optimizer):
    spoil(3, factor=factor)
    code, line = ending(*SHORT, "--save_every", "2", "--optimizer", optimizer)
    assert code == NOT_FINITE == 4
    assert line.startswith(f"error: step 4 is not finite (loss {factor}, gradient norm nan), its samples are ")
    assert f"its samples are {', '.join(map(str, loaded[3 * 16 : 4 * 16]))};" in line
    assert "--learning_rate" in line
    assert "--skip_nonfinite N" in line
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]


def test_a_gradient_that_is_not_finite_stops_the_run(ending, monkeypatch):
    """The loss is fine: only the norm shows it."""
    clip, calls = TrainingRun.clip_gradients, count()

    def infinite(training):
        if next(calls) == 2:
            next(training.prepared.model.parameters()).grad[0] = float("inf")
        return clip(training)

    monkeypatch.setattr(TrainingRun, "clip_gradients", infinite)
    code, line = ending(*SHORT)
    assert code == NOT_FINITE
    assert line.startswith("error: step 3 is not finite (loss 2.3")


def test_weights_that_an_update_makes_infinite_are_not_saved(ending, tmp_path):
    """The first step has a rate of 0, the second multiplies the weights with more than float32 holds."""
    flags = ["--learning_rate", "1e30", "--weight_decay", "1e30", "--warmup_steps", "2"]
    code, line = ending(*SHORT, *flags, "--save_every", "1", "--keep_checkpoints", "1")
    assert code == NOT_FINITE
    assert line.startswith("error: the weights are not finite after step 2, although its loss was")
    assert "the last checkpoint is of step 1" in line
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-1"]


@pytest.mark.parametrize(("model", "optimizer"), [("vgg_small", "adafactor"), ("densenet_small", "sgd")])
def test_steps_are_left_out_and_counted(train, spoil, tmp_path, capsys, model, optimizer):
    spoil(1, 4)
    flags = [*SHORT, "--model", model, "--optimizer", optimizer, "--skip_nonfinite", "2"]
    results = train(*flags, "--save_every", "3")
    assert results["skipped_steps"] == 2
    printed = capsys.readouterr().out
    assert "note: step 2 is not finite" in printed
    assert "note: step 5 is not finite" in printed
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if "train/loss" in row]
    assert row["train/skipped_steps"] == 2
    assert 0 < row["train/loss"] < 5
    weights = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert results["eval"]["loss"] < 5


def test_one_more_than_allowed_stops_the_run(ending, spoil):
    spoil(1, 4)
    code, line = ending(*SHORT, "--skip_nonfinite", "1")
    assert code == NOT_FINITE
    assert line.startswith("error: step 5 is not finite")


@pytest.mark.parametrize("optimizer", sample(["adamw"], ["adamw", "sgd", "adafactor"]))
def test_a_step_that_is_left_out_changes_nothing(train, spoil, tmp_path, optimizer):
    """Neither weights nor the optimizer's state: a last step that is left out might as well not have been."""
    flags = ["--lr_scheduler_type", "constant", "--optimizer", optimizer, "--skip_nonfinite", "1", "--full_determinism"]
    train(*SHORT, *flags, "--max_steps", "5", "--save_every", "5", output="five")
    spoil(5)
    train(*SHORT, *flags, "--save_every", "6", output="six")
    for path in (tmp_path / "five" / "checkpoints" / "step-5").glob("*.safetensors"):
        expected, found = load_file(path), load_file(tmp_path / "six" / "checkpoints" / "step-6" / path.name)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_first_step_that_is_left_out_leaves_no_momentum(train, spoil, tmp_path):
    """Torch leaves it uninitialised, which deterministic kernels make NaN; and so it was saved, and is loaded."""
    flags = [*SHORT, "--optimizer", "sgd", "--skip_nonfinite", "1", "--save_every", "1", "--full_determinism"]
    spoil(0)
    train(*flags, "--lr_scheduler_type", "constant", "--max_steps", "1")
    results = train(*flags, "--lr_scheduler_type", "constant", "--resume")
    assert results["skipped_steps"] == 1
    assert results["train_loss"] < 5
    weights = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_in_backward_there_is_nothing_to_leave_out(refuse):
    line = refuse(*SHORT, "--optimizer_in_backward", "--max_grad_norm", "0", "--skip_nonfinite", "1")
    assert "drop --skip_nonfinite" in line
