"""The local dashboard shows the runs on loopback alone; the view on W&B holds the panels that compare them."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import wandb_stand_in

from memsave_recipes.tools.compare import Run

MEMSAVE = [sys.executable, "-m", "memsave_recipes.tools.cli"]


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def dashboard(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """The running command and the address that it printed."""
    command = [*MEMSAVE, "dashboard", *arguments, "--no-browser"]
    with subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("dashboard: http://127.0.0.1:"), process.stderr.read()
            yield process, line.split()[1]
        finally:
            process.terminate()
            process.wait(timeout=30)


@pytest.fixture
def folder(make_run: Callable[..., Run], write: Callable[[Run, Path], Path], tmp_path: Path) -> Path:
    """Two run folders that no tracker knows of."""
    for name, peak in (("plain", 1.0), ("segments", 0.5)):
        write(make_run(name, memory={"peak_allocated_gib": peak}), tmp_path / "runs" / name)
    return tmp_path / "runs"


def test_a_browser_sees_both_runs(folder: Path, browse: Callable[[str], Any]) -> None:
    with dashboard(str(folder)) as (_, url):
        seen = browse(url)
    for name in ("plain", "segments"):
        assert f">{name}<" in seen.html
    assert [line for line in seen.console if "ERROR" in line or "Uncaught" in line] == []


def test_odd_keys_and_steps_are_no_reason_to_show_nothing(make_run: Callable[..., Run], tmp_path: Path) -> None:
    odd = make_run("odd", config={"_wandb": {}, "a\x1b": [None, {"b": 1}]})
    rows = [{"step": step, "train/loss": 1.0, "text": "x"} for step in (1, "x", [1], 2**70, None, True, -1.5)]
    show = (
        "import contextlib, json, sys, warnings; warnings.simplefilter('error'); from pathlib import Path\n"
        "from memsave_recipes.tools.compare import compare\n"
        "from memsave_recipes.tools.dashboards import imported\n"
        "from memsave_recipes.tools.compare import History, Run\n"
        "results, config, rows = json.loads(sys.argv[1])\n"
        "run = Run(name='odd', path=Path('/runs/odd'), results=results, config=config, history=History(rows))\n"
        "with imported(compare([run])) as store:\n"
        "    print([path.name for path in store.glob('*.db')])\n"
    )
    command = [sys.executable, "-c", show, json.dumps([odd.results, odd.config, rows])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "['memsave.db']\n"), done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("ending", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_it_is_on_loopback_alone_and_ends_cleanly(ending: int, folder: Path, tmp_path: Path) -> None:
    port, temporary = free_port(), tmp_path / "temporary"
    temporary.mkdir()
    with dashboard(str(folder), "--port", str(port), TMPDIR=str(temporary)) as (process, url):
        assert url.startswith(f"http://127.0.0.1:{port}/")
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port), timeout=5)
        taken = subprocess.run(
            [*MEMSAVE, "dashboard", str(folder), "--no-browser", "--port", str(port)], capture_output=True, text=True
        )
        process.send_signal(ending)
        assert process.wait(timeout=30) == 0
        assert process.stderr.read() == ""
    assert taken.returncode == 2
    assert taken.stderr.startswith(f"error: --port {port} is taken")
    assert not list(temporary.glob("memsave-*"))


def test_a_folder_of_trackio_is_shown_as_it_is(tmp_path: Path) -> None:
    log = (
        "import trackio; run = trackio.init(project='digits', name='mine', embed=False); "
        "run.log({'train/loss': 1.0}); trackio.finish()"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", log], env=environment, check=True, capture_output=True)
    with dashboard(str(tmp_path)) as (_, url):
        assert "project=digits" in url
    with dashboard(TRACKIO_DIR=str(tmp_path)) as (_, url):
        assert "project=digits" in url


def test_nothing_to_show_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    for arguments, expected in (([], "trackio has no run in"), ([str(tmp_path)], "holds no run")):
        environment = {**os.environ, "TRACKIO_DIR": str(tmp_path)}
        done = subprocess.run([*MEMSAVE, "dashboard", *arguments], env=environment, capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert expected in done.stderr


def save_workspace(project: str, home: Path, **environment: str) -> subprocess.CompletedProcess:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return subprocess.run(
        [*MEMSAVE, "wandb-workspace", project],
        env={**kept, "HOME": str(home), "NETRC": str(home / "netrc"), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_view_on_wandb_holds_the_panels_that_compare_runs(tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces")
    told = {}
    with wandb_stand_in.serving() as server:
        answer = server.graphql

        def graphql(operation: str, variables: dict[str, Any]) -> dict[str, Any]:
            if operation != "UpsertView2":
                return answer(operation, variables)
            told.update(variables)
            return {"upsertView": {"view": {"id": "v", "name": variables["name"]}, "inserted": True}}

        server.graphql = graphql
        done = save_workspace("me/mine", tmp_path, WANDB_BASE_URL=server.url, WANDB_API_KEY="k" * 40)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"saved: {server.url}/me/mine?nw=")
    assert (told["entityName"], told["projectName"]) == ("me", "mine")
    sections = json.loads(told["spec"])["section"]["panelBankConfig"]["sections"]
    panels = [panel for section in sections for panel in section["panels"]]
    kinds = [panel["viewType"] for panel in panels]
    assert kinds == ["Bar Chart", "Scatter Plot", "Bar Chart", "Run Comparer", *["Run History Line Plot"] * 4]
    for key in ("result/memory/peak_allocated_gib", "result/perf/samples_per_sec", "train/loss", "eval/loss"):
        assert key in told["spec"]


@pytest.mark.parametrize(
    ("project", "environment", "expected"),
    [
        ("mine", {}, "mine is not a W&B project: write it as ENTITY/PROJECT"),
        ("me/mine", {}, "needs a W&B key"),
        ("me/mine", {"WANDB_API_KEY": "k" * 40}, "no login at W&B"),
    ],
)
def test_without_access_one_line_and_exit_code_2(
    project: str, environment: dict, expected: str, tmp_path: Path
) -> None:
    done = save_workspace(project, tmp_path, WANDB_BASE_URL="http://127.0.0.1:9", **environment)
    assert done.returncode == 2
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_missing_package_is_named_with_its_command(tmp_path: Path) -> None:
    block = "import sys; sys.modules['wandb_workspaces'] = None; from memsave_recipes.tools.cli import main; "
    done = subprocess.run(
        [sys.executable, "-c", block + "sys.exit(main(['wandb-workspace', 'me/mine']))"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "pip install 'memsave-recipes[trackers]'" in done.stderr
