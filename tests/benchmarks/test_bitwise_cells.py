"""What is compared between two runs, and a row that is launched, killed and resumed."""

import json

import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture
def benchmark(load):
    return load("bitwise_cells")


def write_run(folder, *, loss=1.5, weight=0.0, momentum=0.0, settings='{"lr": 1}', speed=10.0):
    rows = [{"step": 1, "train/loss": loss, "perf/samples_per_sec": speed}, {"result/steps": 1}]
    last = folder / "checkpoints" / "step-10"
    last.mkdir(parents=True)
    (folder / "checkpoints" / "step-9").mkdir()
    (folder / "final").mkdir()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (last / "optimizer.json").write_text(settings)
    save_file({"momentum": torch.full((3,), momentum)}, last / "optimizer.safetensors")
    save_file({"weight": torch.full((3,), weight)}, folder / "final" / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"speed": 11.0}, []),
        ({"loss": 1.5 + 2**-52}, ["what was logged"]),
        ({"weight": 2**-149}, ["model.safetensors"]),
        ({"momentum": 2**-149}, ["optimizer.safetensors"]),
        ({"settings": '{"lr": 2}'}, ["optimizer.json"]),
    ],
)
def test_every_bit_counts_but_those_of_the_clock(benchmark, tmp_path, changed, found):
    expected = write_run(tmp_path / "one")
    assert benchmark.differences(write_run(tmp_path / "other", **changed), expected) == found


def test_the_page_counts_runs_and_names_what_differs(benchmark):
    rows = [
        {
            **{"work": "ViT", "optimizer": "SGD", "precision": "bf16", "micro_batch_size": 5},
            "differences": {"1, then 2": [], "2, then 1": ["optimizer.json"]},
        }
    ]
    page = benchmark.as_markdown({"device": "CPU", "versions": {"torch": "2"}, "num_steps": 50, "rows": rows})
    assert "1 of 2 runs have the bits of one rank" in page
    assert "| ViT | SGD | bf16 | 5 | equal | optimizer.json |" in page


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cell_through_real_launches(benchmark, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    results = benchmark.main(["--quick", "--output_dir", str(tmp_path)])
    (row,) = results["rows"]
    assert row["differences"] == {"2, then 1": []}
    assert benchmark.main(["--quick", "--output_dir", str(tmp_path)])["rows"] == [row]
