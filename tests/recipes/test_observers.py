"""What measures a run changes no bit of it: with every observer and without any, it ends in the same weights.

Which kernels a mode on torch's dispatch stack brings, and whether they round otherwise, depends on the processor. So
that a mode is seen on all of them, the loss and its gradient are made to depend on how many stand around the training.
"""

from contextlib import nullcontext

import pytest
import torch
from lives import FLAGS, assert_the_same_run, assert_the_same_weights, rows_of
from samples import sample
from torch.overrides import _len_torch_function_stack

from memsave_recipes.core.costs.breakdown import MemoryBreakdown, PeakOfStep
from memsave_recipes.run import memory_watch
from memsave_recipes.run.report import RunReport

RECIPE = "image_classification"
SHORT = ("--max_steps", "4")


def num_modes():
    return torch._C._len_torch_dispatch_stack() + _len_torch_function_stack()


class FeelsModes(torch.autograd.Function):
    """A loss and its gradient as they are, and twice as large where one mode stands around."""

    @staticmethod
    def forward(ctx, loss):
        return loss * (1 + num_modes())

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + num_modes())


@pytest.fixture(autouse=True)
def feel_modes(recipe, monkeypatch):
    summed_loss = recipe.summed_loss
    monkeypatch.setattr(recipe, "summed_loss", lambda *args, **kwargs: FeelsModes.apply(summed_loss(*args, **kwargs)))


@pytest.fixture
def train_unobserved(train):
    """Run the recipe without what counts FLOPs, records allocations and notes saved tensors."""

    def run(*flags, output):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunReport, "count_flops", lambda *_: None)
            patch.setattr(memory_watch, "break_down_peak", lambda *_: nullcontext(PeakOfStep(MemoryBreakdown())))
            patch.setattr(memory_watch.ForwardMeter, "__enter__", lambda self: self)
            return train(*flags, output=output)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "plan"),
    [("image_classification", "none"), ("language_modeling", "selective"), ("text_classification", "segments:2")],
    indirect=["recipe"],
)
def test_figures(recipe, train, train_unobserved, tmp_path, plan):
    flags = [*FLAGS[recipe.__name__], *SHORT, "--activation_checkpointing", plan]
    bare = train_unobserved(*flags, output="bare")
    observed = train(*flags, output="observed")
    assert "model_gflops_per_sample" in observed["perf"].keys() - bare["perf"].keys()
    assert_the_same_run(tmp_path / "observed", tmp_path / "bare")


def assert_the_same_training(folder, bare):
    """Whatever else was found out on the way."""
    losses = {"train/loss", "eval/loss"}
    rows, expected = ([row for row in rows_of(one) if losses & row.keys()] for one in (folder, bare))
    assert rows == expected
    assert_the_same_weights(folder / "final", bare / "final")


@pytest.mark.parametrize("recipe", sample(["language_modeling"], FLAGS), indirect=True)
def test_verify(recipe, train, tmp_path):
    flags = [*FLAGS[recipe.__name__], *SHORT, "--activation_checkpointing", "full"]
    train(*flags, output="bare")
    assert train(*flags, "--verify", output="observed")["equivalence"]["verdict"] == "identical"
    assert_the_same_training(tmp_path / "observed", tmp_path / "bare")


@pytest.mark.parametrize("recipe", sample(["image_classification"], FLAGS), indirect=True)
def test_the_planners_measuring(recipe, train, tmp_path):
    flags = [*FLAGS[recipe.__name__], *SHORT]
    train(*flags, "--activation_checkpointing", "budget:bitwise", "--memory_budget_gib", "1", output="observed")
    train(*flags, "--activation_checkpointing", str(tmp_path / "observed" / "plan.json"), output="bare")
    assert_the_same_training(tmp_path / "observed", tmp_path / "bare")


def test_a_mode_would_be_felt(train, tmp_path, monkeypatch):
    """The negative control: the counter around the training step itself."""
    flags = [*FLAGS[RECIPE], *SHORT]
    train(*flags, output="bare")
    monkeypatch.setattr(RunReport, "measured", lambda *_: torch.utils.flop_counter.FlopCounterMode(display=False))
    train(*flags, output="observed")
    with pytest.raises(AssertionError):
        assert_the_same_weights(tmp_path / "observed" / "final", tmp_path / "bare" / "final")
