"""When a run saves, what it keeps, and what it refuses to go on from."""

import os
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.step.batch_layout import BatchLayout, SampleOrder
from memsave_recipes.training.checkpoints import Checkpoints, StoppedBySignal, StopSignals, TrainState
from memsave_recipes.training.launch import distributed
from memsave_recipes.training.launch.distributed import RankPoll
from memsave_recipes.training.launch.start import Accelerator
from memsave_recipes.training.optimizers import NotFinite

ORDER = SampleOrder(num_samples=20, global_batch_size=4, seed=1)
LAYOUT = BatchLayout.of(4, 2, 1)


def make(folder, *, of=None, order=ORDER, layout=LAYOUT, **settings):
    accelerator, model = Accelerator(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    training = of or TrainState(accelerator, model, optimizer, scheduler)
    return Checkpoints(accelerator, folder, training, order=order, layout=layout, **settings)


def names(folder):
    return sorted(os.listdir(folder))


def test_saves_are_made_every_so_many_steps_and_the_newest_kept(tmp_path):
    checkpoints, asked = make(tmp_path, every_steps=3), []
    for step in range(1, 11):
        checkpoints.after_step(step, lambda step=step: asked.append(step) or {})
    assert asked == [3, 6, 9]  # nothing is gathered where nothing is saved
    assert names(tmp_path) == ["step-6", "step-9"]


def test_saves_are_made_every_so_many_minutes(tmp_path, monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    checkpoints, saved = make(tmp_path, every_minutes=2), []
    for step in range(1, 8):
        now += 50
        checkpoints.after_step(step, lambda step=step: saved.append(step) or {})
    assert saved == [3, 6]


def test_without_either_a_run_saves_when_it_is_stopped(tmp_path):
    with StopSignals() as signals:
        checkpoints = make(tmp_path, signals=signals)
        checkpoints.after_step(1, dict)
        assert names(tmp_path) == []
        os.kill(os.getpid(), 15)
        with pytest.raises(StoppedBySignal, match="143"):
            checkpoints.after_step(2, dict)
    assert names(tmp_path) == ["step-2"]


def test_a_step_is_saved_once(tmp_path):
    checkpoints = make(tmp_path)
    checkpoints.save(4, {"first": True})
    checkpoints.save(4, {"first": False})
    assert make(tmp_path).resume().state == {"first": True}


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_weights_that_are_not_finite_cost_no_checkpoint(run_on_ranks, tmp_path, number):
    for line in run_on_ranks(partial(save_spoiled, tmp_path, number), 2):
        assert line.startswith("the weights are not finite after step 2, although its loss was: they are not saved")
        assert "the last checkpoint is of step 1;" in line
    assert names(tmp_path) == ["step-1"]


def test_weights_that_were_never_finite_leave_no_checkpoint(tmp_path):
    checkpoints = make(tmp_path)
    torch.nn.init.constant_(checkpoints.training.model.weight, float("inf"))
    with pytest.raises(NotFinite, match="there is no checkpoint;"):
        checkpoints.save(1, {})
    assert names(tmp_path) == []


def save_spoiled(folder, number, accelerator):
    checkpoints = make(folder)
    checkpoints.save(1, {})
    with torch.no_grad():
        checkpoints.training.model.bias[1] = number
    with pytest.raises(NotFinite) as refusal:
        checkpoints.save(2, {})
    return str(refusal.value)


def test_the_best_is_kept_beside_the_newest_until_there_is_a_better_one(tmp_path):
    checkpoints = make(tmp_path, every_steps=1)
    for step in range(1, 6):
        checkpoints.after_step(step, dict)
        if step in (2, 4):
            checkpoints.save_best(step, [lambda folder: (folder / "model.safetensors").touch()])
    assert names(tmp_path) == ["best-4", "step-4", "step-5"]
    assert names(tmp_path / "best-4") == ["manifest.json", "model.safetensors"]


def test_a_run_goes_on_where_it_was(tmp_path):
    checkpoints = make(tmp_path)
    checkpoints.save(4, {"clock": {"seconds": 0.1 + 0.2}, "best": 0.9})
    resumed = make(tmp_path).resume()
    assert (resumed.step, resumed.notices) == (4, [])
    assert resumed.state == {"clock": {"seconds": 0.1 + 0.2}, "best": 0.9}


def test_a_folder_that_was_renamed_is_refused(tmp_path):
    make(tmp_path).save(4, {})
    (tmp_path / "step-4").rename(tmp_path / "step-8")
    with pytest.raises(InputError, match="step-8 holds step 4: give the folder its name back"):
        make(tmp_path).resume()


def test_a_run_without_checkpoints_begins_at_the_beginning(tmp_path):
    assert make(tmp_path / "checkpoints").resume() is None


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_samples", 21, "the number of training samples was 20 and is 21"),
        ("global_batch_size", 5, "--global_batch_size was 4 and is 5"),
        ("seed", 2, "--seed was 1 and is 2"),
    ],
)
def test_other_samples_are_refused(tmp_path, field, value, words):
    make(tmp_path).save(4, {})
    with pytest.raises(InputError, match=f"--resume: {words}, so the steps would train other samples"):
        make(tmp_path, order=replace(ORDER, **{field: value})).resume()


def test_another_batch_layout_is_announced(tmp_path):
    make(tmp_path).save(4, {})
    [notice] = make(tmp_path, layout=BatchLayout.of(4, 4, 1)).resume().notices
    assert notice.startswith(
        "note: saved as 4 samples = 2 x 1 rank x 2 accumulation steps, going on as 4 samples = 4 x"
    )


class TwoRanks:
    """What ``RankPoll`` needs of an accelerator, where the other rank has the same pace and its own value."""

    num_processes, device = 2, torch.device("cpu")

    def __init__(self):
        self.others, self.asked = 0, 0

    def gather(self, numbers):
        self.asked += 1
        return torch.cat([numbers, torch.tensor([[self.others, 1]])])


def test_ranks_ask_each_other_about_once_a_second(monkeypatch):
    now = 0.0
    monkeypatch.setattr(distributed.time, "monotonic", lambda: now)
    ranks = TwoRanks()
    poll = RankPoll(ranks)
    for step in range(1, 1001):
        now += 0.01
        assert poll.max(step, 0) == 0
    assert 10 <= ranks.asked <= 13


def test_a_value_of_any_rank_reaches_all(monkeypatch):
    monkeypatch.setattr(distributed, "POLL_EVERY_S", 0)
    ranks = TwoRanks()
    poll = RankPoll(ranks)
    assert poll.max(1, 15) == 15
    assert poll.max(2, 0) == 0
    ranks.others = 15
    assert poll.max(3, 0) == 15
    assert poll.max(4, 2) == 15
