"""A run's folder becomes a row; a row with figures that cannot be, or another schema, is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memsave_recipes.tools.compare import Run

GIB = 1024**3
COMMITTED = Path(__file__).parents[3] / "docs/results/rows"
Write = Callable[[Run, Path], Path]
Main = Callable[[list[str]], int]
Rows = dict[str, Any]


@pytest.fixture
def rows_of(load: Callable[[str], Any]) -> Callable[..., list[Any]]:
    return load("result_rows.rows").rows_of


@pytest.fixture
def checks(load: Callable[[str], Any]) -> Any:
    return load("result_rows.checks")


def test_a_row_has_the_figures_of_the_run_in_bytes(rows: Rows) -> None:
    row = rows["segments:2"]
    assert (row.model, row.device, row.processor, row.num_threads) == ("vgg11", "A100", "a processor, AVX2", 2)
    assert (row.micro_batch_size, row.num_processes, row.accumulation_steps) == (16, 2, 2)
    assert row.peak_bytes == round(0.65 * GIB)
    assert row.predicted_peak_bytes == round(0.6500001 * GIB)
    assert (row.weights_bytes, row.device_memory_bytes) == (0.25 * GIB, 80 * GIB)
    assert (row.samples_per_s, row.metric, row.quality) == (80.0, "accuracy", 0.9805)
    assert row.versions["torch"] == "2.13.0+cpu"
    assert row.git_commit == "355b78c38db323dd7fbaa2e1c286e4312ba7076d"
    assert row.workload["data"] == "digits"
    assert row.settings == {"optimizer": "adamw"}


def test_the_time_ratio_is_that_to_the_plain_run_of_the_same_workload(
    rows_of: Callable[..., list[Any]], rows: Rows, runs: list[Run]
) -> None:
    assert rows["none"].time_ratio == 1.0
    assert rows["segments:2"].time_ratio == pytest.approx(100 / 80)
    elsewhere = replace(runs[0], results={**runs[0].results, "device": "H200"})
    assert [row.time_ratio for row in rows_of([elsewhere, runs[1]]) if row.plan != "none"] == [None]
    assert [row.time_ratio for row in rows_of(runs[1:])] == [None]


def test_the_spread_is_that_of_the_logging_windows(
    main: Main, checks: Any, runs: list[Run], write: Write, tmp_path: Path
) -> None:
    folder = write(runs[0], tmp_path / "run")
    speeds = [None, 90.0, 100.0, 110.0, 120.0]
    lines = [{"step": step, "perf/samples_per_sec": speed} for step, speed in enumerate(speeds)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["add", str(folder), "--to", str(tmp_path / "rows")]) == 0
    (row,) = checks.read_rows(tmp_path / "rows")[0]
    assert (row.samples_per_s_quartiles, row.num_windows) == ([97.5, 112.5], 4)


def test_one_command_makes_rows_of_a_folder_and_names_what_is_missing(
    main: Main, checks: Any, runs: list[Run], write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in runs:
        write(run, tmp_path / "out" / run.name)
    to = tmp_path / "rows"
    assert main(["add", str(tmp_path / "out"), "--to", str(to)]) == 0
    printed = capsys.readouterr().out
    assert "device_memory_bytes is missing: give --device_memory, such as 80GiB" in printed
    assert "predicted_peak_bytes is missing: train with --activation_checkpointing budget" in printed
    rows, problems = checks.read_rows(to)
    assert ({row.plan for row in rows}, problems) == ({"none", "segments:2"}, [])
    assert main(["check", str(to)]) == 0
    assert main(["add", str(tmp_path / "out"), "--to", str(to)]) == 0
    assert "replaced" in capsys.readouterr().out
    assert len(list(to.iterdir())) == 2


@pytest.mark.parametrize("kind", ["to a file", "to nothing", "to a folder"])
def test_no_link_in_the_folder_of_rows_is_written_through(
    main: Main, runs: list[Run], write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    folder, to, elsewhere = write(runs[0], tmp_path / "run"), tmp_path / "rows", tmp_path / "elsewhere"
    assert main(["add", str(folder), "--to", str(to)]) == 0
    (row,) = to.iterdir()
    row.unlink()
    row.symlink_to(elsewhere)
    if kind == "to a folder":
        elsewhere.mkdir()
    elif kind == "to a file":
        elsewhere.write_text("precious")
    capsys.readouterr()
    assert main(["add", str(folder), "--to", str(to)]) == 2
    assert f"{row.name} there is a link, which is not followed: remove it" in capsys.readouterr().err
    assert elsewhere.is_dir() if kind == "to a folder" else elsewhere.exists() == (kind == "to a file")
    assert kind != "to a file" or elsewhere.read_text() == "precious"


def test_a_busy_machine_gives_bytes_and_no_times(main: Main, runs: list[Run], write: Write, tmp_path: Path) -> None:
    folder, to = write(runs[0], tmp_path / "run"), tmp_path / "rows"
    assert main(["add", str(folder), "--to", str(to), "--without_times"]) == 0
    (path,) = to.iterdir()
    row = json.loads(path.read_text())
    assert row["peak_bytes"] == GIB
    assert {row[name] for name in ("samples_per_s", "time_ratio", "num_windows")} == {None}


def test_what_is_no_finished_run_is_refused_in_one_line(
    main: Main, runs: list[Run], write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(runs[0], tmp_path / "run")
    (folder / "results.json").unlink()
    assert main(["add", str(folder), "--to", str(tmp_path / "rows")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {folder} is not a finished run (no results.json)")
    evaluated = replace(runs[0], results={"model": "vgg11", "plan": "none", "eval": {"loss": 0.5}})
    assert main(["add", str(write(evaluated, tmp_path / "other")), "--to", str(tmp_path / "rows")]) == 2
    assert "no figures of training" in capsys.readouterr().err
    assert not (tmp_path / "rows").exists()


def test_local_paths_stay_at_home(rows_of: Callable[..., list[Any]], runs: list[Run], tmp_path: Path) -> None:
    local = replace(runs[0], config={**runs[0].config, "data_dir": str(tmp_path / "photos")})
    (row,) = rows_of([local])
    assert "photos" in row.workload["data"]
    assert str(tmp_path) not in row.to_json()


IMPOSSIBLE = (
    ({"peak_bytes": GIB // 8}, "peak_bytes 128 MiB is below the weights' 256 MiB"),
    ({"predicted_peak_bytes": GIB // 8}, "predicted_peak_bytes 128 MiB is below the weights' 256 MiB"),
    ({"peak_bytes": 100 * GIB}, "peak_bytes 100 GiB is above the device's 80 GiB"),
    ({"samples_per_s": 0.0}, "samples_per_s 0.0 is not above 0"),
    ({"time_ratio": -1.5}, "time_ratio -1.5 is not above 0"),
    ({"num_processes": 0}, "num_processes 0 is not above 0"),
    ({"saved_for_backward_bytes": -1}, "saved_for_backward_bytes -1 is below 0"),
    ({"evaluation": {"accuracy": 98.05}}, "accuracy 98.05 is not in [0, 1]"),
    ({"metric": "f1"}, "metric f1 is not in evaluation"),
    ({"samples_per_s_quartiles": [3.0, 2.0]}, "are not two speeds in order"),
    ({"device": None}, "samples_per_s has no device"),
    ({"samples_per_s": None}, "samples_per_s is null"),
)


@pytest.mark.parametrize(("changes", "problem"), IMPOSSIBLE, ids=[problem for _, problem in IMPOSSIBLE])
def test_what_cannot_be_is_refused(
    main: Main,
    checks: Any,
    changes: dict[str, Any],
    problem: str,
    rows: Rows,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right, wrong = rows["segments:2"], replace(rows["segments:2"], **changes)
    assert list(checks.problems_of(right)) == []
    (tmp_path / f"{wrong.name}.json").write_text(wrong.to_json())
    assert main(["check", str(tmp_path)]) == 2
    (line, _) = capsys.readouterr().err.splitlines()
    assert problem in line


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"schema_version": 2}, "schema_version 2 is not 1"),
        ({"speed": 3}, "unknown key speed"),
        ({"peak_bytes": "1 GiB"}, "peak_bytes is not of type"),
        ({"peak_bytes": True}, "peak_bytes is not of type"),
        ({"samples_per_s": float("nan")}, "samples_per_s is not of type"),
        ({"evaluation": {"accuracy": None}}, "evaluation is not of type"),
    ],
)
def test_another_schema_is_refused(
    checks: Any, changes: dict[str, Any], problem: str, rows: Rows, tmp_path: Path
) -> None:
    row = json.loads(rows["none"].to_json())
    (tmp_path / "a.json").write_text(json.dumps({**row, **changes}))
    (tmp_path / "b.json").write_text(json.dumps({key: value for key, value in row.items() if key != "plan"}))
    (tmp_path / "c.json").write_text("{")
    found, (first, second, third) = checks.read_rows(tmp_path)
    assert found == []
    assert problem in first
    assert "key plan is missing" in second
    assert "c.json cannot be read" in third


def test_duplicates_and_misnamed_files_are_refused(checks: Any, rows: Rows, tmp_path: Path) -> None:
    row = rows["none"]
    (tmp_path / "mine.json").write_text(row.to_json())
    assert checks.read_rows(tmp_path)[1] == [
        f"{tmp_path}/mine.json is not named by its content: rename it to {row.name}.json"
    ]
    (tmp_path / f"{row.name}.json").write_text(row.without_times().to_json())
    (problem,) = checks.read_rows(tmp_path)[1]
    assert "mine.json" in problem
    assert "the same run: keep one" in problem


def test_a_row_is_read_as_it_was_written(checks: Any, rows: Rows, tmp_path: Path) -> None:
    for row in rows.values():
        (tmp_path / "row.json").write_text(row.to_json())
        assert checks.read_row(tmp_path / "row.json") == row


def test_the_committed_rows_are_possible(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(COMMITTED)]) == 0
    assert "rows without a problem: 0" not in capsys.readouterr().out
