"""Finished runs as the comparison takes them, and a browser to look at what it draws."""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from memsave_recipes.compare import History, Run

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--v=0",
    "--window-size=1280,900",
    "--virtual-time-budget=10000",
)


@pytest.fixture
def make_run() -> Callable[..., Run]:
    """``make_run("folder", plan="full", config={...}, losses=(2.0, 1.0), perf={...}, ...)``; results by name."""
    return _make_run


@pytest.fixture
def checkpointed() -> Callable[..., Run]:
    """A run like ``make_run``'s in less memory and more time."""

    def make(folder: str = "checkpointed", **changes: Any) -> Run:
        memory = {"peak_allocated_gib": 0.65, "saved_for_backward_gib": 0.1, "source": "one instrumented step"}
        slower = {"samples_per_sec": 80.0, "train_time_s": 60.5}
        return _make_run(folder, **{"plan": "segments:2", "memory": memory, "perf": slower, **changes})

    return make


def _make_run(folder: str, *, losses: tuple = (2.0, 1.0), config: dict[str, Any] | None = None, **results: Any) -> Run:
    figures = {
        "model": "vgg11",
        "plan": "none",
        "global_batch_size": 64,
        "micro_batch_size": 16,
        "num_processes": 2,
        "accumulation_steps": 2,
        "eval": {"loss": 0.5, "accuracy": 0.9805},
        "memory": {"peak_allocated_gib": 1.0, "saved_for_backward_gib": 0.5, "source": "one instrumented step"},
        "perf": {"samples_per_sec": 100.0, "train_time_s": 50.0},
    }
    history = [
        {"step": step, "train/loss": loss, "progress/samples_seen": 64 * step}
        for step, loss in enumerate(losses, start=1)
    ]
    path = Path("/runs") / folder
    return Run(name=path.name, path=path, results={**figures, **results}, config=config or {}, history=History(history))


@pytest.fixture
def write() -> Callable[[Run, Path], Path]:
    """``write(run, folder)`` leaves the three files of a finished run."""

    def write(run: Run, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps(run.results))
        (folder / "config.json").write_text(json.dumps(run.config))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run.history.rows))
        return folder

    return write


@dataclass(frozen=True)
class Seen:
    """The page as the browser shows it, after its scripts, and what its console says."""

    html: str
    console: list[str]


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., Seen]:
    """``browse(url)``, with flags of the browser's; skips where there is no Chromium."""
    found = [path for name in BROWSERS if (path := shutil.which(name))]
    if not found:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")

    def browse(url: str, *flags: str) -> Seen:
        command = [found[0], *FLAGS, *flags, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return Seen(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])

    return browse
