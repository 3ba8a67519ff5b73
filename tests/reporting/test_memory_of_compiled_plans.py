"""Which steps of a run are measured: compilation, and the uncompiled count of FLOPs, stay out of the figures."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from memsave_recipes.reporting.memory import MemoryWatch
from memsave_recipes.reporting.out_of_memory.page import RunSettings
from memsave_recipes.training.sample_order import Geometry


def steps_of(steps, *, compiles):
    model = nn.Linear(2, 2)
    watch = MemoryWatch(
        Accelerator(cpu=True),
        model,
        torch.optim.SGD(model.parameters()),
        steps=steps,
        geometry=Geometry.of(4, 4, 1),
        settings=RunSettings(folder=Path(), flags={}, blocks=(), compiles=compiles),
    )
    return watch.metered_step, watch.instrumented_step, watch.num_slow_steps


@pytest.mark.parametrize(
    ("steps", "compiles", "expected"),
    [
        (range(9), False, (0, 1, 2)),
        (range(9), True, (1, 2, 3)),
        (range(4, 9), True, (5, 6, 3)),
        (range(2), True, (1, 1, 3)),
        (range(1), True, (0, 0, 3)),
    ],
)
def test_the_steps_that_are_measured(steps, compiles, expected):
    assert steps_of(steps, compiles=compiles) == expected
