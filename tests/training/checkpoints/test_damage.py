"""Any damage to any file of the newest checkpoint is found; the one before is used, or a line names what is damaged."""

import pytest
from trials.damage import damage_trials
from trials.run import Run

FEW, ALL = range(12), pytest.param(range(12, 112), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])


@pytest.mark.parametrize("seeds", [FEW, ALL], ids=lambda seeds: f"{len(seeds)} trials")
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run_trial, tmp_path, seeds):
    assert run_trial(damage_trials, Run(folder=tmp_path), seeds, 1, timeout_s=1200) == {}


def test_two_ranks_agree_about_the_damage(run_trial, tmp_path):
    assert run_trial(damage_trials, Run(folder=tmp_path, world=2), range(300, 303), 1) == {}


@pytest.mark.parametrize("world", [1, 2])
def test_where_all_are_damaged_the_run_does_not_start_from_zero(run_trial, tmp_path, world):
    assert run_trial(damage_trials, Run(folder=tmp_path, world=world), range(4), 2) == {}
