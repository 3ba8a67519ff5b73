"""The clock on a clock of ours: what counts, what waits, what is left out."""

import pytest

from memsave_recipes.measure import clock as clock_module
from memsave_recipes.measure.clock import StepClock


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
            with clock.left_out():
                seconds[0] += 1000
    steady = {"samples_per_sec": 2.0, "step_time_s": 4.0, "data_wait_pct": 25.0}
    assert windows == [{}, steady, steady]
    assert clock.figures() == steady
    assert clock.train_time_s == 2 * 51 + 4 * 4


def test_no_figures_without_a_step(seconds):
    assert StepClock().end_window() == {}
    assert StepClock().figures() == {}
