"""Finished runs as the comparison takes them, and a browser to look at what it draws."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from memsave_recipes.tools.compare import CURVES, History, Run

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
        rows: dict[int, dict[str, Any]] = {}
        for key in CURVES:
            for step, value in run.history.curve(key).items():
                rows.setdefault(step, {"step": step})[key] = value
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
        return folder

    return write


@dataclass(frozen=True)
class Seen:
    """The page as the browser shows it, after its scripts, and what its console says."""

    html: str
    console: list[str]


@pytest.fixture
def browser() -> str:
    """The path of a Chromium; skips where there is none."""
    found = [path for name in BROWSERS if (path := shutil.which(name))]
    if not found:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    return found[0]


@pytest.fixture
def browse(browser: str, tmp_path: Path) -> Callable[..., Seen]:
    """``browse(url)``, with flags of the browser's."""

    def browse(url: str, *flags: str) -> Seen:
        command = [browser, *FLAGS, *flags, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return Seen(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])

    return browse


CODES = {"Tab": (9, ""), "Enter": (13, "\r"), "Space": (32, " "), "ArrowDown": (40, "")}


class Keyboard:
    """An open page that gets keys only, by the browser's debugging protocol over two pipes."""

    def __init__(self, browser: str, folder: Path, url: str) -> None:
        (reads, self._writes), (self._reads, writes) = os.pipe(), os.pipe()
        flags = [*FLAGS[:-1], "--remote-debugging-pipe", f"--user-data-dir={folder}", url]
        shell = ["bash", "-c", f'exec "$0" "$@" 3<&{reads} 4>&{writes}', browser, *flags]
        self.process = subprocess.Popen(shell, pass_fds=(reads, writes), stderr=subprocess.DEVNULL)
        os.close(reads)
        os.close(writes)
        self._numbers, self._session = count(1), {}
        pages = [one for one in self._ask("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attached = self._ask("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        while not self.see(f"document.URL.startsWith({json.dumps(url)}) && document.readyState === 'complete'"):
            time.sleep(0.01)  # keys before that are lost

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        asked = {"id": next(self._numbers), "method": method, "params": params, **self._session}
        os.write(self._writes, json.dumps(asked).encode() + b"\0")
        while True:
            answer = b"".join(iter(lambda: os.read(self._reads, 1), b"\0"))
            if (said := json.loads(answer)).get("id") == asked["id"]:
                return said["result"]

    def press(self, key: str, times: int = 1) -> None:
        """Press and release a key."""
        code, text = CODES[key]
        of_key = {"key": text if key == "Space" else key, "code": key, "windowsVirtualKeyCode": code}
        for _ in range(times):
            self._ask("Input.dispatchKeyEvent", type="keyDown", text=text, **of_key)
            self._ask("Input.dispatchKeyEvent", type="keyUp", **of_key)

    def see(self, expression: str) -> Any:
        """The value of an expression; ``focus`` in it is the element that keys go to."""
        expression = f"(focus => {expression})(document.activeElement)"
        return self._ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str) -> None:
        """Press Tab until an expression is true of the focus, which is visible on the way."""
        for _ in range(30):
            self.press("Tab")
            assert self.see("focus === document.body || getComputedStyle(focus).outlineStyle === 'solid'")
            if self.see(expression):
                return
        raise AssertionError(f"the focus never comes to {expression}")


@pytest.fixture
def keyboard(browser: str, tmp_path: Path) -> Iterator[Callable[[str], Keyboard]]:
    """``keyboard(url)`` opens a page."""
    opened = []

    def open_page(url: str) -> Keyboard:
        opened.append(Keyboard(browser, tmp_path / "keyboard", url))
        return opened[-1]

    yield open_page
    for page in opened:
        page.process.terminate()
        page.process.wait()
