"""Rows of the results table, and the command that makes them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from memsave_recipes.tools.compare import Run

GIB = 1024**3
ENVIRONMENT = {
    "versions": {"torch": "2.13.0+cpu", "python": "3.11.7"},
    "git_commit": "355b78c38db323dd7fbaa2e1c286e4312ba7076d",
    "processor": "a processor, AVX2",
    "num_threads": 2,
}


@pytest.fixture
def main(load: Callable[[str], Any]) -> Callable[[list[str]], int]:
    """``python benchmarks/results_table.py`` with words; returns the exit code."""
    return load("results_table").main


@pytest.fixture
def runs(make_run: Callable[..., Run], checkpointed: Callable[..., Run]) -> list[Run]:
    """A plain run, and one in two thirds of the memory and at 0.8 of the speed, of the same workload."""
    config = {"environment": ENVIRONMENT, "optimizer": "adamw", "dataset": "digits", "seed": 0}
    memory = {
        "peak_allocated_gib": 0.65,
        "predicted_peak_gib": 0.6500001,
        "saved_for_backward_gib": 0.1,
        "breakdown": {"parameters_gib": 0.25},
        "source": "one instrumented step",
    }
    return [
        make_run("plain", device="A100", config=config),
        checkpointed("segments", device="A100", config=config, memory=memory),
    ]


@pytest.fixture
def rows(load: Callable[[str], Any], runs: list[Run]) -> dict[str, Any]:
    """The rows of ``runs`` by plan."""
    return {row.plan: row for row in load("result_rows.rows").rows_of(runs, device_memory_bytes=80 * GIB)}


@pytest.fixture
def fast_vit(rows: dict[str, Any]) -> Any:
    """A row of another model on another device."""
    return replace(rows["none"], model="vit", device="CPU", samples_per_s=7000.0, peak_bytes=5 * GIB)
