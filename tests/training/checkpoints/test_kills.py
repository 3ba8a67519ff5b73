"""SIGKILL anywhere, and the run ends with the bits it would have had: weights, optimizer, every step's loss."""

import pytest
from trials.killing import kill_trials
from trials.run import Run

FEW, ALL = range(3), pytest.param(range(10, 74), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])
FEW_SAVES = range(600, 601)
ALL_SAVES = pytest.param(range(610, 634), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])
FEW_OF_THE_RECIPE = range(400, 401)
ALL_OF_THE_RECIPE = pytest.param(range(410, 420), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])


def kill(run_trial, run, seeds):
    outcome = run_trial(kill_trials, run, seeds, timeout_s=1200)
    print(f"{outcome['kills']} kills in {len(seeds)} trials of {run.world} process(es)")
    assert outcome["problems"] == {}
    assert outcome["kills"] >= len(seeds)


@pytest.mark.parametrize("seeds", [FEW, ALL], ids=lambda seeds: f"{len(seeds)} trials")
@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(run_trial, tmp_path, world, seeds):
    """Half of the kills at named points inside step, save and resume; of one rank or all; up to three a trial."""
    kill(run_trial, Run(folder=tmp_path, world=world), seeds)


@pytest.mark.parametrize("seeds", [FEW_SAVES, ALL_SAVES], ids=lambda seeds: f"{len(seeds)} trials")
def test_so_does_one_in_shards_that_is_killed_while_it_saves(run_trial, tmp_path, seeds):
    """At random times within saves, to which every rank writes its part."""
    kill(run_trial, Run(folder=tmp_path, world=2, shard="full", every_steps=1), seeds)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [FEW_OF_THE_RECIPE, ALL_OF_THE_RECIPE], ids=lambda seeds: f"{len(seeds)} trials")
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_so_does_the_recipe_with_its_default_data(run_trial, tmp_path, world, seeds):
    kill(run_trial, Run(folder=tmp_path, world=world, recipe=True), seeds)


@pytest.mark.slow
def test_so_does_the_recipe_on_three_ranks(run_trial, tmp_path):
    """Where the order of a sum depends on where DDP puts a gradient."""
    kill(run_trial, Run(folder=tmp_path, world=3, recipe=True), range(500, 504))


def test_a_killed_run_with_data_workers(run_trial, tmp_path):
    outcome = run_trial(kill_trials, Run(folder=tmp_path, workers=2), range(300, 302))
    assert outcome["problems"] == {}
