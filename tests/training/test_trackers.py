"""Every run has its metrics.jsonl, trackers get the same rows, and none can prompt, hang or stop a run."""

import contextlib
import json
import math
import os
import pty
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker

import memsave_recipes
from memsave_recipes.errors import InputError
from memsave_recipes.training import trackers
from memsave_recipes.training.trackers import finish_trackers, log_metrics, resolve_trackers, start_trackers

KEY = "k" * 40
LABELS = {
    "project": "memsave",
    "group": "vgg11-gbs64-32px",
    "name": "segments:2-mbs16x4",
    "tags": ["segments:2", "cpu"],
}
CONFIG = {"seed": 0, "plan": {"strategy": "segments:2", "spans": [3, 8]}}
RESULTS = {"steps": 3, "model": "vgg11", "eval": {"accuracy": 0.95}, "memory": {"peak_allocated_gib": 1 / 3}}
RUN = f"""
import sys
from pathlib import Path
from accelerate import Accelerator
from memsave_recipes.training.trackers import finish_trackers, log_metrics, resolve_trackers, start_trackers

folder = Path(sys.argv[2])
accelerator = Accelerator(cpu=True, log_with=resolve_trackers(sys.argv[1].split(), folder))
start_trackers(accelerator, **{LABELS!r}, config={CONFIG!r}, output_dir=folder)
for step in 1, 2, 3:
    log_metrics(accelerator, {{"train/loss": 1 / step}}, step)
finish_trackers(accelerator, {RESULTS!r})
print("the run is done")
"""

MakeAccelerator = Callable[..., Accelerator]


@pytest.fixture
def make_accelerator(tmp_path: Path) -> Iterator[MakeAccelerator]:
    def make(report_to: list[str], *others: GeneralTracker) -> Accelerator:
        AcceleratorState._reset_state(True)
        return Accelerator(cpu=True, log_with=[*others, *resolve_trackers(report_to, tmp_path)])

    yield make
    AcceleratorState._reset_state(True)


