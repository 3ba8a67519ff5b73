"""Every run has its metrics.jsonl, trackers get the same rows, and none can prompt, hang or stop a run."""

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import three_steps
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker

from memsave_recipes.core.errors import InputError
from memsave_recipes.run import trackers
from memsave_recipes.run.trackers import (
    RunLabels,
    alert,
    finish_trackers,
    resolve_trackers,
    start_trackers,
)

MakeAccelerator = Callable[..., Accelerator]
Rows = list[dict[str, object]]


@pytest.fixture
def make_accelerator(tmp_path: Path) -> Iterator[MakeAccelerator]:
    def make(report_to: list[str], *others: GeneralTracker) -> Accelerator:
        AcceleratorState._reset_state(True)
        return Accelerator(cpu=True, log_with=[*others, *resolve_trackers(report_to, tmp_path)])

    yield make
    AcceleratorState._reset_state(True)


@pytest.fixture
def start(tmp_path: Path) -> Callable[[Accelerator], None]:
    labels = RunLabels(**three_steps.LABELS, config=three_steps.CONFIG, output_dir=tmp_path)
    return partial(start_trackers, run=labels)


def rows_of(folder: Path) -> Rows:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def expected_rows() -> Rows:
    return [*three_steps.ROWS, {"step": 3, **three_steps.FLAT_RESULTS}]


def test_metrics_file_has_every_row_and_the_results(
    make_accelerator: MakeAccelerator, expected_rows: Rows, tmp_path: Path
) -> None:
    three_steps.run(make_accelerator(["none"]), tmp_path)
    assert rows_of(tmp_path) == expected_rows


def test_a_row_is_on_disk_as_soon_as_it_is_logged(
    make_accelerator: MakeAccelerator, start: Callable, tmp_path: Path
) -> None:
    accelerator = make_accelerator(["none"])
    start(accelerator)
    accelerator.log({"train/loss": 0.1 + 0.2}, step=1)
    assert rows_of(tmp_path) == [{"step": 1, "train/loss": 0.1 + 0.2}]
    finish_trackers(accelerator, {})


def test_numbers_that_are_not_finite_are_valid_json(
    make_accelerator: MakeAccelerator, start: Callable, tmp_path: Path
) -> None:
    accelerator = make_accelerator(["none"])
    start(accelerator)
    accelerator.log({"a": math.nan, "b": math.inf, "c": -math.inf}, step=1)
    finish_trackers(accelerator, {})
    line = (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert row == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert float(row["c"]) == -math.inf


def test_a_resumed_run_continues_its_file(
    make_accelerator: MakeAccelerator, expected_rows: Rows, tmp_path: Path
) -> None:
    three_steps.run(make_accelerator(["none"]), tmp_path)
    three_steps.run(make_accelerator(["none"]), tmp_path)
    assert rows_of(tmp_path) == expected_rows * 2


def test_other_ranks_start_nothing(start: Callable, tmp_path: Path) -> None:
    accelerator = SimpleNamespace(is_main_process=False)  # touching any tracker would be an AttributeError
    start(accelerator)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("report_to", "words"),
    [
        (["wandbb"], ["--report_to wandbb", "did you mean wandb?", "trackio, wandb, tensorboard, none"]),
        (["none", "wandb"], ["none wandb", "stands alone"]),
        (["wandb"], ["not installed", "pip install 'memsave-recipes[trackers]'"]),
    ],
)
def test_a_mistake_is_one_line_with_the_way_out(
    report_to: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "get_available_trackers", list)
    with pytest.raises(InputError) as error:
        resolve_trackers(report_to, tmp_path)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


class Broken(GeneralTracker):
    """Fails in one of its methods and counts the calls of that."""

    name = "broken"
    requires_logging_directory = False
    tracker = None

    def __init__(self, method: str):
        super().__init__()
        self.calls = 0
        setattr(self, method, self.fail)
        self.method = method

    def fail(self, *args: object, **kwargs: object) -> None:
        self.calls += 1
        raise ConnectionError(f"no {self.method}")


