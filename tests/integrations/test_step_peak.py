"""Which steps are measured, and told, on a device with an allocator of its own: its figures are given here."""

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from memsave_recipes.core.plans.prediction import Prediction
from memsave_recipes.core.text import format_bytes
from memsave_recipes.integrations.planned_training import StepPeak

MIB = 2**20
PREDICTED = Prediction(
    peak_bytes=100 * MIB, baseline_peak_bytes=200 * MIB, baseline_s=1.0, added_s=0.1, host_bytes=0, spans=()
)


@pytest.fixture
def lines_of(monkeypatch):
    """The lines of a training whose steps peak at ``peaks``, in MiB."""

    def run(peaks, budget=None, state=False):
        model = nn.Linear(2, 2)
        optimizer = AdamW(model.parameters())
        if state:
            optimizer.state[model.weight] = {"step": torch.zeros(())}
        mark = [0]
        monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: mark.__setitem__(0, 0))
        monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: mark[0] * MIB)
        peak, lines = StepPeak(model, optimizer, torch.device("cuda")), []
        for one in peaks:
            peak.before_forward(list)
            mark[0] = max(mark[0], one)
            lines.append(peak.after_step(PREDICTED, budget and budget * MIB))
        return lines

    return run


def test_the_second_step_is_compared(lines_of):
    line = "peak of step 2: 99 MiB, predicted 100 MiB (+1.0 %)"
    assert lines_of([500, 99, 100, 98]) == [None, line, None, None]


def test_the_first_step_is_compared_where_the_optimizer_has_state_already(lines_of):
    assert lines_of([99, 99], budget=120, state=True) == [
        "peak of step 1: 99 MiB, predicted 100 MiB (+1.0 %), budget 120 MiB",
        None,
    ]


def test_a_later_step_above_the_budget_is_told_once(lines_of):
    lines = lines_of([10, 99, 110, 130, 140], budget=120)
    assert lines[2:] == [None, "step 4 took 130 MiB, above 120 MiB", None]


def test_without_a_budget_the_prediction_is_the_limit(lines_of):
    assert lines_of([10, 99, 101])[2] == "step 3 took 101 MiB, above 100 MiB"


def test_a_step_whose_window_was_closed_is_not_compared():
    model = nn.Linear(2, 2)
    peak = StepPeak(model, AdamW(model.parameters()), torch.device("cpu"))
    lines = []
    for _ in range(4):
        peak.before_forward(list)
        if peak.num_steps == 1:  # planned again
            peak.close()
        model(torch.ones(1, 2)).sum().backward()
        lines.append(peak.after_step(PREDICTED, None))
        model.zero_grad()
    assert [bool(line) for line in lines] == [False, False, True, False]
    assert lines[2].startswith("peak of step 3: ")


def test_gradients_of_the_step_before_take_another_recorded_step():
    """As torch's profiler reports no release of what was allocated before it began."""
    model = nn.Linear(512, 512)
    optimizer = AdamW(model.parameters(), fused=True)
    peak, lines = StepPeak(model, optimizer, torch.device("cpu")), []
    for _ in range(4):
        peak.before_forward(list)
        loss = model(torch.ones(1, 512)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lines.append(peak.after_step(PREDICTED, None))
    assert [bool(line) for line in lines] == [False, False, True, False]
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert lines[2].startswith(f"peak of step 3: {format_bytes(4 * weights_bytes)}, ")
