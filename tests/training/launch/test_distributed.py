"""What one rank finds all ranks end with, and rank 0 has been there before the others."""

import time
from functools import partial

import pytest

from memsave_recipes.core.errors import InputError
from memsave_recipes.training.launch import distributed
from memsave_recipes.training.launch.distributed import main_process_first, on_all_at_leisure, require_same

FAILURES = {
    InputError: ("InputError", "bad row 3"),
    MemoryError: ("MemoryError", "another rank failed: bad row 3"),
    KeyError: ("RuntimeError", "another rank failed: 'bad row 3'"),
}


def work(folder, failing_rank, failure, accelerator):
    """What a rank saw of rank 0's work, and what it ended with."""
    saw = None
    try:
        with main_process_first(accelerator):
            saw = (folder / "done").exists()
            if accelerator.process_index == failing_rank:
                raise failure("bad row 3")
            (folder / "done").touch()
    except Exception as error:
        return saw, type(error).__name__, str(error)
    return saw, None, None


def test_rank_0_goes_first(run_on_ranks, tmp_path):
    assert run_on_ranks(partial(work, tmp_path, None, None), 2) == [(False, None, None), (True, None, None)]


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("failure", FAILURES)
def test_where_one_fails_all_do(run_on_ranks, tmp_path, failing_rank, failure):
    ended = run_on_ranks(partial(work, tmp_path, failing_rank, failure), 2)
    own = (failure.__name__, str(failure("bad row 3")))
    for rank, (saw, *end) in enumerate(ended):
        assert tuple(end) == (own if rank == failing_rank else FAILURES[failure])
        assert saw is (None if rank > failing_rank else rank == 1)


def test_a_rank_alone_fails_with_its_own_error(run_on_ranks, tmp_path):
    assert run_on_ranks(partial(work, tmp_path, 0, KeyError), 1) == [(False, "KeyError", "'bad row 3'")]


def same_or_refused(versions, accelerator):
    try:
        require_same(accelerator, versions[accelerator.process_index], "install the same")
    except InputError as error:
        return str(error)
    return None


def test_values_that_are_not_those_of_rank_0_are_refused_on_all_ranks(run_on_ranks):
    same, other = {"torch": "2.13.0", "accelerate": "1.15.0"}, {"torch": "2.12.1", "accelerate": "1.15.0"}
    assert run_on_ranks(partial(same_or_refused, [same, same]), 2) == [None, None]
    line = "rank 1 has torch 2.12.1, rank 0 has 2.13.0: install the same"
    assert run_on_ranks(partial(same_or_refused, [same, other]), 2) == [line, line]


def lost(*args):
    raise RuntimeError("Broken pipe")


class LostStore:
    set = check = get = lost


def part_of(folder, failing_rank, failure, lost_on, accelerator):
    """What a rank has made at its leisure, or what it ended with; rank 1 is the last, by far."""
    rank = accelerator.process_index

    def action():
        if rank == failing_rank:
            raise failure("bad row 3")
        time.sleep(0.5 * (rank == 1))
        (folder / f"part-{rank}").touch()
        return f"part {rank}"

    with pytest.MonkeyPatch.context() as patch:
        if rank in lost_on:
            patch.setattr(distributed, "_get_default_store", LostStore)
        patch.setattr(distributed, "fail_together", partial(met, folder, distributed.fail_together))
        try:
            return on_all_at_leisure(accelerator, action)
        except Exception as error:
            return type(error).__name__, str(error)


def met(folder, fail_together, error):
    """The ranks come to the collective when all are done, where there is a store to tell."""
    if error is None:
        (folder / f"there-{len(list(folder.glob('part-*')))}").touch()
    fail_together(error)


@pytest.mark.parametrize("lost_on", [(), (0, 1, 2)])
def test_all_wait_outside_of_a_collective_until_all_are_done(run_on_ranks, tmp_path, lost_on):
    found = run_on_ranks(partial(part_of, tmp_path, None, None, lost_on), 3)
    assert found == ["part 0", "part 1", "part 2"]
    early = {path.name for path in tmp_path.glob("there-*")} - {"there-3"}
    assert bool(early) == bool(lost_on)


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("failure", FAILURES)
def test_what_is_done_at_leisure_fails_on_all(run_on_ranks, tmp_path, failing_rank, failure):
    ended = run_on_ranks(partial(part_of, tmp_path, failing_rank, failure, ()), 2)
    own = (failure.__name__, str(failure("bad row 3")))
    assert ended == [own if rank == failing_rank else FAILURES[failure] for rank in range(2)]
