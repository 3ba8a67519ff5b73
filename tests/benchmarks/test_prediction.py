"""A few cases of the benchmarks of the planner, end to end."""

import pytest


@pytest.mark.parametrize(
    ("model", "strategy", "precision"), [("BERT", "segments:3", "bf16"), ("GPT-2", "budget", "no")]
)
def test_a_prediction_is_within_2_percent(load, model, strategy, precision):
    prediction = load("prediction")
    case = prediction.Case(model=model, optimizer="adamw", strategy=strategy, precision=precision, micro_batch_size=2)
    candidate = prediction.predict(case, "cpu")
    row = prediction.Row(**vars(case), predicted_bytes=candidate.peak_bytes, real_bytes=prediction.run(case, candidate))
    assert abs(row.error_pct) <= 2
    assert "1 of them within 2 %" in prediction.as_markdown(
        [row], {"kind": "cpu", "device": "a CPU", "versions": {"torch": "2"}}
    )


@pytest.mark.slow
def test_every_choice_stays_below_its_budget(load, tmp_path, monkeypatch):
    choice = load("choice")
    monkeypatch.setattr(choice, "GLOBAL_BATCH", 2)
    monkeypatch.setattr(choice, "NUM_BUDGETS", 3)
    results = choice.main(["--model", "BERT", "--rounds", "1", "--output_dir", str(tmp_path)])
    assert [row["below_budget"] for row in results["rows"]] == [True] * 3
    assert "3 below their budget" in (tmp_path / "choice-cpu.md").read_text()