class Alerting(GeneralTracker):
    """Keeps alerts, or fails at them."""

    name = "alerting"
    requires_logging_directory = False

    def __init__(self, error: Exception | None = None):
        super().__init__()
        self.error = error
        self.alerts: list[tuple[str, str]] = []

    @property
    def tracker(self) -> "Alerting":
        return self

    def start(self) -> None: ...

    def log(self, values: dict, step: int | None, **options: object) -> None: ...

    def alert(self, title: str, text: str) -> None:
        self.alerts.append((title, text))
        if self.error is not None:
            raise self.error


def test_an_alert_reaches_each_tracker_that_has_one_and_a_failure_only_warns(
    make_accelerator: MakeAccelerator, start: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, healthy = Alerting(ConnectionError("no network")), Alerting()
    trackers._warn_once.cache_clear()
    accelerator = make_accelerator(["none"], broken, healthy)
    start(accelerator)
    alert(accelerator, "out of memory", "in step 3")
    assert broken.alerts == healthy.alerts == [("out of memory", "in step 3")]
    assert caplog.messages == ["alerting could not alert, the run goes on without: ConnectionError: no network"]
    finish_trackers(accelerator, {})
    assert rows_of(tmp_path) == []


@pytest.mark.parametrize(("method", "calls"), [("start", 1), ("log", 4), ("finish", 1)])
def test_a_broken_tracker_only_warns(
    method: str,
    calls: int,
    make_accelerator: MakeAccelerator,
    expected_rows: Rows,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = Broken(method)
    trackers._warn_once.cache_clear()
    three_steps.run(make_accelerator(["none"], broken), tmp_path)
    assert rows_of(tmp_path) == expected_rows
    assert broken.calls == calls
    warned = [text for text in caplog.messages if f"could not {method}" in text]
    assert warned == [f"broken could not {method}, the run goes on without: ConnectionError: no {method}"]


def test_tensorboard_gets_the_rows_below_the_run(make_accelerator: MakeAccelerator, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    three_steps.run(make_accelerator(["tensorboard"]), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(step, pytest.approx(1 / step)) for step in (1, 2, 3)]
    assert events.Scalars("result/eval/accuracy")[0].step == 3


def test_trackio_keeps_the_run_in_its_store_without_asking_the_hub(
    launch: Callable, expected_rows: Rows, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub_that_never_answers:
        ended = launch(
            "trackio",
            TRACKIO_DIR=str(tmp_path / "store"),
            HF_TOKEN="hf_token",
            HF_ENDPOINT=f"http://127.0.0.1:{hub_that_never_answers.getsockname()[1]}",
        )
    assert ended.exit_code == 0, ended.output
    first, second, *others = ended.output.splitlines()
    assert first.startswith("training starts")
    assert second.startswith("last step")
    assert others == ["trackio: trackio show --project memsave", "the run is done"]
    assert rows_of(tmp_path / "out") == expected_rows
    name, config, rows, alerts = _read_trackio(tmp_path / "store")
    labels = three_steps.LABELS
    assert name == labels["name"]
    told = {**three_steps.CONFIG, "tags": labels["tags"], "_Group": labels["group"]}
    assert {key: config[key] for key in told} == told
    rows = [{key: value for key, value in row.items() if key != "timestamp"} for row in rows]
    counts = [{"class / prediction": name, "cat": row[0], "dog": row[1]} for name, row in three_steps.CONFUSION.items()]
    confusion = {"_type": "trackio.table", "_value": counts}
    assert rows == [*expected_rows, {"step": 3, "result/confusion_matrix": confusion}]
    assert [{key: alert[key] for key in three_steps.ALERT} for alert in alerts] == [three_steps.ALERT]


def _read_trackio(store: Path) -> tuple[str, dict, list[dict], list[dict]]:
    read = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("memsave")
logs, alerts = SQLiteStorage.get_logs("memsave", run.name), SQLiteStorage.get_alerts("memsave")
print(json.dumps([run.name, run.config, logs, alerts]))
"""
    env = {**os.environ, "TRACKIO_DIR": str(store)}
    done = subprocess.run([sys.executable, "-c", read], env=env, capture_output=True, text=True, check=True)
    return tuple(json.loads(done.stdout))
