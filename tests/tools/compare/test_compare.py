"""Each run beside its baseline: figures, their ratios, the largest difference of the loss curves, the Pareto front."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from memsave_recipes.tools.compare import PEAK, SPEED, ComparisonRow, ComparisonTable, History, Run, compare

GIB = 1024**3
Make = Callable[..., Run]


def rows_by_name(table: ComparisonTable) -> dict[str, ComparisonRow]:
    return {row.name: row for row in table.rows}


def test_each_figure_stands_beside_the_baseline(make_run: Make, checkpointed: Make) -> None:
    row = rows_by_name(compare([make_run("plain"), checkpointed()]))["checkpointed"]
    assert (row.plan, row.layout, row.metric) == ("segments:2", "16 x 2 ranks x 2", "accuracy")
    assert (row.figures[PEAK].value, row.figures[PEAK].baseline) == (0.65 * GIB, GIB)
    assert row.figures[PEAK].ratio == 0.65
    assert row.figures["saved_for_backward_bytes"].ratio == pytest.approx(0.2)
    assert row.figures[SPEED].ratio == 0.8
    assert row.figures["train_time_s"].ratio == 1.21
    assert row.evaluation["accuracy"].difference == row.evaluation["loss"].difference == 0
    assert row.loss_difference == 0


def test_a_baseline_is_compared_with_nothing(make_run: Make, checkpointed: Make) -> None:
    row = rows_by_name(compare([make_run("plain"), checkpointed()]))["plain"]
    assert row.is_baseline
    assert row.figures[PEAK].ratio is row.evaluation["accuracy"].difference is row.loss_difference is None


def test_the_plain_run_of_the_same_work_is_the_baseline(make_run: Make, checkpointed: Make) -> None:
    runs = [
        checkpointed("small"),
        make_run("small-plain"),
        checkpointed("large", global_batch_size=128),
        make_run("dense-plain", model="densenet121", memory={"peak_allocated_gib": 3.0}),
        checkpointed("large-every", global_batch_size=128, memory={"peak_allocated_gib": 0.13}),
    ]
    table = compare(runs)
    assert [row.name for row in table.rows] == ["small-plain", "small", "large", "large-every", "dense-plain"]
    assert [row.name for row in table.rows if row.is_baseline] == ["small-plain", "large", "dense-plain"]
    assert [len(rows) for rows in table.sections] == [4, 1]
    assert rows_by_name(table)["large-every"].figures[SPEED].baseline == 80.0


def test_a_chosen_baseline_counts_for_its_model_and_joins_the_runs(make_run: Make, checkpointed: Make) -> None:
    chosen = checkpointed("chosen", perf={"samples_per_sec": 50.0})
    rows = rows_by_name(compare([make_run("plain"), make_run("dense", model="densenet121")], baseline=chosen))
    assert rows["plain"].figures[SPEED].ratio == 2.0
    assert rows["chosen"].is_baseline
    assert rows["dense"].is_baseline


def test_absent_figures_stay_absent(make_run: Make) -> None:
    bare = Run(name="bare", path=Path("/runs/bare"), results={"model": "vgg11"}, config={}, history=History([]))
    row = rows_by_name(compare([make_run("plain", global_batch_size=None), bare]))["bare"]
    assert row.plan is row.layout is row.metric is row.loss_difference is row.position is None
    assert {figure.value for figure in row.figures.values()} == {None}
    assert row.evaluation == {}
    assert not row.is_pareto_optimal


def test_peaks_that_were_measured_differently_are_not_compared(make_run: Make, checkpointed: Make) -> None:
    on_gpu = checkpointed(memory={"peak_allocated_gib": 0.65, "source": "CUDA allocator"})
    table = compare([make_run("plain"), on_gpu])
    row = rows_by_name(table)["checkpointed"]
    assert row.figures[PEAK].ratio is None
    assert row.differs == ("memory source",)
    assert table.memory_sources == ("one instrumented step", "CUDA allocator")


@pytest.mark.parametrize(
    ("losses", "difference"),
    [((2.0, 1.0), 0.0), ((2.0, 1.25), 0.25), ((1.5, 1.25), 0.5), ((2.0, 1.0, 0.5), None), ((), None)],
)
def test_loss_difference_is_the_largest_at_any_step_or_absent(
    losses: tuple, difference: float | None, make_run: Make, checkpointed: Make
) -> None:
    table = compare([make_run("plain"), checkpointed(losses=losses)])
    assert rows_by_name(table)["checkpointed"].loss_difference == difference


def test_a_diverged_curve_never_reads_as_equal(make_run: Make, checkpointed: Make) -> None:
    table = compare([make_run("plain", losses=(2.0, math.nan)), checkpointed(losses=(2.0, math.nan))])
    assert math.isnan(rows_by_name(table)["checkpointed"].loss_difference or 0.0)


@pytest.mark.parametrize(
    ("evaluation", "metric"),
    [
        ({"loss": 3.0, "accuracy": 0.9, "f1": 0.8}, "accuracy"),
        ({"loss": 3.0, "f1": 0.8}, "f1"),
        ({"loss": 3.0, "perplexity": 20.1, "bits_per_byte": 1.2}, "bits_per_byte"),
        ({"note": "x", "loss": 3.0, "perplexity": 20.1}, "loss"),
        ({"word_error_rate": 0.2}, "word_error_rate"),
        ({}, None),
    ],
)
def test_the_most_telling_metric_is_found_whatever_the_recipe(
    evaluation: dict, metric: str | None, make_run: Make
) -> None:
    row = compare([make_run("run", eval=evaluation)]).rows[0]
    assert row.metric == metric
    assert set(row.evaluation) == {name for name, value in evaluation.items() if value != "x"}


def test_runs_of_the_same_name_are_told_apart(make_run: Make) -> None:
    runs = [make_run("seed0/a/plain"), make_run("seed1/a/plain"), make_run("seed1/b/plain"), make_run("other")]
    names = [row.name for row in compare(runs).rows]
    assert names == ["seed0/a/plain", "seed1/a/plain", "b/plain", "other"]


def placed(make_run: Make, name: str, memory: float, speed: float, **changes: object) -> Run:
    return make_run(name, memory={"peak_allocated_gib": memory}, perf={"samples_per_sec": speed}, **changes)


def test_pareto_optimal_is_what_no_rival_beats_in_memory_and_speed(make_run: Make) -> None:
    places = {
        "plain": (4.0, 100.0),
        "good": (2.0, 80.0),
        "worse": (3.0, 80.0),
        "twin": (2.0, 80.0),
        "small": (1.0, 9.0),
    }
    rows = compare([placed(make_run, name, *place) for name, place in places.items()]).rows
    assert {row.name for row in rows if row.is_pareto_optimal} == {"plain", "good", "twin", "small"}


@pytest.mark.parametrize(
    "difference",
    [{"global_batch_size": 128}, {"num_processes": 4}, {"device": "H200"}, {"config": {"dtype": "bfloat16"}}],
)
def test_only_runs_of_the_same_work_on_the_same_hardware_are_rivals(difference: dict, make_run: Make) -> None:
    first, second = placed(make_run, "fast", 1.0, 100.0, device="A100", config={"dtype": "float32"}), None
    second = placed(make_run, "slow", 2.0, 50.0, **{"device": "A100", "config": {"dtype": "float32"}, **difference})
    assert not any(row.is_pareto_optimal for row in compare([first, second]).rows)


def test_another_seed_or_length_is_still_a_rival(make_run: Make) -> None:
    first = placed(make_run, "fast", 1.0, 100.0, steps=10, config={"seed": 0})
    second = placed(make_run, "slow", 2.0, 50.0, steps=20, config={"seed": 1})
    assert [row.is_pareto_optimal for row in compare([first, second]).rows] == [True, False]


def test_of_several_plain_runs_the_one_with_the_largest_micro_batch_is_the_baseline(make_run: Make) -> None:
    sizes = {"micro16": 16, "micro64": 64, "micro32": 32}
    runs = [make_run(name, micro_batch_size=n) for name, n in sizes.items()]
    table = compare([make_run("full", micro_batch_size=128, plan="full"), *runs])
    assert [row.name for row in table.rows if row.is_baseline] == ["micro64"]
