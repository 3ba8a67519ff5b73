"""The real W&B client, online: what the server is told about each run is what the run did."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import three_steps

from memsave_recipes.tools.pages.page import confusion_table

ROOT = Path(__file__).parents[2]
KEY = "k" * 40


@pytest.mark.slow
def test_two_runs_are_told_apart(launch: Callable, wandb_server: Any) -> None:
    names = ["none-mbs64x1", "full-mbs64x1"]
    for name in names:
        ended = launch("wandb", name=name, WANDB_BASE_URL=wandb_server.url, WANDB_API_KEY=KEY)
        assert ended.exit_code == 0, ended.output
        assert "upload it with" not in ended.output
    runs = list(wandb_server.runs.values())
    assert [run.name for run in runs] == names
    labels = three_steps.LABELS
    for run in runs:
        assert (run.project, run.group, run.tags) == (labels["project"], labels["group"], labels["tags"])
        assert three_steps.CONFIG.items() <= run.config.items()
        *rows, last = run.history
        drawn = run.files[last.pop("result/confusion_matrix")["path"]].decode()
        assert drawn == confusion_table(three_steps.CONFUSION)
        assert [*rows, last] == [{"_step": row["step"], "train/loss": row["train/loss"]} for row in three_steps.ROWS]
        assert three_steps.FLAT_RESULTS.items() <= run.summary.items()
        assert run.exit_code == 0
        assert run.files.keys() >= {"config.yaml", "wandb-summary.json", "requirements.txt"}
    assert wandb_server.alerts == [three_steps.ALERT] * len(names)


@pytest.mark.slow
def test_two_ranks_of_a_recipe_are_one_run(wandb_server: Any, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    flags = ["--model", "vgg_small", "--global_batch_size", "32", "--micro_batch_size", "8", "--max_steps", "4"]
    told = ["--activation_checkpointing", "segments:2", "--logging_steps", "2", "--report_to", "wandb"]
    done = launch_recipe(
        [*flags, *told, "--output_dir", str(folder)], HOME=str(tmp_path), WANDB_BASE_URL=wandb_server.url
    )
    assert done.returncode == 0, done.stderr

    (run,) = wandb_server.runs.values()
    assert run.project == "memsave-image-classification"
    assert run.group == "vgg_small-gbs32-32px"
    assert run.name == "segments:2-mbs8x2-2cpu"
    assert run.tags == ["segments:2", "float32", "cpu"]
    config = json.loads((folder / "config.json").read_text())
    assert {key: run.config[key] for key in config} == config
    assert config.keys() >= {"plan", "geometry"}
    assert config["environment"]["num_processes"] == 2
    assert config["environment"]["versions"].keys() >= {"torch", "accelerate"}

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    history = run.history
    drawn = run.files[history[-1].pop("result/confusion_matrix")["path"]].decode()
    assert history == merged_by_step(rows[:-1])
    assert [row["progress/samples_seen"] for row in run.history] == [64, 128]
    results = json.loads((folder / "results.json").read_text())
    assert run.summary["result/samples_seen"] == results["samples_seen"] == 128
    assert run.summary["result/memory/peak_allocated_gib"] == results["memory"]["peak_allocated_gib"]
    assert run.summary["result/eval/accuracy"] == results["eval"]["accuracy"]
    assert drawn == confusion_table(dict(zip(results["classes"], results["confusion_matrix"], strict=True)))
    assert run.exit_code == 0


def launch_recipe(flags: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    command = [accelerate, "launch", "--config_file", str(ROOT / "accelerate_configs" / "cpu_ddp.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_API_KEY": KEY, "WANDB_MODE": "online", **environment}
    recipe = str(ROOT / "recipes" / "image_classification.py")
    return subprocess.run([*command, recipe, *flags], env=environment, capture_output=True, text=True, timeout=280)


def merged_by_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one step are one row of W&B's."""
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        merged.setdefault(row["step"], {"_step": row["step"]}).update(row)
    return [{key: value for key, value in row.items() if key != "step"} for row in merged.values()]
