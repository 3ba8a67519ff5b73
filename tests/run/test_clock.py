"""The clock on a clock of ours: what counts, what waits, what is left out."""

import json

import pytest
import torch

from memsave_recipes.run import clock as clock_module
from memsave_recipes.run.clock import StepClock

GPU = torch.device("cuda")


@pytest.fixture
def seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: now[0])
    return now


def batches(seconds, number, loading):
    for batch in range(number):
        seconds[0] += loading
        yield batch


def test_figures_leave_out_the_warm_up_and_evaluations(seconds):
    clock = StepClock(warmup_steps=2)
    windows = []
    for batch in clock.loading(batches(seconds, 6, loading=1)):
        seconds[0] += 50 if batch < 2 else 3
        clock.step(samples=8)
        if batch % 2:
            windows.append(clock.end_window())
            with clock.paused():
                seconds[0] += 1000
    steady = {"samples_per_sec": 2.0, "step_time_s": 4.0, "data_wait_pct": 25.0}
    assert windows == [{}, steady, steady]
    assert clock.figures() == steady
    assert clock.train_time_s == 2 * 51 + 4 * 4


def test_no_figures_without_a_step(seconds):
    assert StepClock().end_window() == {}
    assert StepClock().figures() == {}


def test_a_resumed_clock_goes_on(seconds):
    clock = StepClock(warmup_steps=1)
    for batch in clock.loading(batches(seconds, 4, loading=1)):
        seconds[0] += 9 if batch == 0 else 3
        clock.step(samples=8, tokens=torch.tensor(20))
    clock.end_window()
    seconds[0] += 2  # of a window that the checkpoint cuts short
    state = clock.state_dict()
    assert all(type(value) in (int, float) for value in state.values())

    seconds[0] += 5000
    resumed = StepClock(warmup_steps=1)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.figures() == clock.figures()
    assert resumed.train_time_s == 10 + 3 * 4 + 2
    for _ in range(2):
        seconds[0] += 10
        resumed.step(samples=8, tokens=20)
    resumed.end_window()
    assert resumed.figures() == {
        "samples_per_sec": 4 * 8 / (3 * 4 + 10),  # the resumed process warms up again
        "tokens_per_sec": 4 * 20 / (3 * 4 + 10),
        "step_time_s": (3 * 4 + 10) / 4,
        "data_wait_pct": 100 * 3 / (3 * 4 + 10),
    }
    assert resumed.train_time_s == 10 + 3 * 4 + 2 + 20


def test_a_state_is_not_changed_by_loading_it(seconds):
    state = StepClock().state_dict()
    StepClock().load_state_dict(state)
    assert "train_time_s" in state


def test_what_is_saved_while_time_is_left_out_knows_nothing_of_that_time(seconds):
    clock = StepClock()
    seconds[0] += 2
    with clock.paused():
        seconds[0] += 50  # of an evaluation that a signal ends
        assert clock.state_dict()["train_time_s"] == 2
    assert clock.train_time_s == 2
    seconds[0] += 3
    assert clock.train_time_s == 5


@pytest.fixture
def queued(monkeypatch, seconds):
    """The seconds that an accelerator still has to do; waiting for it takes them."""
    left = [0.0]

    def synchronize(device):
        assert device == GPU
        seconds[0] += left[0]
        left[0] = 0.0

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    return left


def test_an_evaluation_begins_when_the_steps_are_done(seconds, queued):
    """What is still queued would be done within the time that is left out."""
    clock = StepClock(warmup_steps=1, device=GPU)
    clock.step(samples=8)
    clock.step(samples=8)
    queued[0] = 7.0
    with clock.paused(synchronize=True):
        assert queued[0] == 0
        seconds[0] += 1000
    assert clock.end_window()["step_time_s"] == clock.train_time_s == 7


def test_a_checkpoint_is_due_while_time_is_left_out(seconds, queued):
    """Whether one is saved is known only then, and only then has the device to be waited for."""
    clock = StepClock(warmup_steps=1, device=GPU)
    clock.step(samples=8)
    clock.step(samples=8)
    queued[0] = 7.0
    with clock.paused():
        assert queued[0] == 7
        seconds[0] += 1
        clock.synchronize()
        seconds[0] += 50
        assert clock.state_dict()["train_time_s"] == 7
    assert clock.end_window()["step_time_s"] == clock.train_time_s == 7


def test_a_run_on_the_cpu_leaves_the_accelerators_of_the_machine_alone(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: pytest.fail("makes a context on a device"))
    clock = StepClock(warmup_steps=1, device=torch.device("cpu"))
    clock.step(samples=8)
    with clock.paused(synchronize=True):
        pass
    clock.end_window()