@pytest.fixture
def server_without_wandb() -> Iterator[str]:
    class NotFound(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run_all(accelerator: Accelerator, folder: Path) -> None:
    start_trackers(accelerator, **LABELS, config=CONFIG, output_dir=folder)
    for step in 1, 2, 3:
        log_metrics(accelerator, {"train/loss": 1 / step}, step)
    finish_trackers(accelerator, RESULTS)


def rows_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


EXPECTED_ROWS = [
    *({"step": step, "train/loss": 1 / step} for step in (1, 2, 3)),
    {"step": 3, "result/steps": 3, "result/eval/accuracy": 0.95, "result/memory/peak_allocated_gib": 1 / 3},
]


def launch(report_to: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own with an empty home, on a terminal that a prompt would wait at."""
    home = folder.parent / "home"
    home.mkdir()
    root = Path(memsave_recipes.__file__).parents[1]
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **env}
    terminal, end = pty.openpty()
    command = [sys.executable, "-c", RUN, report_to, str(folder)]
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=env, cwd=folder.parent)
    os.close(end)
    giving_up = threading.Timer(90, process.kill)
    giving_up.start()
    output = b""
    with contextlib.suppress(OSError):  # the terminal is gone when the process has ended
        while text := os.read(terminal, 4096):
            output += text
    os.close(terminal)
    code = process.wait()
    giving_up.cancel()
    return subprocess.CompletedProcess(command, code, output.decode())


def test_metrics_file_has_every_row_and_the_results(make_accelerator: MakeAccelerator, tmp_path: Path) -> None:
    run_all(make_accelerator(["none"]), tmp_path)
    assert rows_of(tmp_path) == EXPECTED_ROWS


def test_a_row_is_on_disk_as_soon_as_it_is_logged(make_accelerator: MakeAccelerator, tmp_path: Path) -> None:
    accelerator = make_accelerator(["none"])
    start_trackers(accelerator, **LABELS, config=CONFIG, output_dir=tmp_path)
    log_metrics(accelerator, {"train/loss": 0.1 + 0.2}, 1)
    assert rows_of(tmp_path) == [{"step": 1, "train/loss": 0.1 + 0.2}]
    finish_trackers(accelerator, {})


def test_numbers_that_are_not_finite_are_valid_json(make_accelerator: MakeAccelerator, tmp_path: Path) -> None:
    accelerator = make_accelerator(["none"])
    start_trackers(accelerator, **LABELS, config=CONFIG, output_dir=tmp_path)
    log_metrics(accelerator, {"a": math.nan, "b": math.inf, "c": -math.inf}, 1)
    finish_trackers(accelerator, {})
    line = (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert row == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert float(row["c"]) == -math.inf


def test_a_resumed_run_continues_its_file(make_accelerator: MakeAccelerator, tmp_path: Path) -> None:
    run_all(make_accelerator(["none"]), tmp_path)
    run_all(make_accelerator(["none"]), tmp_path)
    assert rows_of(tmp_path) == EXPECTED_ROWS * 2


def test_other_ranks_start_nothing(tmp_path: Path) -> None:
    accelerator = SimpleNamespace(is_main_process=False)  # touching any tracker would be an AttributeError
    start_trackers(accelerator, **LABELS, config=CONFIG, output_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("report_to", "words"),
    [
        (["wandbb"], ["--report_to wandbb", "did you mean wandb?", "trackio, wandb, tensorboard, none"]),
        (["none", "wandb"], ["none wandb", "stands alone"]),
        (["wandb"], ["not installed", "pip install 'wandb>=0.30'"]),
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


@pytest.mark.parametrize(("method", "calls"), [("start", 1), ("log", 4), ("finish", 1)])
def test_a_broken_tracker_only_warns(
    method: str, calls: int, make_accelerator: MakeAccelerator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken(method)
    trackers._warn_once.cache_clear()
    run_all(make_accelerator(["none"], broken), tmp_path)
    assert rows_of(tmp_path) == EXPECTED_ROWS
    assert broken.calls == calls
    warned = [text for text in caplog.messages if f"could not {method}" in text]
    assert warned == [f"broken could not {method}, the run goes on without: ConnectionError: no {method}"]


def test_tensorboard_gets_the_rows_below_the_run(make_accelerator: MakeAccelerator, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_all(make_accelerator(["tensorboard"]), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(step, pytest.approx(1 / step)) for step in (1, 2, 3)]
    assert events.Scalars("result/eval/accuracy")[0].step == 3


def test_trackio_keeps_the_run_in_its_store_without_asking_the_hub(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub_that_never_answers:
        done = launch(
            "trackio",
            tmp_path / "out",
            TRACKIO_DIR=str(tmp_path / "store"),
            HF_TOKEN="hf_token",
            HF_ENDPOINT=f"http://127.0.0.1:{hub_that_never_answers.getsockname()[1]}",
        )
    assert done.returncode == 0, done.stdout
    assert done.stdout.split("\r\n") == ["trackio: trackio show --project memsave", "the run is done", ""]
    assert rows_of(tmp_path / "out") == EXPECTED_ROWS
    name, config, rows = _read_trackio(tmp_path / "store")
    assert name == LABELS["name"]
    assert {key: config[key] for key in ("seed", "plan", "tags", "_Group")} == {
        **CONFIG,
        "tags": LABELS["tags"],
        "_Group": LABELS["group"],
    }
    assert [{key: value for key, value in row.items() if key != "timestamp"} for row in rows] == EXPECTED_ROWS


def _read_trackio(store: Path) -> tuple[str, dict, list[dict]]:
    read = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("memsave")
print(json.dumps([run.name, run.config, SQLiteStorage.get_logs("memsave", run.name)]))
"""
    env = {**os.environ, "TRACKIO_DIR": str(store)}
    done = subprocess.run([sys.executable, "-c", read], env=env, capture_output=True, text=True, check=True)
    return tuple(json.loads(done.stdout))


def test_wandb_without_a_key_is_offline_and_asks_nothing(server_without_wandb: str, tmp_path: Path) -> None:
    done = launch("wandb", tmp_path / "out", WANDB_BASE_URL=server_without_wandb)
    assert "no API key" in done.stdout
    _assert_offline_run(done, tmp_path / "out")


def test_wandb_whose_key_is_refused_is_offline(server_without_wandb: str, tmp_path: Path) -> None:
    done = launch("wandb", tmp_path / "out", WANDB_BASE_URL=server_without_wandb, WANDB_API_KEY=KEY)
    assert "AuthenticationError" in done.stdout
    _assert_offline_run(done, tmp_path / "out")


def test_wandb_whose_server_refuses_is_offline(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    done = launch("wandb", tmp_path / "out", WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
    assert f"no answer from {url}" in done.stdout
    _assert_offline_run(done, tmp_path / "out")


def test_wandb_whose_server_never_answers_is_offline(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = launch("wandb", tmp_path / "out", WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
    assert f"no answer from {url}" in done.stdout
    _assert_offline_run(done, tmp_path / "out")


def _assert_offline_run(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    """It ended well, told the command that uploads the run, and that run holds everything."""
    assert done.returncode == 0, done.stdout
    (run_folder,) = (folder / "wandb").glob("offline-run-*")
    assert f"wandb sync {run_folder}" in done.stdout
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(run_folder)]
    kept = json.loads(subprocess.run(inspect, capture_output=True, text=True, check=True).stdout)
    assert (kept["name"], kept["tags"], kept["config"]) == (LABELS["name"], LABELS["tags"], CONFIG)
    assert kept["step"] == 3
    assert kept["summary"]["result/eval/accuracy"] == 0.95
    assert rows_of(folder) == EXPECTED_ROWS
