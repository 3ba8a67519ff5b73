"""Numbers that are not finite stop a run before anything that they have changed is saved."""

from itertools import count

import pytest

from memsave_recipes.data.vision.images import ImageDataset
from memsave_recipes.run.failures import NOT_FINITE
from memsave_recipes.run.training_run import TrainingRun
from memsave_recipes.training.batching import GlobalBatch

RECIPE = "image_classification"
SHORT = ["--model", "vgg_small", "--global_batch_size", "16", "--max_steps", "6", "--logging_steps", "6"]
SHORT += ["--dataloader_num_workers", "0"]


@pytest.fixture
def spoil(monkeypatch):
    """Makes the loss of some steps (from 0) a number that is none."""
    share_of = GlobalBatch.share_of

    def arm(*steps, factor=float("nan")):
        def spoiled(self, loss_sum):
            return share_of(self, loss_sum * (factor if self.step in steps else 1))

        monkeypatch.setattr(GlobalBatch, "share_of", spoiled)

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


@pytest.mark.parametrize(("optimizer", "factor"), [("adamw", float("nan")), ("sgd", float("inf"))])
def test_a_step_that_is_not_finite_stops_the_run(ending, spoil, loaded, tmp_path, factor, optimizer):
    spoil(3, factor=factor)
    code, line = ending(*SHORT, "--save_every", "2", "--optimizer", optimizer)
    assert code == NOT_FINITE == 4
    assert line.startswith(f"error: step 4 is not finite (loss {factor}, gradient norm nan), its samples are ")
    assert f"its samples are {', '.join(map(str, loaded[3 * 16 : 4 * 16]))};" in line
    assert "--learning_rate" in line
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]


def test_the_step_is_named_and_not_the_evaluation_after_it(ending, spoil):
    spoil(3)
    assert ending(*SHORT, "--eval_steps", "1")[1].startswith("error: step 4 is not finite")


def test_a_gradient_that_is_not_finite_stops_the_run(ending, monkeypatch):
    """The loss is fine: only the norm shows it."""
    clip, calls = TrainingRun.clip_grad_norm_, count()

    def infinite(training, max_norm):
        if next(calls) == 2:
            next(training.model.parameters()).grad[0] = float("inf")
        return clip(training, max_norm)

    monkeypatch.setattr(TrainingRun, "clip_grad_norm_", infinite)
    code, line = ending(*SHORT)
    assert code == NOT_FINITE
    assert line.startswith("error: step 3 is not finite (loss 2.3")


def test_weights_that_an_update_makes_infinite_are_not_saved(ending, tmp_path):
    """The first step has a rate of 0, the second multiplies the weights with more than float32 holds."""
    flags = ["--learning_rate", "1e30", "--weight_decay", "1e30", "--warmup_steps", "2"]
    code, line = ending(*SHORT, *flags, "--save_every", "1")
    assert code == NOT_FINITE
    assert line.startswith("error: the weights are not finite after step 2, although its loss was")
    assert "the last checkpoint is of step 1" in line
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-1"]
