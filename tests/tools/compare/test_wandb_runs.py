"""W&B runs read back by the real client: an offline run from its file, an online project from a stand-in server."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb_stand_in

from memsave_recipes.core.errors import InputError
from memsave_recipes.tools import dashboards
from memsave_recipes.tools.compare import SAMPLES_SEEN, loss_curve
from memsave_recipes.tools.dashboards import read_offline_run

CONFIG = {"model": "vgg11", "activation_checkpointing": "full", "seed": 7}
ROWS = [{"_step": n, "train/loss": 4.0 / n, "progress/samples_seen": 64 * n} for n in (1, 2)]
SUMMARY = {"train/loss": 2.0, "result/steps": 2, "result/memory/peak_allocated_gib": 0.5, "result/eval/loss": 1.5}
LOG_A_RUN = """
import sys, wandb
run = wandb.init(mode="offline", dir=sys.argv[1], project="p", name="full-mbs2", settings=wandb.Settings(silent=True))
run.config.update({"model": "vgg11", "activation_checkpointing": "full", "seed": 7})
run.log({"train/loss": 4.0, "progress/samples_seen": 64}, step=1)
run.log({"train/loss": float("nan"), "progress/samples_seen": 128}, step=2)
run.summary.update({"result/steps": 2, "result/memory/peak_allocated_gib": 0.5, "result/eval/loss": 1.5})
run.finish()
"""


def test_an_offline_run_reads_as_its_folder_would(tmp_path: Path) -> None:
    environment = {**os.environ, "WANDB_ERROR_REPORTING": "false"}
    subprocess.run([sys.executable, "-c", LOG_A_RUN, str(tmp_path)], check=True, env=environment)
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    run = read_offline_run(log)
    assert (run.name, run.path) == ("full-mbs2", log.parent)
    assert (run.text("model"), run.text("plan")) == ("vgg11", "full")
    assert run.figure("memory", "peak_allocated_gib") == 0.5
    assert run.names("eval") == ["loss"]
    assert run.config == CONFIG
    assert loss_curve(run)[1] == 4.0
    assert math.isnan(loss_curve(run)[2])
    assert list(run.history.curve(SAMPLES_SEEN).values()) == [64, 128]


def test_a_run_that_did_not_finish_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"type": "config", "config": {"update": CONFIG}}
    monkeypatch.setattr(dashboards, "_inspect", lambda log: [json.dumps(config)])
    with pytest.raises(InputError, match=f"{tmp_path} has no result/"):
        read_offline_run(tmp_path / "x.wandb")


SUMMARY_RECORD = {"type": "summary", "summary": {"update": SUMMARY}}


@pytest.mark.parametrize(
    "record",
    [
        *([], 1, {}, {"type": "summary"}, {"type": "history", "history": {"item": 3}}),
        {"type": "run", "run": {"display_name": 3}},
        {"type": "config", "config": {"update": {"model_name_or_path": 3}}},
        {"type": "summary", "summary": {"update": {"result/a": 1, "result/a/b": 2}}},
        "[" * 3000,
    ],
)
def test_a_log_of_anything_else_is_named(record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps(SUMMARY_RECORD), record if record == "[" * 3000 else json.dumps(record)]
    monkeypatch.setattr(dashboards, "_inspect", lambda log: lines)
    with pytest.raises(InputError, match=f"{tmp_path}.* is not from a recipe"):
        read_offline_run(tmp_path / "run" / "x.wandb")


def test_the_texts_of_a_log_are_printable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"type": "run", "run": {"display_name": "\x1b[31mred"}}
    config = {"type": "config", "config": {"update": {"model": "a\nb", "activation_checkpointing": "\u202e"}}}
    monkeypatch.setattr(dashboards, "_inspect", lambda log: [json.dumps(r) for r in (run, config, SUMMARY_RECORD)])
    read = read_offline_run(tmp_path / "x.wandb")
    assert (read.name, read.text("model"), read.text("plan")) == (r"\x1b[31mred", r"a\nb", r"\u202e")


def test_a_file_that_is_no_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.wandb").write_text("hello")
    with pytest.raises(InputError, match=str(tmp_path)):
        read_offline_run(tmp_path / "x.wandb")


@pytest.fixture
def server() -> Iterator[Any]:
    """A project with a finished run and one that is none."""
    with wandb_stand_in.serving() as server:
        answer = server.graphql
        server.graphql = lambda operation, told: _project(operation) or answer(operation, told)
        yield server


def _project(operation: str) -> dict[str, Any] | None:
    """What the server says about the project when it is read."""
    if operation == "GetDefaultEntity":
        return {"viewer": {"id": "u", "entity": "e", "username": "u"}}
    if operation == "Runs":
        edges = [{"cursor": name, "node": _node(name, summary)} for name, summary in (("a", SUMMARY), ("b", {}))]
        page = {"endCursor": "b", "hasNextPage": False}
        return {
            "project": {"internalId": "1", "runCount": 2, "readOnly": False, "runs": {"edges": edges, "pageInfo": page}}
        }
    if operation == "RunFullHistory":
        return {"project": {"run": {"history": [json.dumps(row) for row in ROWS]}}}
    return None


def _node(name: str, summary: dict[str, Any]) -> dict[str, Any]:
    absent = dict.fromkeys(("sweepName", "jobType", "commit", "notes"))
    config = {key: {"value": value} for key, value in CONFIG.items()}
    return absent | {
        "id": name,
        "name": name,
        "displayName": f"full-{name}",
        "tags": [],
        "state": "finished",
        "group": "g",
        "description": "",
        "config": json.dumps(config),
        "summaryMetrics": json.dumps(summary),
        "systemMetrics": "{}",
        "historyKeys": {"lastStep": 2, "keys": {}},
        "historyLineCount": 2,
        "createdAt": "2026-01-01T00:00:00",
        "heartbeatAt": "2026-01-01T00:00:00",
        "readOnly": False,
        "stopped": False,
        "projectId": "7",
        "user": {"name": "u", "username": "u"},
    }


READ = """
import json, sys
from memsave_recipes.core.errors import InputError
from memsave_recipes.tools.dashboards import read_online_runs
try:
    runs, problems = read_online_runs("e/p")
    found = [[r.name, str(r.path), r.results, r.config, list(r.history.rows)] for r in runs]
    print(json.dumps(found), problems, sep="\\n")
