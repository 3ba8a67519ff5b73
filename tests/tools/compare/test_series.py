"""What the charts show: losses by samples, Pareto fronts, and the parts of the peak."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from memsave_recipes.tools.compare import History, Run, compare
from memsave_recipes.tools.pages.charts import REST, by_samples_seen, memory_parts, pareto_fronts, svg_charts

GIB = 1024**3
Make = Callable[..., Run]


def run_with(history: list[dict]) -> Run:
    return Run(name="run", path=Path("/run"), results={"model": "m"}, config={}, history=History(history))


def test_an_evaluation_stands_at_the_samples_of_its_step() -> None:
    history = [
        {"step": 1, "train/loss": 3.0, "progress/samples_seen": 64},
        {"step": 2, "train/loss": 2.0, "progress/samples_seen": 120},
        {"step": 2, "eval/loss": 2.5},
        {"step": 3, "eval/loss": 9.9},
    ]
    assert by_samples_seen(run_with(history), "train/loss") == [(64, 3.0), (120, 2.0)]
    assert by_samples_seen(run_with(history), "eval/loss") == [(120, 2.5)]


def test_steps_that_were_trained_again_count_once() -> None:
    rows = [
        {"step": step, "train/loss": loss, "progress/samples_seen": 8 * step} for step, loss in ((1, 3.0), (1, 2.0))
    ]
    assert by_samples_seen(run_with(rows), "train/loss") == [(8, 2.0)]


def test_a_front_is_ordered_by_memory(make_run: Make) -> None:
    places = {"a": (4.0, 100.0), "b": (1.0, 50.0), "c": (2.0, 40.0)}
    runs = [
        make_run(name, memory={"peak_allocated_gib": memory}, perf={"samples_per_sec": speed})
        for name, (memory, speed) in places.items()
    ]
    assert pareto_fronts(compare(runs).rows) == [[(GIB, 50.0), (4 * GIB, 100.0)]]


@pytest.mark.parametrize(
    ("breakdown", "parts"),
    [
        (None, {REST: 4 * GIB}),
        ({"parameters_gib": 1.0, "activations_gib": 3.0}, {"parameters": GIB, "activations": 3 * GIB}),
        ({"parameters_gib": 1.0, "gradients_gib": 0.0}, {"parameters": GIB, REST: 3 * GIB}),
    ],
)
def test_the_parts_of_the_peak_and_what_is_left(breakdown: dict | None, parts: dict, make_run: Make) -> None:
    run = make_run("run", memory={"peak_allocated_gib": 4.0, "breakdown": breakdown})
    assert memory_parts(compare([run]).rows[0]) == parts


def drawn(losses: tuple, make_run: Make) -> list[list[list[float]]]:
    """The loss curve as drawn: its pieces, and of each the heights of its points; none where there is no chart."""
    charts = svg_charts(compare([make_run("run", losses=losses)]).rows)
    paths = re.findall(r'<path d="([^"]*)"[^>]*stroke: #1f77b4', charts[1]) if len(charts) > 1 else []
    pieces = paths[0].split("M")[1:] if paths else []
    return [[-float(point.split()[1]) for point in piece.split("L")] for piece in pieces]


def test_a_long_curve_is_thinned_and_keeps_its_spike(make_run: Make) -> None:
    losses = [1.0 + 0.001 * (n % 7) for n in range(20_000)]
    losses[12_345] = 9.0
    (heights,) = drawn(tuple(losses), make_run)
    assert len(heights) < len(losses) / 2
    middle = (max(heights) + min(heights)) / 2
    assert sum(height > middle for height in heights) in (1, 2)


def test_a_curve_has_a_gap_where_it_is_not_finite(make_run: Make) -> None:
    assert [len(piece) for piece in drawn((3.0, 2.0, math.nan, 1.5, 1.0), make_run)] == [2, 2]


@pytest.mark.parametrize("losses", [(), (1.0,), (math.nan, math.inf)])
def test_without_two_points_and_a_finite_one_there_is_no_chart(losses: tuple, make_run: Make) -> None:
    assert drawn(losses, make_run) == []


@pytest.mark.parametrize(("losses", "is_log"), [((10, 1, 0.1), True), ((10.0, 5.0, 2.5), False), ((4, -1, -6), False)])
def test_a_loss_that_falls_far_has_a_logarithmic_axis(losses: tuple, is_log: bool, make_run: Make) -> None:
    ((first, second, third),) = drawn(losses, make_run)
    assert (second - third == pytest.approx(first - second)) is (is_log or losses[1] < 0)
