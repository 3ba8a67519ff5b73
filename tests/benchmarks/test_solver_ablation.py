"""The benchmark: what greedy and uniform plans find, by hand, and that none beats the exact one."""

import pytest
from chains import block, option

from memsave_recipes.core.plans import Action
from memsave_recipes.core.plans.chain import Chain


def kept_and_selected(name, *, saved, selected, added_s, seconds, **sizes):
    """A block that saves its input besides, and may save less with ``select_ops``."""
    keeps = option(saved=saved, saves="i")
    selects = option(Action.SELECT_OPS, added_s=added_s, saved=selected, saves="i")
    return block(name, keeps, selects, output=10, seconds=seconds, **sizes)


@pytest.fixture
def chain():
    """By a second ``a`` saves most, 40 bytes in 1 s; then ``b`` by recomputing, 100 bytes in 4 s."""
    return Chain(
        blocks=(
            kept_and_selected("a", saved=60, selected=20, added_s=1.0, seconds=3.0),
            kept_and_selected("b", saved=100, selected=90, added_s=1.0, seconds=4.0),
        ),
        resident_bytes=1000,
    )


def test_greedy_takes_the_best_ratio_first(load, chain):
    ablation = load("solver_ablation")
    assert [one.added_s for one in ablation.greedily(chain)] == [0.0, 1.0, 5.0, 7.0]
    peaks = [one.peak_bytes for one in ablation.greedily(chain)]
    assert peaks == sorted(peaks, reverse=True)
    assert ablation.first([*ablation.greedily(chain)], peaks[1]) == 1.0
    assert ablation.first([*ablation.greedily(chain)], peaks[-1] - 1) is None


def test_uniform_ways_try_every_k(load, chain):
    ablation = load("solver_ablation")
    assert sorted(one.added_s for one in ablation.every_kth(chain)) == [1.0, 2.0, 3.0, 7.0]
    assert [one.added_s for one in ablation.in_segments(chain)] == [0.0, 3.0]


@pytest.mark.slow
def test_no_way_beats_the_solver(load, tmp_path):
    ablation = load("solver_ablation")
    found = ablation.main(["--quick", "--output_dir", str(tmp_path)])
    (model,) = found["models"]
    for row in model["budgets"]:
        assert row["gap"] == 0.0
        assert all(lost >= -1e-9 for lost in row["lost"].values() if lost is not None)
    assert {way: one["without_plan"] for way, one in model["summary"].items()} == {
        way: sum(row["lost"][way] is None for row in model["budgets"]) for way in ablation.WAYS
    }
