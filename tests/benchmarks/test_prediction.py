"""A few cases of the benchmarks of the planner, end to end."""

import json

import pytest

FAST, SLOW = 20, 200
KNOWN = {"predicted_bytes": 101, "real_bytes": 100}


def check(prediction, number):
    case = prediction.random_case(1, number)
    row = prediction.row_of(case, "cpu")
    assert 0 <= row.error_pct <= 10, row


@pytest.mark.parametrize("number", range(FAST))
def test_no_prediction_is_too_low(load, number):
    check(load("prediction"), number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FAST, SLOW))
def test_no_prediction_is_too_low_in_more_cases(load, number):
    check(load("prediction"), number)


def test_it_goes_on_where_it_was_stopped_and_says_how_good_it_is(load, tmp_path, monkeypatch):
    prediction = load("prediction")
    monkeypatch.setattr(prediction.harness, "QUICK_RESULTS", tmp_path)
    done = tmp_path / "prediction-cpu-seed-1.jsonl"
    done.write_text(json.dumps(KNOWN) + "\n")
    low = prediction.Row(case=prediction.random_case(1, 1), predicted_bytes=99, real_bytes=100)
    monkeypatch.setattr(prediction, "row_of", lambda case, device: low)
    results = prediction.main(["--cases", "2", "--seed", "1", "--output_dir", str(tmp_path / "results")])
    assert [row[-2:] for row in results["rows"]] == [[101, 100], [99, 100]]
    assert (results["summary"]["too_low"], results["summary"]["within_2_pct"]) == (1, 2)
    assert "2 random cases, 1 of them predicted too low" in (tmp_path / "results" / "prediction-cpu.md").read_text()
    assert not done.exists()


@pytest.mark.slow
def test_every_choice_stays_below_its_budget(load, tmp_path, monkeypatch):
    choice = load("choice")
    monkeypatch.setattr(choice, "GLOBAL_BATCH", 2)
    monkeypatch.setattr(choice, "NUM_BUDGETS", 3)
    results = choice.main(["--model", "BERT", "--rounds", "1", "--output_dir", str(tmp_path)])
    assert [row["below_budget"] for row in results["rows"]] == [True] * 3
    assert "3 below their budget" in (tmp_path / "choice-cpu.md").read_text()
