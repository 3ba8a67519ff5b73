"""The day on a GPU runs on a CPU at a small size, so that it does not fail there on its own mistakes."""

import json

import pytest


@pytest.fixture
def benchmark(load, monkeypatch):
    module = load("gpu_day")
    monkeypatch.setattr(module, "memsave", lambda words: 0)
    return module


def holding(day):
    yield "it holds", True, "1 of 1"
    yield "a speed", None, "3 samples/s"


def failing(day):
    yield "it fails", False, "0 of 1"


def breaking(day):
    """A claim that breaks off."""
    yield "the first half", True, "1"
    raise RuntimeError("exit code 3: no memory")


def day(benchmark, monkeypatch, folder, **steps):
    monkeypatch.setattr(benchmark, "STEPS", steps)
    words = ["--tiny", "--output_dir", str(folder), "--runs_dir", str(folder / "runs")]
    return benchmark.main([*words, "--only", *steps])


def verdicts(folder):
    return [
        (one["claim"], one["verdict"], one["found"])
        for one in json.loads((folder / "gpu_day-tiny.json").read_text())["verdicts"]
    ]


def test_every_claim_gets_a_verdict(benchmark, monkeypatch, tmp_path, capsys):
    assert day(benchmark, monkeypatch, tmp_path, holding=holding) == 0
    assert verdicts(tmp_path) == [("it holds", "holds", "1 of 1"), ("a speed", "figure", "3 samples/s")]
    page = (tmp_path / "gpu_day-tiny.md").read_text()
    assert "1 claims hold, 0 fail; 1 figures" in page
    assert "| holding | it holds | holds | 1 of 1 |" in page
    assert " holds  it holds: 1 of 1\n" in capsys.readouterr().out


def test_a_step_that_breaks_off_fails_and_the_others_go_on(benchmark, monkeypatch, tmp_path):
    assert day(benchmark, monkeypatch, tmp_path, breaking=breaking, failing=failing) == 1
    assert verdicts(tmp_path) == [
        ("the first half", "holds", "1"),
        ("A claim that breaks off.", "fails", "RuntimeError: exit code 3: no memory"),
        ("it fails", "fails", "0 of 1"),
    ]


def test_it_goes_on_where_it_was_stopped(benchmark, monkeypatch, tmp_path):
    day(benchmark, monkeypatch, tmp_path, holding=holding)
    assert day(benchmark, monkeypatch, tmp_path, holding=breaking, failing=failing) == 1
    assert [claim for claim, _, _ in verdicts(tmp_path)] == ["it holds", "a speed", "it fails"]


def test_a_run_that_failed_says_how(benchmark, tmp_path):
    run = benchmark.Run(2, "many lines\nerror: --length 0: too short\n\n", tmp_path)
    with pytest.raises(RuntimeError, match="exit code 2: error: --length 0: too short"):
        _ = run.results


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_day_at_a_small_size(load, tmp_path):
    benchmark = load("gpu_day")
    assert benchmark.main(["--tiny", "--output_dir", str(tmp_path), "--runs_dir", str(tmp_path / "runs")]) == 0
    found = json.loads((tmp_path / "gpu_day-tiny.json").read_text())["verdicts"]
    assert {one["step"] for one in found} == set(benchmark.STEPS)
    assert {one["verdict"] for one in found} <= {"holds", "figure"}
    assert [*(tmp_path / "rows").glob("*.json")]
