"""The benchmark on a tiny network: what it writes, and that what it claims of its rows is measured."""

import gc
import json
import weakref

import pytest
import torch

from memsave_recipes.core.errors import InputError

TINY = ["--model", "vgg_small", "--image_size", "32", "--batch_size", "6", "--steps", "1"]
PLAIN, SEGMENTS, FULL = "plain", "segments:2", "full"
ACCUMULATED = ["plain, 2 at a time", "segments:2, 2 at a time"]


@pytest.fixture(scope="module")
def benchmark(load):
    return load("vgg16_article")


@pytest.fixture(scope="module")
def run(benchmark, tmp_path_factory):
    """The results of a whole run, and the path of its JSON file."""
    folder = tmp_path_factory.mktemp("run") / "results"
    arguments = ["--rounds", "2", "--strategies", SEGMENTS, FULL, "--output_dir", str(folder)]
    return benchmark.main([*TINY, *arguments]), folder / "vgg16_article-cpu.json"


@pytest.fixture
def bench(benchmark):
    return benchmark.Bench(
        model="vgg_small",
        image_size=32,
        batch_size=6,
        warmup_steps=1,
        steps=1,
        bf16=False,
        device=torch.device("cpu"),
    )


def rows_of(results):
    return {row["method"]: row for row in results["rows"]}


def test_methods_take_turns(run):
    methods = [PLAIN, SEGMENTS, FULL, *ACCUMULATED]
    assert [row["method"] for row in run[0]["rows"]] == methods
    assert [turn["method"] for turn in run[0]["turns"]] == methods * 2


def test_a_plan_changes_neither_loss_nor_gradients(run):
    for method in (PLAIN, SEGMENTS, FULL):
        assert rows_of(run[0])[method]["loss_difference"] == 0
        assert rows_of(run[0])[method]["gradient_difference"] == 0


def test_a_wrong_gradient_shows(benchmark, bench, monkeypatch):
    plain, segments = benchmark.make_methods("vgg_small", 6, [SEGMENTS])[:2]
    bench.take_turn(plain)
    right = bench.backward

    def wrong(model, images, labels, micro_batch_size):
        loss = right(model, images, labels, micro_batch_size)
        model.features[0].weight.grad.mul_(1.5)
        return loss

    monkeypatch.setattr(bench, "backward", wrong)
    assert bench.take_turn(segments).gradient_difference == pytest.approx(0.5)


def test_memory_kept_for_the_backward_falls(run):
    kept = {name: row["memory"]["saved_for_backward_bytes"] for name, row in rows_of(run[0]).items()}
    assert kept[SEGMENTS] < kept[PLAIN]
    assert kept[ACCUMULATED[0]] == pytest.approx(kept[PLAIN] / 3, rel=0.01)
    assert kept[ACCUMULATED[1]] == pytest.approx(kept[SEGMENTS] / 3, rel=0.01)


def test_the_peak_holds_weights_gradients_momentum_and_what_is_kept(benchmark, run):
    weight_bytes = 4 * sum(p.numel() for p in benchmark.MODELS["vgg_small"](num_classes=2).parameters())
    memory = rows_of(run[0])[PLAIN]["memory"]
    assert memory["state_bytes"] == 3 * weight_bytes
    assert memory["peak_allocated_bytes"] >= 3 * weight_bytes
    assert memory["peak_allocated_bytes"] >= 2 * weight_bytes + memory["saved_for_backward_bytes"]


def test_a_device_is_asked_for_the_peaks_since_the_warm_up(benchmark, bench, monkeypatch):
    told = {"peak_allocated_bytes": 1, "peak_reserved_bytes": 2, "device_used_bytes": 3}
    calls = []

    def timed_step(step, *batch):
        calls.append("step")
        return 1.0, step(*batch).item()

    monkeypatch.setattr(benchmark.Bench, "on_cpu", False)
    monkeypatch.setattr(benchmark, "timed_step", timed_step)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(benchmark, "read_device_memory", lambda device: calls.append("read") or told)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 0)
    turn = bench.take_turn(benchmark.make_methods("vgg_small", 6, [])[0])
    assert calls == ["step", "reset", "step", "read"]
    assert [turn.memory[key] for key in benchmark.MEMORY_COLUMNS[:3]] == [1, 2, 3]


@pytest.mark.slow
def test_one_model_lives_at_a_time(benchmark, bench, monkeypatch):
    weights = []
    build = bench.build_model

    def watched():
        assert not any(weight() is not None for weight in weights)
        model = build()
        weights.append(weakref.ref(model.features[0].weight))
        return model

    monkeypatch.setattr(bench, "build_model", watched)
    methods = benchmark.make_methods("vgg_small", 6, [SEGMENTS])
    benchmark.take_turns(bench, methods, rounds=1)
    gc.collect()
    assert len(weights) == len(methods)
    assert not any(weight() is not None for weight in weights)


def test_the_files_hold_the_run_and_the_article_beside_it(run):
    results, path = run
    assert json.loads(path.read_text()) == json.loads(json.dumps(results))
    assert {"device", "torch", "num_threads"} <= results["machine"].keys()
    assert results["flags"]["batch_size"] == 6
    assert all(len(turn["seconds"]) == 1 and len(turn["losses"]) == 2 for turn in results["turns"])

    table = [line for line in path.with_suffix(".md").read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert {len(row) for row in rows} == {7}
    assert [row[0] for row in rows[2:5]] == [PLAIN, SEGMENTS, FULL]
    assert {tuple(row[2:4]) for row in rows[2:7]} == {("-", "-")}  # a CPU has no reserved memory and no driver
    assert rows[-2][3] == "14,222 MB"
    assert rows[-1][3] == "10,550 MB<br>x0.74"


def test_a_device_fills_every_column_and_rounds_are_compared_pairwise(benchmark):
    def turn(method, seconds, num_bytes, loss=0.5):
        memory = dict.fromkeys(benchmark.MEMORY_COLUMNS, num_bytes)
        return benchmark.Turn(method=method, seconds=[seconds], losses=[loss], gradient_difference=0.0, memory=memory)

    mib = 1024**2
    turns = [
        *(turn(PLAIN, 1.0, 400 * mib), turn(SEGMENTS, 1.5, 300 * mib)),
        *(turn(PLAIN, 10.0, 400 * mib), turn(SEGMENTS, 15.0, 200 * mib, loss=0.25)),
    ]
    row = benchmark.summarize(turns)[1]
    assert row["time_ratio"] == 1.5
    assert row["spread_s"] == [1.5, 15.0]
    assert row["loss_difference"] == 0.25
    assert benchmark.cells(row)[1:5] == ["300 MiB\nx0.75"] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds 0"),
        (["--image_size", "16"], "--image_size 16"),
        (["--strategies", "segments:99"], "segments:99"),
    ],
)
def test_a_mistake_costs_no_run(benchmark, tmp_path, arguments, message):
    with pytest.raises(InputError, match=message):
        benchmark.main([*TINY, *arguments, "--output_dir", str(tmp_path)])
    assert not list(tmp_path.iterdir())
