"""A tracker that dies in the middle of a run costs the run nothing: code 0, every row, and a warning."""

import json
import os
import subprocess
import sys

import pytest
from accelerate.state import AcceleratorState
from accelerate.tracking import TensorBoardTracker
from lives import ROOT, curve

from memsave_recipes.run import trackers

RECIPE = "image_classification"
SHORT = ["--model", "vgg_small", "--global_batch_size", "16", "--max_steps", "4", "--logging_steps", "1"]


def test_a_tracker_that_breaks_after_some_steps_is_one_warning(recipe, train, monkeypatch, tmp_path, caplog):
    log = TensorBoardTracker.log

    def log_until_step_2(self, values, step=None, **options):
        if step > 2:
            raise ConnectionError("gone")
        log(self, values, step=step, **options)

    results = train(*SHORT, output="without")
    monkeypatch.setattr(TensorBoardTracker, "log", log_until_step_2)
    trackers._warn_once.cache_clear()
    AcceleratorState._reset_state(reset_partial_state=True)
    recipe.main([*SHORT, "--report_to", "tensorboard", "--output_dir", str(tmp_path / "with")])
    assert curve(tmp_path / "with") == curve(tmp_path / "without")
    assert json.loads((tmp_path / "with" / "results.json").read_text())["eval"] == results["eval"]
    assert [text for text in caplog.messages if "could not log" in text] == [
        "tensorboard could not log, the run goes on without: ConnectionError: gone"
    ]


WITHOUT_ITS_SERVICE = """
import sys
import psutil
sys.path.insert(0, {recipes!r})
import image_classification as recipe
from memsave_recipes.run.failures import run_recipe
from memsave_recipes.run.report import RunReport

end_window = RunReport.end_window

def and_end_the_service(self, step, **options):
    told = end_window(self, step, **options)
    if step == 2:
        services = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
        assert services
        services[0].kill()
    return told

RunReport.end_window = and_end_the_service
run_recipe(recipe.main)
"""


@pytest.mark.slow
def test_wandb_without_its_service(train, tmp_path):
    train(*SHORT, output="without")
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_ITS_SERVICE.format(recipes=str(ROOT / "recipes")))
    done = subprocess.run(
        [sys.executable, program, *SHORT, "--report_to", "wandb", "--output_dir", tmp_path / "with"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert curve(tmp_path / "with") == curve(tmp_path / "without")
    assert (tmp_path / "with" / "results.json").exists()
    assert done.stderr.count("wandb could not log, the run goes on without") == 1
