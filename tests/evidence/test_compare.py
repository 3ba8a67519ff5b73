"""Each run beside its baseline: figures, their ratios and the largest difference of the loss curves."""

import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from memsave_recipes.evidence.compare import ComparisonRow, ComparisonTable, compare, render
from memsave_recipes.evidence.runs import Run

GIB = 1024**3


def make_run(
    folder: str, *, model: str = "vgg11", plan: str = "none", losses: tuple = (2.0, 1.0), **results: Any
) -> Run:
    figures = {
        "model": model,
        "plan": plan,
        "global_batch_size": 64,
        "micro_batch_size": 16,
        "num_processes": 2,
        "accumulation_steps": 2,
        "eval": {"loss": 0.5, "accuracy": 0.9805},
        "memory": {"peak_allocated_gib": 1.0, "saved_for_backward_gib": 0.5, "source": "one instrumented step"},
        "perf": {"samples_per_sec": 100.0, "train_time_s": 50.0},
    }
    history = [{"step": step, "train/loss": loss} for step, loss in enumerate(losses, start=1)]
    path = Path("/runs") / folder
    return Run(name=path.name, folder=path, results={**figures, **results}, config={}, history=history)


def rows_by_name(table: ComparisonTable) -> dict[str, ComparisonRow]:
    return {row.run: row for row in table.rows}


def printed(table: ComparisonTable, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render(table))
    return capture.get()


def checkpointed(folder: str = "checkpointed", **changes: Any) -> Run:
    return make_run(
        folder,
        **{
            "plan": "segments:2",
            "memory": {
                "peak_allocated_gib": 0.65,
                "saved_for_backward_gib": 0.1,
                "source": "one instrumented step",
            },
            "perf": {"samples_per_sec": 80.0, "train_time_s": 60.5},
            **changes,
        },
    )


def test_each_figure_stands_beside_the_baseline() -> None:
    row = rows_by_name(compare([make_run("plain"), checkpointed()]))["checkpointed"]
    assert (row.plan, row.geometry, row.metric) == ("segments:2", "16 x 2 ranks x 2", "accuracy")
    assert (row.peak_memory.value, row.peak_memory.baseline) == (0.65 * GIB, GIB)
    assert row.peak_memory.ratio == 0.65
    assert row.saved_for_backward.ratio == pytest.approx(0.2)
    assert row.samples_per_s.ratio == 0.8
    assert row.train_time.ratio == 1.21
    assert row.evaluation.difference == 0
    assert row.loss_difference == 0


def test_a_baseline_is_compared_with_nothing() -> None:
    row = rows_by_name(compare([make_run("plain"), checkpointed()]))["plain"]
    assert row.is_baseline
    assert row.peak_memory.ratio is row.evaluation.difference is row.loss_difference is None


def test_the_plain_run_of_the_same_work_is_the_baseline() -> None:
    runs = [
        checkpointed("small"),
        make_run("small-plain"),
        checkpointed("large", global_batch_size=128),
        make_run("dense-plain", model="densenet121", memory={"peak_allocated_gib": 3.0}),
        checkpointed("large-every", global_batch_size=128, memory={"peak_allocated_gib": 0.13}),
    ]
    table = compare(runs)
    assert [row.run for row in table.rows] == ["small-plain", "small", "large", "large-every", "dense-plain"]
    assert [row.run for row in table.rows if row.is_baseline] == ["small-plain", "large", "dense-plain"]
    assert rows_by_name(table)["large-every"].samples_per_s.baseline == 80.0


def test_a_chosen_baseline_counts_for_its_model_and_joins_the_runs() -> None:
    chosen = checkpointed("chosen", perf={"samples_per_sec": 50.0})
    table = compare([make_run("plain"), make_run("dense", model="densenet121")], baseline=chosen)
    rows = rows_by_name(table)
    assert rows["plain"].samples_per_s.ratio == 2.0
    assert rows["chosen"].is_baseline
    assert rows["dense"].is_baseline


def test_absent_figures_stay_absent() -> None:
    bare = Run(name="bare", folder=Path("/runs/bare"), results={"model": "vgg11"}, config={}, history=[])
    row = rows_by_name(compare([make_run("plain", global_batch_size=None), bare]))["bare"]
    assert row.plan is row.geometry is row.metric is row.loss_difference is None
    assert {figure.value for figure in (row.peak_memory, row.samples_per_s, row.train_time, row.evaluation)} == {None}
    assert row.peak_memory.ratio is None
    line = next(line for line in printed(compare([bare]), 100).splitlines() if line.startswith(" bare"))
    assert line.split() == ["bare", "-", "-", "-", "-", "-", "baseline"]


def test_peaks_that_were_measured_differently_are_not_compared() -> None:
    on_gpu = checkpointed(memory={"peak_allocated_gib": 0.65, "source": "CUDA allocator"})
    table = compare([make_run("plain"), on_gpu])
    assert rows_by_name(table)["checkpointed"].peak_memory.ratio is None
    assert table.memory_sources == ("one instrumented step", "CUDA allocator")


@pytest.mark.parametrize(
    ("losses", "difference"),
    [((2.0, 1.0), 0.0), ((2.0, 1.25), 0.25), ((1.5, 1.25), 0.5), ((2.0, 1.0, 0.5), None), ((), None)],
)
def test_loss_difference_is_the_largest_at_any_step_or_absent(losses: tuple, difference: float | None) -> None:
    table = compare([make_run("plain"), checkpointed(losses=losses)])
    assert rows_by_name(table)["checkpointed"].loss_difference == difference


def test_a_diverged_curve_never_reads_as_equal() -> None:
    table = compare([make_run("plain", losses=(2.0, math.nan)), checkpointed(losses=(2.0, math.nan))])
    assert math.isnan(rows_by_name(table)["checkpointed"].loss_difference or 0.0)


def test_without_an_accuracy_the_first_metric_counts() -> None:
    table = compare([make_run("lm", eval={"note": "x", "loss": 3.0, "perplexity": 20.1})])
    assert (table.rows[0].metric, table.rows[0].evaluation.value) == ("loss", 3.0)


def test_runs_of_the_same_name_are_told_apart() -> None:
    table = compare([make_run("seed0/plain"), make_run("seed1/plain")])
    assert [row.run for row in table.rows] == ["seed0/plain", "seed1/plain"]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_fits_the_terminal_with_every_figure_whole(width: int) -> None:
    text = printed(compare([make_run("plain"), checkpointed(losses=(2.0, 1.0 + 2.1e-7))]), width)
    assert max(map(len, text.splitlines())) <= width
    figures = ("vgg11", "segments:2", "666 MiB", "-35 %", "102 MiB", "-80 %", "x0.80", "60.5 s", "x1.21", "0.9805")
    for figure in (*figures, "same", "2.1e-07", "baseline", "one instrumented step"):
        assert figure in text


def test_equal_curves_print_as_0() -> None:
    lines = printed(compare([make_run("plain"), checkpointed()]), 100).splitlines()
    assert next(line for line in lines if "checkpointed" in line).split()[-1] == "0"


def test_a_bracket_in_a_name_is_no_markup() -> None:
    assert "[bold]" in printed(compare([make_run("[bold]")]), 100)
