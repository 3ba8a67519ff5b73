"""The benchmark on a tiny vocabulary: every way has its row, and what the rows claim is measured."""

import json

import pytest

FULL, OURS = "full logits", "memsave_recipes"


@pytest.fixture(scope="module")
def benchmark(load):
    return load("linear_cross_entropy")


@pytest.fixture
def run(benchmark, tmp_path, monkeypatch):
    """Runs the ways that are given; the rows by way, and the path of the JSON file."""

    def run(ways, *arguments):
        monkeypatch.setattr(benchmark, "WAYS", ways)
        folder = tmp_path / "results"
        shape = ["--shape", "40", "16", "300", "--rounds", "2", "--output_dir", str(folder)]
        results = benchmark.main([*shape, *arguments])
        return {row["way"]: row for row in results["rows"]}, folder / "linear_cross_entropy-cpu.json"

    return run


@pytest.mark.slow
def test_every_way_has_figures_or_a_reason(benchmark, run):
    rows, path = run(benchmark.WAYS, "--precisions", "float32")
    assert list(rows) == list(benchmark.WAYS)
    for name, row in rows.items():
        if "does_not_run" in row:
            assert name in ("torch's own", "Liger", "cut-cross-entropy")
            assert row["does_not_run"]
        else:
            assert row["loss_error"] < 1e-5
            assert row["gradient_error"] < 1e-5
            assert row["peak_bytes"] > 0
            assert len(row["seconds"]) == 2
    assert json.loads(path.read_text())["rows"] == list(rows.values())
    table = [line for line in path.with_suffix(".md").read_text().splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows)
    assert len({line.count(" | ") for line in table[:1] + table[2:]}) == 1


def test_a_wrong_way_shows(benchmark, run):
    full_cross_entropy = benchmark.full_cross_entropy

    def doubled(hidden, weight, labels):
        return 2 * full_cross_entropy(hidden, weight, labels)

    def twice(hidden, weight, labels):
        return (full_cross_entropy(hidden, weight, labels) + full_cross_entropy(hidden, weight, labels)) / 2

    rows, _ = run({FULL: lambda: full_cross_entropy, "doubled": lambda: doubled, "twice": lambda: twice})
    assert rows["doubled"]["loss_error"] == pytest.approx(1, rel=0.01)
    assert rows["doubled"]["gradient_error"] == pytest.approx(1, rel=0.01)
    assert rows["twice"]["peak_ratio"] > 1.3


def test_the_full_path_may_be_the_one_that_does_not_fit(benchmark, run):
    def out_of_memory():
        raise RuntimeError("out of memory\nand so on")

    rows, _ = run({FULL: out_of_memory, OURS: benchmark.WAYS[OURS]}, "--precisions", "bfloat16", "autocast")
    assert rows[FULL]["does_not_run"] == "out of memory"
    assert rows[OURS]["loss_error"] < 1e-2
    assert "peak_ratio" not in rows[OURS]
