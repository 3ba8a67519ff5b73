"""A step of a recipe asks hardly more of a GPU than one of a loop by hand, and the host waits for nothing in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
MOST_BESIDE_PLAIN = {"language_modeling": 26, "text_classification": 20, "image_classification": 80}
"""Of 550 to 820: the exact mean of two micro-batches, the look for NaN, positions of documents."""


@pytest.mark.parametrize("recipe", MOST_BESIDE_PLAIN)
def test_a_step_launches_hardly_more_than_that_of_a_plain_loop(on_devices, tmp_path, recipe):
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
    assert 0.5 * plain["operators"] < ours["operators"] <= plain["operators"] + MOST_BESIDE_PLAIN[recipe]
