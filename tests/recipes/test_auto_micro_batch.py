"""``--micro_batch_size auto``: the same global batch and curve in the memory there is, and a refusal that helps."""

import json
import os

import pytest
import torch
from lives import curve, share_of, with_context
from samples import sample

RECIPE = "image_classification"
SHORT = ["--augmentation", "none", "--global_batch_size", "16", "--max_steps", "3", "--logging_steps", "1"]
VIT = "hidden_size=32,num_hidden_layers=3,num_attention_heads=2,intermediate_size=64,patch_size=8"
# Dropout and BatchNorm would make the curve depend on the micro-batch.
FLAGS = ["--model_type", "vit", "--config_overrides", VIT, *SHORT]
FLAGS += ["--optimizer", "sgd", "--learning_rate", "0.05"]
AUTO = ["--micro_batch_size", "auto"]
IS_CPU = not torch.accelerator.is_available()


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("strategy", sample(["budget:bitwise"], ["none", "full", "budget:bitwise"]))
def test_a_tight_budget_makes_micro_batches_smaller_and_keeps_the_curve(train, tmp_path, capsys, strategy):
    plain = train(*FLAGS, output="plain")
    budget = share_of(plain, 0.75)
    budget_flags = ["--memory_budget_gib", str(with_context(budget))]
    flags = [*FLAGS, *AUTO, "--activation_checkpointing", strategy, *budget_flags]
    found = train(*flags, output="found")
    assert found["micro_batch_size"] < 16 or strategy != "none"
    assert found["micro_batch_size"] * found["accumulation_steps"] == 16
    assert found["memory"]["peak_allocated_gib"] <= budget
    assert abs(found["memory"]["prediction_error_pct"]) <= 5  # on a CPU without the batch, which counts here
    assert curve(tmp_path / "found") == pytest.approx(curve(tmp_path / "plain"), rel=1e-5)
    logged = [row for row in rows(tmp_path / "found") if "memory/predicted_peak_gib" in row]
    assert logged[-1]["memory/predicted_peak_gib"] == found["memory"]["predicted_peak_gib"]
    assert logged[-1]["memory/prediction_error_pct"] == pytest.approx(found["memory"]["prediction_error_pct"])
    assert "predicted peak" in capsys.readouterr().out
    assert json.loads((tmp_path / "found" / "config.json").read_text())["micro_batch_size"] == "auto"


def test_with_room_to_spare_the_plain_run_is_chosen(train):
    found = train(*FLAGS, *AUTO, "--activation_checkpointing", "budget:bitwise", "--memory_budget_gib", "1")
    assert found["plan"] == "none"


def test_a_size_that_leaves_a_micro_batch_of_one_is_left_out(train, capsys):
    """3 x 3, 5 + 4 and 9 are searched; 2 x 4 + 1 and single images do not train under BatchNorm of one pixel."""
    dense = ["--model", "densenet_small", "--image_size", "16", "--augmentation", "none", "--global_batch_size", "9"]
    found = train(*dense, *AUTO, "--max_steps", "1", "--memory_budget_gib", "1")
    assert found["micro_batch_size"] in (3, 5, 9)
    if IS_CPU:
        assert capsys.readouterr().out.startswith("note: torch finds no GPU")


MISTAKES = {
    **({"no budget on a CPU": (AUTO, "--micro_batch_size auto needs --memory_budget_gib on a CPU")} if IS_CPU else {}),
    "not a size": (["--micro_batch_size", "some"], "--micro_batch_size some: must be a whole number"),
    "zero": (["--micro_batch_size", "0"], "--micro_batch_size 0: must be"),
    "blocks of its own": (
        [
            "--model",
            "densenet_small",
            *SHORT,
            *AUTO,
            "--activation_checkpointing",
            "bottleneck",
            "--memory_budget_gib",
            "1",
        ],
        "has blocks of its own, whose memory cannot be predicted",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(refuse, mistake):
    flags, expected = MISTAKES[mistake]
    assert expected in refuse(*([] if "--model" in flags else FLAGS), *flags)


@pytest.mark.slow
def test_an_impossible_budget_names_what_would_help_and_the_figure_works(train, refuse):
    tight = [
        *FLAGS,
        "--optimizer",
        "adamw",
        *AUTO,
        "--activation_checkpointing",
        "budget:bitwise",
        "--memory_budget_gib",
    ]
    line = refuse(*tight, str(with_context(0.0005)))
    assert "no plan of this recipe is predicted to fit in " in line
    if not torch.cuda.is_available():  # where the smallest block is 512 bytes, shards of such weights free nothing
        assert "less is needed with --shard full over 2 devices" in line
    smallest = line.partition("the smallest that works is ")[2].partition(" ")[0]
    found = train(*tight, str(float(smallest) + 0.0001), output="smallest")
    assert with_context(found["memory"]["peak_allocated_gib"]) <= float(smallest) + 0.0001


@pytest.mark.parametrize(("load", "is_said"), sample([(1.6, True)], [(1.5, False), (1.6, True)]))
def test_a_busy_machine_is_named_before_times_decide(train, capsys, monkeypatch, load, is_said):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "getloadavg", lambda: (load * cores, 0.0, 0.0))
    train(*FLAGS, *AUTO, "--max_steps", "1", "--memory_budget_gib", "1")
    line = f"note: this machine is busy (load {load * cores:.1f} on {cores} cores): measured seconds, "
    assert (line in capsys.readouterr().out) == (is_said and IS_CPU)
