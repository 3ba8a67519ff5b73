"""Techniques beside the plain run: their flags are the recipes' own, and differences are those of one seed."""

import importlib
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lives import loaded
from safetensors.torch import save_file

from memsave_recipes.training.parsing import parse_arguments

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark(load):
    return load("quality")


def test_the_flags_are_those_of_the_recipes(benchmark, tmp_path):
    for work in benchmark.WORKS.values():
        with loaded(work.recipe) as recipe:
            flags = recipe.Arguments
        parsed = {}
        for technique in work.techniques:
            words = benchmark.words_of(work, technique, 7, tmp_path)
            (parsed[technique],) = parse_arguments(flags, args=[*words, "--output_dir", str(tmp_path / "run")])
        plain = parsed[benchmark.PLAIN]
        assert plain.seed == 7
        assert {(args.max_steps, args.global_batch_size) for args in parsed.values()} == {
            (plain.max_steps, plain.global_batch_size)
        }
        assert len({repr(args) for args in parsed.values()}) + ("bf16 autocast" in parsed) == len(parsed)
        if work.base is not None:
            assert plain.model_name_or_path == str(tmp_path)


def finished(benchmark, folder, *, accuracy, step_s=1.0, peak_gib=0.5, weights=(1.0,)):
    (folder / "final").mkdir(parents=True)
    save_file({"weight": torch.tensor(weights)}, folder / "final" / "model.safetensors")
    content = {
        "eval": {"accuracy": accuracy},
        "perf": {"step_time_s": step_s},
        "memory": {"peak_allocated_gib": peak_gib},
    }
    (folder / "results.json").write_text(json.dumps(content))
    folder.with_suffix(".json").write_text(json.dumps({"busy_with_others": 0.5}))
    return benchmark.Results.read(folder)


def test_a_technique_is_compared_with_the_plain_run_of_its_seed(benchmark, tmp_path):
    work = replace(benchmark.WORKS["vit"], techniques={"plain": benchmark.Technique(), "other": benchmark.FULL})
    plain = [
        finished(benchmark, tmp_path / f"plain-{seed}", accuracy=value, step_s=step_s)
        for seed, (value, step_s) in enumerate([(0.9, 1.0), (0.7, 2.0)])
    ]
    other = [
        finished(benchmark, tmp_path / f"other-{seed}", accuracy=value, step_s=step_s, peak_gib=0.25)
        for seed, (value, step_s) in enumerate([(0.8, 1.5), (0.7, 3.0)])
    ]
    first, second = benchmark.rows_of("vit", work, {"plain": plain, "other": other})
    assert (first["differences"], first["peak_ratio"], first["time_ratio"]) == ([0, 0], 1, 1)
    assert second["differences"] == pytest.approx([-0.1, 0])
    assert (second["mean"], second["time_ratio"], second["peak_ratio"]) == (pytest.approx(0.75), 1.5, 0.5)
    assert second["same_weights"]
    assert second["flags"] == "--activation_checkpointing full"
    assert benchmark.cells(second)[2:6] == ["75.0 %", "70.0 % to 80.0 %", "-5.0 (-10.0 to +0.0)", "yes"]


@pytest.mark.parametrize("weights", [(1.0, 2.0), (1.0 + 2**-23,)])
def test_one_bit_or_shape_is_another_weight(benchmark, tmp_path, weights):
    plain = finished(benchmark, tmp_path / "plain", accuracy=1.0)
    assert not finished(benchmark, tmp_path / "other", accuracy=1.0, weights=weights).has_weights_of(plain)
    assert finished(benchmark, tmp_path / "same", accuracy=0.0).has_weights_of(plain)


def test_every_seed_gives_each_technique_one_turn(benchmark):
    turns = list(benchmark._turns(benchmark.WORKS["gpt2"], [3, 4, 5]))
    assert len(set(turns)) == len(turns) == 3 * len(benchmark.WORKS["gpt2"].techniques)
    assert [seed for seed, _ in turns] == sorted(seed for seed, _ in turns)


def train(*args):
    """A run of a recipe, in a fork of the nursery."""
    sys.path.append(str(BENCHMARKS))
    importlib.import_module("quality").run_recipe(*args)


@pytest.mark.slow
def test_recipes_run_once_and_are_compared(benchmark, tmp_path, monkeypatch, run_trial):
    monkeypatch.setattr(benchmark, "run_apart", lambda _, *args: run_trial(train, *args))
    flags = ["--quick", "--runs", str(tmp_path / "runs"), "--output_dir", str(tmp_path)]
    results = benchmark.main(flags)
    rows = {row["technique"]: row for row in results["rows"]}
    assert list(rows) == ["plain", "checkpointing", "Muon"]
    plain, checkpointed, muon = rows.values()
    assert checkpointed["same_weights"]
    assert not muon["same_weights"]
    assert checkpointed["values"] == plain["values"]
    assert len(set(plain["values"])) <= len(plain["values"]) == benchmark.QUICK_SEEDS
    assert checkpointed["peak_bytes"] < plain["peak_bytes"]
    assert json.loads((tmp_path / "quality-cpu.json").read_text()) == results
    page = (tmp_path / "quality-cpu.md").read_text()
    assert "## ViT on digits" in page
    assert "| checkpointing | `--activation_checkpointing full` |" in page
    monkeypatch.setattr(benchmark, "run_apart", None)
    assert benchmark.main(flags)["rows"] == results["rows"]


def test_an_unknown_work_is_refused(benchmark, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["gpt9"])
    assert ended.value.code == 2
    assert "gpt9 is no work: choose of vit, vgg_bn, gpt2, fine_tuning" in capsys.readouterr().err
