"""The trials find what they are meant to find: every one of these defects is caught by one of them."""

import signal

import pytest
from trials.damage import damage_trials
from trials.killing import kill_trials
from trials.run import Run
from trials.signalling import GROUP, ONE, signal_trials

AT_MOST = 40
"""Trials until a defect has to be caught."""
CAUGHT_BY_KILLS = (
    "no_seed_of_dropout",
    "noise_from_the_workers",
    "position_off_by_one",
    "order_from_the_life",
    "saved_within_a_step",
    "optimizer_not_restored",
    "schedule_not_restored",
    "buffers_not_restored",
    "saved_in_place",
    "deleted_before_the_save",
)


@pytest.mark.slow
@pytest.mark.parametrize("broken", CAUGHT_BY_KILLS)
def test_kills_catch(run_trial, tmp_path, broken):
    outcome = run_trial(kill_trials, Run(folder=tmp_path, broken=broken), range(AT_MOST), 1)
    assert outcome["problems"]


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["not_verified", "only_sizes_verified", "from_zero_when_damaged"])
def test_damages_catch(run_trial, tmp_path, broken):
    assert run_trial(damage_trials, Run(folder=tmp_path, broken=broken), range(AT_MOST), 1, 1)


@pytest.mark.slow
def test_signals_catch_ranks_that_do_not_agree(run_trial, tmp_path):
    run = Run(folder=tmp_path, world=2, broken="signals_not_agreed")
    outcome = run_trial(signal_trials, run, signal.SIGTERM, ONE, range(1))
    assert outcome["hangs"] or outcome["ungraceful"]


@pytest.mark.slow
def test_signals_catch_workers_that_hear_them(run_trial, tmp_path):
    run = Run(folder=tmp_path, workers=2, broken="workers_hear_signals")
    outcome = run_trial(signal_trials, run, signal.SIGTERM, GROUP, range(3))
    assert outcome["ungraceful"] or outcome["orphans"]
