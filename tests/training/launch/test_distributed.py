"""What one rank finds all ranks end with, and rank 0 has been there before the others."""

from functools import partial

import pytest

from memsave_recipes.core.errors import InputError
from memsave_recipes.training.launch import distributed
from memsave_recipes.training.launch.distributed import main_process_first, require_same, told_to_rank_0

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


def tell(folder, failing_rank, failure, lost_on, accelerator):
    """What a rank has of what all told rank 0, or what it ended with."""
    rank = accelerator.process_index

    def action():
        if rank == failing_rank:
            raise failure("bad row 3")
        return f"part {rank}"

    with pytest.MonkeyPatch.context() as patch:
        if rank in lost_on:
            patch.setattr(distributed, "_get_default_store", LostStore)
        try:
            return told_to_rank_0("a topic", action, folder)
        except Exception as error:
            return type(error).__name__, str(error)


@pytest.mark.parametrize("lost_on", [(), (0, 1, 2), (0,), (1,), (1, 2)])
def test_rank_0_is_told_also_where_the_store_went_with_its_launcher(run_on_ranks, tmp_path, lost_on):
    found = run_on_ranks(partial(tell, tmp_path, None, None, lost_on), 3)
    assert found == [["part 0", "part 1", "part 2"], None, None]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lost_on", [(), (0, 1)])
@pytest.mark.parametrize(
    ("failure", "of_rank_0"),
    [
        (InputError, ("InputError", "bad row 3")),
        (MemoryError, ("MemoryError", "another rank failed: bad row 3")),
        (OSError, ("RuntimeError", "another rank failed: bad row 3")),
    ],
)
def test_a_rank_that_fails_has_its_own_error_and_rank_0_knows_its_kind(
    run_on_ranks, tmp_path, failure, of_rank_0, lost_on
):
    own = (failure.__name__, "bad row 3")
    assert run_on_ranks(partial(tell, tmp_path, 1, failure, lost_on), 2) == [of_rank_0, own]
    assert run_on_ranks(partial(tell, tmp_path, 0, failure, lost_on), 2) == [own, None]