except InputError as error:
    print(error)
    sys.exit(2)
"""


@pytest.fixture
def read_online(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Reads the project in a process of its own, since the client keeps its settings for good."""

    def read(script: str = READ, **environment: str) -> subprocess.CompletedProcess:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
        return subprocess.run(
            [sys.executable, "-c", script],
            env={**kept, **home, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return read


def test_an_online_project_is_read_by_the_real_client(server: Any, read_online: Callable) -> None:
    done = read_online(WANDB_BASE_URL=server.url, WANDB_API_KEY="k" * 40)
    assert done.returncode == 0, done.stderr
    found, problems = done.stdout.splitlines()
    ((name, path, results, config, history),) = json.loads(found)
    assert (name, path, config) == ("full-a", "e/p/a", CONFIG)
    assert results == {
        "model": "vgg11",
        "plan": "full",
        "steps": 2,
        "memory": {"peak_allocated_gib": 0.5},
        "eval": {"loss": 1.5},
    }
    assert [(row["step"], row["train/loss"]) for row in history] == [(1, 4.0), (2, 2.0)]
    assert "e/p/b has no result/" in problems


def test_without_a_key_one_line_says_how_to_store_one(read_online: Callable) -> None:
    done = read_online(WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 2
    assert done.stdout == "--wandb needs a W&B key: `wandb login` stores one, or set WANDB_API_KEY\n"


def test_a_server_that_is_not_there_is_one_line_in_time(read_online: Callable) -> None:
    done = read_online(WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="k" * 40)
    assert done.returncode == 2
    assert done.stdout.startswith("--wandb: no login at W&B (")
    assert "http://127.0.0.1:9" in done.stdout
    assert done.stdout.count("\n") == 1


HUNG = """
    for child in psutil.Process().children():
        child.suspend()
    sys.exit(2)
"""


def test_a_service_of_wandb_that_does_not_end_is_killed(read_online: Callable) -> None:
    """Its client waits for it at exit, and has cut off the connection by which it would be told to end."""
    script = "import psutil" + READ.replace("\n    sys.exit(2)\n", HUNG)
    assert "suspend" in script
    done = read_online(script, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="k" * 40)
    assert done.returncode == 2
    assert done.stdout.startswith("--wandb: no login at W&B (")
