"""A recipe, run in this process: the test module names it by ``RECIPE``, such as ``image_classification``."""

import gc
import sys
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from memsave_recipes.data.vision import images
from memsave_recipes.run.failures import run_recipe
from memsave_recipes.training.checkpoints import Checkpoints

sys.path.insert(0, str(Path(__file__).parent))  # for the tests to import ``fuzzing``
from lives import Killed, be_rank, loaded

images.read_digits = cache(images.read_digits)  # the same 1,797 images for all runs of this process


@pytest.fixture(scope="module")
def recipe(request):
    """The module of the recipe."""
    with loaded(getattr(request, "param", None) or request.module.RECIPE) as module:
        yield module


def forget_earlier_runs():
    """Also their tensors in reference cycles, which a device's planner would take for what libraries keep."""
    AcceleratorState._reset_state(reset_partial_state=True)
    if torch.cuda.is_available():
        gc.collect()


@pytest.fixture
def train(recipe, tmp_path):
    """Run the recipe; returns its results."""

    def run(*flags, output="run"):
        forget_earlier_runs()
        return recipe.main([*map(str, flags), "--report_to", "none", "--output_dir", str(tmp_path / output)])

    return run


@pytest.fixture
def train_on_ranks(request, run_on_ranks, tmp_path):
    """Run the recipe on so many forked ranks; returns the results, and what was printed."""

    def run(num_ranks, *flags, output="run", recipe=request.module.RECIPE):
        words = [*map(str, flags), "--report_to", "none", "--output_dir", str(tmp_path / output)]
        ranks = run_on_ranks(partial(be_rank, recipe=recipe, words=words), num_ranks, timeout_s=150)
        return ranks[0][0], "".join(printed for _, printed in ranks)

    return run


@pytest.fixture
def ending(recipe, tmp_path, capsys):
    """Run the recipe, which ends with an error; returns its exit code and its one line."""

    def run(*flags, output="run"):
        forget_earlier_runs()
        capsys.readouterr()
        words = [*map(str, flags), *([] if "--report_to" in flags else ["--report_to", "none"])]
        with pytest.raises(SystemExit) as end:
            run_recipe(lambda: recipe.main([*words, "--output_dir", str(tmp_path / output)]))
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        return end.value.code, line

    return run


@pytest.fixture
def refuse(ending, tmp_path):
    """Run the recipe with a mistake; returns the one line that it ends with, before a step."""

    def run(*flags, output="run"):
        code, line = ending(*flags, output=output)
        assert code == 2
        assert not (tmp_path / output / "metrics.jsonl").exists()
        return line

    return run


@pytest.fixture(scope="module")
def run_once(recipe, tmp_path_factory):
    """Run the recipe for all tests of a module; returns the run's folder."""

    def run(*flags, folder=None):
        folder = folder or tmp_path_factory.mktemp("once") / "run"
        forget_earlier_runs()
        recipe.main([*map(str, flags), "--report_to", "none", "--output_dir", str(folder)])
        return folder

    return run


@pytest.fixture(scope="module")
def kill_after():
    """``with kill_after(step):`` a run ends there, when that step is done and everything it saves is saved."""

    @contextmanager
    def armed(step):
        after_step = Checkpoints.after_step

        def and_then_end(self, at, state):
            after_step(self, at, state)
            if at == step:
                raise Killed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpoints, "after_step", and_then_end)
            try:
                yield
            except Killed:
                return
        pytest.fail(f"it did not come to step {step}")

    return armed
