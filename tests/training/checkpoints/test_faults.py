"""A fault from outside ends the run on every rank, in one line where it is the user's, and costs no checkpoint."""

import pytest
from trials.faults import change_of_world, fault_trial, two_runs, unseen_by_rank_1
from trials.run import NUM_STEPS, Run


@pytest.mark.parametrize("world", [1, 2])
def test_a_full_disk_stops_all_ranks_and_keeps_the_last_checkpoint(run_trial, tmp_path, world):
    outcome = run_trial(fault_trial, Run(folder=tmp_path, world=world), "disk full")
    assert outcome["codes"] == [2] * world
    words = {end["refused"] for end in outcome["ends"]}
    assert len(words) == 1
    assert words.pop().startswith(
        f"--output_dir {tmp_path / 'trial'}: step-6 cannot be written or deleted, no space left on device"
    )
    assert outcome["left"] == ["step-2", "step-4"]
    assert outcome["problems"] == []


def test_a_defect_while_saving_stops_all_ranks_with_its_traceback(run_trial, tmp_path):
    outcome = run_trial(fault_trial, Run(folder=tmp_path, world=2), "defect")
    assert outcome["codes"] == [1, 1]
    assert "ZeroDivisionError: a defect" in outcome["ends"][0]["failed"]
    assert "another rank failed: a defect" in outcome["ends"][1]["failed"]
    assert outcome["left"] == ["step-2", "step-4"]
    assert outcome["problems"] == []


def test_a_rank_that_does_not_see_the_checkpoints_stops_all(run_trial, tmp_path):
    outcome = run_trial(unseen_by_rank_1, Run(folder=tmp_path, world=2))
    assert outcome["codes"] == [2, 2]
    assert all("is not seen by all ranks, so they cannot resume" in end["refused"] for end in outcome["ends"])


@pytest.mark.parametrize("worlds", [[1, 2], [3, 1]])
def test_another_world_trains_the_same_samples_and_says_so(run_trial, tmp_path, worlds):
    straight = run_trial(change_of_world, Run(folder=tmp_path / "straight"), [1])[0]["steps"]
    _, last = run_trial(change_of_world, Run(folder=tmp_path / "changed"), worlds)
    assert last["codes"] == [0] * worlds[1]
    assert {step: last["steps"][step] for step in range(4, NUM_STEPS)} == {s: straight[s] for s in range(4, NUM_STEPS)}
    assert sorted(straight) == list(range(NUM_STEPS))
    notices = [line["notices"] for line in last["log"] if line.get("resumed")]
    assert len(notices) == 1
    assert "data-exact, every step trains the same samples, but not bit-exact" in notices[0][0]


def test_a_world_that_cannot_hold_the_global_batch_is_refused(run_trial, tmp_path):
    _, last = run_trial(change_of_world, Run(folder=tmp_path, global_batch_size=2), [1, 3])
    assert last["codes"] == [2, 2, 2]
    assert all(line["refused"].startswith("--global_batch_size 2 is smaller than the 3 ranks") for line in last["last"])


@pytest.mark.parametrize("world", [1, 2])
def test_two_runs_in_one_folder(run_trial, tmp_path, world):
    outcome = run_trial(two_runs, Run(folder=tmp_path / "run", world=world))
    codes, ends = outcome["second"]
    assert codes == [2] * world
    words = f"--output_dir {tmp_path / 'run'} belongs to a run that has not ended: wait for it, or name another folder"
    assert [end["refused"] for end in ends] == [words] * world
    assert outcome["third"] == [0] * world  # the lock ended with its process
