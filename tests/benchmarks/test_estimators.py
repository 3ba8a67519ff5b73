"""The comparison of estimators, without the packages of others: what is asked, counted and left out."""

import json

import pytest

KEPT_BY_CALLER = 4
"""Bytes of a loss in a process where a graph could not be compiled: ``errors_pct`` of test_prediction.py."""


@pytest.fixture(scope="module")
def benchmark(load):
    return load("estimators")


@pytest.fixture
def stand_ins(benchmark, monkeypatch):
    """Others that are not on the machine, one that always answers and one that knows no checkpointing."""

    def knows_no_checkpointing(step):
        return None if step.is_checkpointed else 2 * step.inputs.numel()

    others = {
        "absent": benchmark.Estimator("no-such-package", "nothing", lambda step: 1),
        "one byte": benchmark.Estimator("torch", "one byte", lambda step: 1),
        "inputs": benchmark.Estimator("accelerate", "twice the elements of the inputs", knows_no_checkpointing),
    }
    monkeypatch.setattr(benchmark, "OTHERS", others)


@pytest.mark.slow
@pytest.mark.usefixtures("stand_ins")
def test_each_answers_for_the_same_steps_or_not_at_all(benchmark, tmp_path, capsys):
    results = benchmark.main(["--quick", "--output_dir", str(tmp_path)])
    assert "absent is not installed" in capsys.readouterr().out
    assert results["not_installed"] == ["absent"]
    rows = {(row["case"]["model"], row["case"]["strategy"]): row for row in results["rows"]}
    assert rows["VGG", "none"]["estimates"]["inputs"] == 2 * (2 * 3 * 32 * 32)
    assert rows["Llama", "none"]["estimates"]["inputs"] == 2 * (2 * 64)
    assert rows["Llama", "full"]["estimates"]["inputs"] is None
    assert rows["Llama", "full"]["real_bytes"] < rows["Llama", "none"]["real_bytes"]
    found = results["summary"]
    assert found["one byte"]["answers"] == found["one byte"]["too_low"] == 4
    assert found["one byte"]["worst_pct"] == pytest.approx(-100, abs=0.001)
    assert found["inputs"]["answers"] == 2
    errors = [row["estimates"][benchmark.OURS] - row["real_bytes"] for row in rows.values()]
    assert min(errors) >= -KEPT_BY_CALLER
    assert found["memsave_recipes"]["worst_pct"] < 10
    assert json.loads((tmp_path / "estimators-cpu.json").read_text())["summary"] == found
    page = (tmp_path / "estimators-cpu.md").read_text()
    assert "| VGG | momentum | 2 | full |" in page
    assert "Not installed and left out: absent." in page


def test_the_rule_of_accelerate_is_four_times_the_weights(benchmark):
    llama, vgg = (benchmark.step_of(case) for case in benchmark.cases_of(benchmark.SMALL) if case.strategy == "none")
    accelerate = benchmark.OTHERS["accelerate estimate-memory"]
    tensors = (*llama.model.parameters(), *llama.model.buffers())
    assert accelerate.estimate(llama) == 4 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert accelerate.estimate(vgg) is None  # made for Adam


@pytest.fixture
def published(benchmark):
    return json.loads((benchmark.harness.RESULTS / "estimators-cpu.json").read_text())


def test_published_results_are_of_every_case_and_estimator(benchmark, published):
    cases = [(case.model, case.strategy, case.flags) for case in benchmark.cases_of(benchmark.MODELS)]
    rows = [row["case"] for row in published["rows"]]
    assert [(row["model"], row["strategy"], row["flags"]) for row in rows] == cases
    assert published["not_installed"] == []
    assert list(published["summary"]) == ["memsave_recipes", *benchmark.OTHERS]


def test_the_page_of_predictions_has_the_published_figures(benchmark, published):
    page = (benchmark.harness.ROOT / "docs" / "design" / "predictions.md").read_text()
    for name, found in published["summary"].items():
        row = next(line for line in page.splitlines() if line.replace("`", "").startswith(f"| {name} "))
        answers, error, worst, too_low = (float(cell.removesuffix(" % ")) for cell in row.split("|")[3:7])
        assert (answers, too_low) == (found["answers"], found["too_low"])
        assert error == pytest.approx(found["mean_absolute_pct"], rel=0.005, abs=0.005)
        assert worst == pytest.approx(found["worst_pct"], rel=0.005, abs=0.005)
        assert name == benchmark.OURS or published["versions"][benchmark.OTHERS[name].package] in row
