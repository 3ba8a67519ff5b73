"""The verdict on budgets: no slower than with less memory, and the same time when planned again."""

from itertools import count
from random import Random
from types import SimpleNamespace

import pytest

PLAIN = SimpleNamespace(spans="plain")


def planned(spans, noise_s=0.011):
    """A forecast of x1.1 with this noise."""
    return SimpleNamespace(plan=SimpleNamespace(spans=spans), noise_s=noise_s, micro_batch_s=1.1, baseline_s=1.0)


def times(module, **ratios):
    return {spans: module.Timed(SimpleNamespace(spans=spans), own) for spans, own in ratios.items()}


def test_a_budget_is_held_against_all_smaller_ones_and_against_its_other_plans(load):
    block_times = load("block_times")
    timed = times(block_times, a=[1.21] * 3, b=[1.10] * 3, c=[1.13] * 4, d=[1.2] * 3)
    found = [[planned("a")] * 3, [planned("b"), planned("b"), planned("c")], [planned("c")] * 3]
    found.append([planned("b"), planned("d", 0.2), planned("b")])
    rows = block_times.rows_of("ViT", [1, 2, 3, 4], found, timed)
    assert [row["time_ratio"] for row in rows] == [1.21, 1.10, 1.13, 1.10]
    assert [round(row["slower_pct"], 1) for row in rows] == [0, 0, 2.7, 0]
    assert [round(row["spread_pct"], 1) for row in rows] == [0, 2.7, 0, 9.1]
    assert [row["noise_pct"] for row in rows] == pytest.approx([1, 1, 1, 100 * 0.2 / 1.1])
    assert [row["num_plans"] for row in rows] == [1, 2, 1, 2]
    assert [row["num_rounds"] for row in rows] == [[3] * 3, [3, 3, 4], [4] * 3, [3] * 3]
    assert block_times.verdict(rows) == {"budgets": 4, "no_slower": 3, "alike": 3}


def test_times_whose_rounds_differ_are_told_apart_by_more(load):
    block_times = load("block_times")
    timed = times(block_times, b=[1.10] * 4, c=[1.11, 1.15, 1.13, 1.13])
    rows = block_times.rows_of("ViT", [1, 2], [[planned("b")] * 3, [planned("c")] * 3], timed)
    assert [row["error_pct"] for row in rows] == pytest.approx([0, 0.906], abs=0.001)  # 1.2533 * 0.01633 / 2 / 1.13
    assert [row["least_told_pct"] for row in rows] == pytest.approx([2, 2.906], abs=0.001)
    assert block_times.verdict(rows)["no_slower"] == 2


@pytest.mark.parametrize(("wild", "turns"), [(0.0, 4), (1.0, 80)])
def test_unknown_times_take_more_turns(load, wild, turns):
    rng = Random(0)
    trained = SimpleNamespace(seconds_of=lambda plan: 1 + wild * rng.random() * (plan.spans != "plain"))
    found = [[planned("a")] * 3, [planned("b"), planned("c"), planned("c")], [planned("plain")] * 3]
    timed = load("block_times").time_all(trained, PLAIN, found, 4)
    assert sorted(timed) == ["a", "b", "c", "plain"]
    assert max(len(timed[plan].ratios) for plan in "abc") == turns
    assert timed["plain"].time_ratio == 1


def test_a_machine_that_slows_down_steadily_slows_both(load):
    slower = count(100)
    trained = SimpleNamespace(seconds_of=lambda plan: next(slower))
    timed = load("block_times").time_all(trained, PLAIN, [[planned("a")] * 3], 3)
    assert timed["a"].ratios == pytest.approx([1.0] * 3)
