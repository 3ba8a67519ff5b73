"""A signal to one rank, to all or to the group: the step is finished and saved, and the run goes on exactly."""

import signal
from itertools import product

import pytest
from samples import sample
from trials.run import Run
from trials.signalling import ALL, GROUP, ONE, signal_trials

TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
FEW = [(TERM, ONE, 2), (INT, GROUP, 2)]
ONCE, OFTEN = range(1), pytest.param(range(1, 6), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])


@pytest.mark.parametrize("seeds", [ONCE, OFTEN], ids=lambda seeds: f"{len(seeds)} trials")
@pytest.mark.parametrize(("number", "target", "workers"), sample(FEW, product((TERM, INT), (ONE, ALL, GROUP), (0, 2))))
def test_a_signal_ends_two_ranks_gracefully(run_trial, tmp_path, number, target, workers, seeds):
    run = Run(folder=tmp_path, world=2, workers=workers)
    outcome = run_trial(signal_trials, run, number, target, seeds, timeout_s=1200)
    print(number.name, target, workers, {name: found for name, found in outcome.items() if found})
    assert (outcome["inexact"], outcome["hangs"], outcome["orphans"]) == ([], 0, 0), outcome
    assert outcome["graceful"] >= 0.95 * len(seeds), outcome


@pytest.mark.parametrize(("number", "workers"), [(TERM, 0), (USR1, 2)])
def test_a_signal_ends_one_rank_gracefully(run_trial, tmp_path, number, workers):
    run = Run(folder=tmp_path, workers=workers)
    outcome = run_trial(signal_trials, run, number, GROUP, range(2))
    assert (outcome["inexact"], outcome["ungraceful"], outcome["orphans"]) == ([], [], 0)
