"""A step of a recipe asks no more of a GPU than one of a loop by hand, and the host waits for nothing in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from samples import sample

ROOT = Path(__file__).parents[2]
COUNTED = """
import json, sys
from functools import partial
from pathlib import Path
import step_counts
recipe = sys.argv[2]
plain, ours = step_counts.plain_counts(recipe), step_counts.counts_of(partial(step_counts.run, recipe, ""))
Path(sys.argv[1]).write_text(json.dumps([plain, ours]))
"""
RECIPES = ("language_modeling", "text_classification", "image_classification")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sample(["language_modeling"], RECIPES))
def test_a_step_launches_no_more_than_that_of_a_plain_loop(on_devices, tmp_path, recipe):
    environment = on_devices(WAITS=tmp_path / "waits") | {"ACCELERATE_MIXED_PRECISION": "bf16", "OMP_NUM_THREADS": "1"}
    path = [environment["PYTHONPATH"], *(str(ROOT / folder) for folder in ("benchmarks", "recipes"))]
    subprocess.run(
        [sys.executable, "-c", COUNTED, tmp_path / "counts.json", recipe],
        env={**environment, "PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    plain, ours = json.loads((tmp_path / "counts.json").read_text())
    assert ours["waits"] == 0 <= plain["waits"]
    assert 0.5 * plain["operators"] < ours["operators"] <= plain["operators"]


def test_the_page_holds_the_bounds():
    """Adafactor's waits are its own: docs/measuring.md."""
    rows = json.loads((ROOT / "docs" / "results" / "step_counts.json").read_text(encoding="utf-8"))["rows"]
    for recipe in RECIPES:
        of_plans = {row["plan"]: row for row in rows if row["recipe"] == recipe and row["optimizer"] == "AdamW"}
        assert of_plans.keys() == {"plain torch", "none", "full", "selective", "budget", "compiled"}
        assert of_plans["compiled"]["graphs"] <= 3
        names = ("none", "plain torch", "budget", "full")
        none, plain, budget, full = (of_plans[name]["operators"] for name in names)
        assert none <= plain
        assert none < budget <= full
    assert {row["optimizer"] for row in rows if row.get("waits") and row["plan"] != "plain torch"} == {"Adafactor"}


@pytest.mark.slow
def test_compiled_layers_take_few_graphs(tmp_path):
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "benchmarks", "recipes"))
    environment = {**os.environ, "PYTHONPATH": path, "ACCELERATE_MIXED_PRECISION": "bf16", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "benchmarks/step_counts.py", "--count", "language_modeling", tmp_path / "rows.json"]
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert 0 < row["graphs"] <= 3
