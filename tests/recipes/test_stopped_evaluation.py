"""A signal in the middle of an evaluation ends it; what goes on does it again, and is the run that nothing ended."""

import importlib
import io
import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from lives import FLAGS, Killed, assert_the_same_run, assert_the_same_weights, rows_of
from samples import sample

from memsave_recipes.run import training_run
from memsave_recipes.training.checkpoints import Checkpoints, StoppedBySignal
from memsave_recipes.training.checkpoints.resume import committed
from memsave_recipes.training.launch import distributed

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
for name in FLAGS:
    importlib.import_module(name)  # once, before the ranks are forked
sys.path.pop()

DONE = 0


def live(accelerator, *, recipe, folder, signal_in=None, killed_after=None):
    """A life of the run on a rank: how it ended, and the batches of each evaluation.

    Args:
        signal_in: which evaluation of this life the last rank gets a SIGTERM in, from 0.
        killed_after: the step after which it dies.
    """
    module = sys.modules[recipe]
    distributed.POLL_EVERY_S = 0  # these evaluations take a moment
    batches_of = []
    gets_it = accelerator.process_index == accelerator.num_processes - 1
    training_run.evaluation_batches = counted(
        training_run.evaluation_batches, batches_of, signal_in if gets_it else None
    )
    Checkpoints.after_step = ending(Checkpoints.after_step, killed_after)
    words = [*FLAGS[recipe], "--learning_rate", "0.01", "--save_best", "--resume", "--report_to", "none"]
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            module.main([*words, "--output_dir", str(folder)])
        end = DONE
    except StoppedBySignal as stop:
        end = stop.code
    except Killed:
        end = "killed"
    return end, batches_of


def counted(evaluation_batches, batches_of, signal_in):
    numbers = count()

    def counting(*args, **options):
        number = next(numbers)
        batches_of.append(0)
        for batch in evaluation_batches(*args, **options):
            batches_of[-1] += 1
            if number == signal_in and batches_of[-1] == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    return counting


def ending(after_step, killed_after):
    def after(self, step, state):
        after_step(self, step, state)
        if step == killed_after:
            raise Killed

    return after


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "num_ranks"),
    sample([("image_classification", 2)], [("image_classification", 1), *((recipe, 2) for recipe in FLAGS)]),
)
def test_stopped_and_resumed(run_on_ranks, tmp_path, recipe, num_ranks):
    straight, folder = tmp_path / "straight", tmp_path / "run"

    def life(into=folder, **how):
        ends, batches_of = zip(*run_on_ranks(partial(live, recipe=recipe, folder=into, **how), num_ranks), strict=True)
        (end,) = set(ends)
        return end, batches_of[0]

    def evaluated():
        return [row["step"] for row in rows_of(folder) if "eval/loss" in row]

    _, whole = life(straight)
    assert len(whole) == 4  # after steps 3, 6, 9 and the last one, 10
    assert min(whole) > 3

    end, batches = life(signal_in=1)
    assert end == 143
    assert batches[0] == whole[0]
    assert batches[1] <= 3  # the one that the signal came with, or the next
    assert committed(folder / "checkpoints")[0][0] == 6
    assert evaluated() == [3]

    assert life(killed_after=7) == ("killed", whole[:1])  # it has done that evaluation and not saved since
    assert evaluated() == [3, 6]

    end, batches = life(signal_in=2)
    assert end == 143
    assert batches[:2] == whole[:2]
    assert batches[2] <= 3
    assert committed(folder / "checkpoints")[0][0] == 10
    assert evaluated() == [3, 6, 9]

    assert life() == (DONE, whole[:1])
    assert_the_same_run(folder, straight)
    (best,), (expected,) = ((one / "checkpoints").glob("best-*") for one in (folder, straight))
    assert best.name == expected.name
    assert_the_same_weights(best, expected)
