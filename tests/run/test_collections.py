"""Objects of the first step are spared to Python's collections of cycles while the run trains."""

import gc
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest

from memsave_recipes.run.training_run import TrainingRun


def run_of(num_steps):
    """As much of a run as its steps read."""
    return SimpleNamespace(
        args=SimpleNamespace(eval_only=False),
        accelerator=SimpleNamespace(is_main_process=False),
        batches=[SimpleNamespace(step=step) for step in range(num_steps)],
        scheduler=SimpleNamespace(get_last_lr=lambda: [0.1]),
        built=SimpleNamespace(loss_of=None),
        _measured=ExitStack(),
        _report=SimpleNamespace(
            clock=SimpleNamespace(loading=iter), count_flops=lambda *_: None, measured=lambda step: nullcontext()
        ),
        _stops_early=lambda: False,
        _average=None,
    )


@pytest.fixture(autouse=True)
def nothing_frozen():
    before = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if before:  # of the nursery, for the tests that follow
        gc.freeze()


def test_objects_are_frozen_after_the_first_step_until_the_last():
    frozen = [gc.get_freeze_count() for _ in TrainingRun.steps(run_of(3))]
    assert frozen[0] == 0
    assert 0 < frozen[2] <= frozen[1]  # some may be freed meanwhile
    assert gc.get_freeze_count() == 0


def test_a_run_that_breaks_off_frees_them():
    steps = TrainingRun.steps(run_of(3))
    next(steps), next(steps)
    assert gc.get_freeze_count() > 0
    steps.close()
    assert gc.get_freeze_count() == 0


def test_what_its_caller_has_frozen_stays_so():
    gc.freeze()
    of_caller = gc.get_freeze_count()
    list(TrainingRun.steps(run_of(3)))
    assert 0 < gc.get_freeze_count() <= of_caller
