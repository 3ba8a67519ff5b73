"""Turns, ratios and files of the harness."""

import json
from itertools import count

import pytest


@pytest.fixture(scope="module")
def harness(load):
    return load("harness")


def test_each_takes_one_turn_a_round_in_an_order_of_its_own(harness):
    order = list(harness.turns("abcdef", 4))
    rounds = ["".join(order[first : first + 6]) for first in range(0, 24, 6)]
    assert [sorted(one) for one in rounds] == [list("abcdef")] * 4
    assert len(set(rounds)) > 1
    assert list(harness.turns("ab", 2, shuffled=False)) == ["a", "b", "a", "b"]


def test_who_has_used_up_its_time_takes_no_more_turns(harness, monkeypatch):
    monkeypatch.setattr(harness, "seconds_of", lambda call: call())
    calls = count()
    seconds = harness.time_in_turns({"slow": lambda: 3.0, "fast": lambda: 1.0}, 3, max_s=4, before=lambda: next(calls))
    assert seconds == {"slow": [3.0, 3.0], "fast": [1.0, 1.0, 1.0]}
    assert next(calls) == 5
    assert harness.ratios(seconds["slow"], seconds["fast"]) == [3.0, 3.0]


def test_a_quick_run_leaves_the_published_results_alone(harness, tmp_path):
    def folder(*args):
        return harness.read_flags(harness.make_parser("a page"), args).output_dir

    assert folder() == harness.RESULTS
    assert folder("--quick") == harness.QUICK_RESULTS
    assert folder("--quick", "--output_dir", str(tmp_path)) == tmp_path


def test_results_are_data_and_a_page(harness, tmp_path):
    page = harness.markdown_table(("way", "time"), [["a\nb", "1 s"]])
    harness.write_results(tmp_path / "new", "found", {"rows": [1]}, page)
    assert json.loads((tmp_path / "new" / "found.json").read_text()) == {"rows": [1]}
    assert (tmp_path / "new" / "found.md").read_text() == "| way | time |\n| --- | --- |\n| a<br>b | 1 s |\n"
