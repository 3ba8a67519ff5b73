"""The planner's word at the end of an out-of-memory page."""

import importlib.util
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.planner import task as task_module
from memsave_recipes.core.text import MIB
from memsave_recipes.run import failures
from memsave_recipes.run.failures import planned_advice

RECIPE = Path(__file__).parents[2] / "recipes" / "image_classification.py"
FLAGS = ["--model", "vgg_small", "--augmentation", "none", "--global_batch_size", "16", "--output_dir", "out"]


@pytest.fixture(scope="module")
def task():
    specification = importlib.util.spec_from_file_location("image_classification", RECIPE)
    module = importlib.util.module_from_spec(specification)
    sys.modules["image_classification"] = module
    specification.loader.exec_module(module)
    yield module.task
    del sys.modules["image_classification"]


@pytest.fixture
def memory(monkeypatch):
    """Gives this device another size, and rates that do not depend on what the machine does besides."""

    def set_bytes(num_bytes):
        rates = {"flops_per_s": {"float32": 1e11}, "bytes_per_s": 1e10, "kernel_s": 0.0}
        target = replace(find_target("cpu"), memory_bytes=num_bytes, **rates)
        monkeypatch.setattr(task_module, "find_target", lambda word: target)

    return set_bytes


def test_it_names_what_is_predicted_to_fit(task, memory):
    memory(12 * MIB)
    line = planned_advice(partial(task, FLAGS))
    assert line.startswith("the fastest that is predicted to fit in 12 MiB (memsave plan): --micro_batch_size 8 ")
    assert "--activation_checkpointing none" in line


def test_it_does_not_name_what_has_just_failed(task, memory):
    memory(1000 * MIB)  # where all would fit
    line = planned_advice(partial(task, [*FLAGS, "--micro_batch_size", "8"]))
    size = int(line.partition("--micro_batch_size ")[2].partition(" ")[0])
    assert size < 8 or "--activation_checkpointing none" not in line


def test_where_nothing_fits_it_says_so(task, memory):
    memory(1 * MIB)
    line = planned_advice(partial(task, FLAGS))
    assert line.startswith("no plan of this recipe is predicted to fit in 1 MiB: less is needed with ")
    assert "--optimizer adamw_8bit 0.0" in line


def test_advice_that_fails_never_hides_the_exit_code(capsys):
    def main():
        raise torch.OutOfMemoryError("the page")

    with pytest.raises(SystemExit) as end:
        failures.run_recipe(main, task=lambda: 1 / 0)
    assert end.value.code == failures.OUT_OF_MEMORY
    said = capsys.readouterr().err
    assert "the page" in said
    assert "could not say what would fit: division by zero" in said
