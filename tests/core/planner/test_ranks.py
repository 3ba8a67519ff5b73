"""Ranks that plan together: what one meets, all do."""

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.trial_step import Ranks


def outcomes_together(accelerator):
    return outcomes_of(Ranks.of_world())


def outcomes_of(ranks):
    errors = [RuntimeError("CUDA error: out of memory"), InputError("budget_gib 1 is too small"), KeyError("a")]
    return [ranks.of_first(lambda: ranks.rank), ranks.largest(10 * ranks.rank), *(told(ranks, one) for one in errors)]


def told(ranks, error):
    def fail_on_the_last():
        if ranks.rank == ranks.number - 1:
            raise error
        return "done"

    try:
        return ranks.attempt(fail_on_the_last)
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"


def test_two_ranks_meet_the_same(run_on_ranks):
    first, second = run_on_ranks(outcomes_together, 2)
    assert first[:4] == second[:4] == [0, 10, None, "InputError: budget_gib 1 is too small"]
    assert first[4] == "RuntimeError: another rank failed: 'a'"
    assert second[4] == "KeyError: 'a'"


def test_a_process_that_is_alone():
    assert outcomes_of(Ranks()) == [0, 0, None, "InputError: budget_gib 1 is too small", "KeyError: 'a'"]


def test_without_a_process_group_a_process_is_alone():
    assert Ranks.of_world() == Ranks(0, 1)
