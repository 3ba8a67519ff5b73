"""Runs in processes of their own, on a terminal that a prompt would wait at, and the stand-in for the W&B server."""

import contextlib
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import three_steps
import wandb_stand_in

ROOT = Path(__file__).parents[2]
KEY = "k" * 40


@dataclass
class Ended:
    """How a process ended and what its terminal showed."""

    exit_code: int
    output: str
    seconds_to_start: float  # of training
    seconds_to_end: float  # after the last step


@pytest.fixture
def wandb_server() -> Iterator[Any]:
    """A healthy server; ``wandb_server.fail`` breaks it."""
    with wandb_stand_in.serving() as server:
        yield server


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Ended]:
    """``launch(report_to, **environment)`` runs ``three_steps.py`` into ``tmp_path / "out"``."""

    def run(
        report_to: str, *, limits: dict[str, float] | None = None, name: str | None = None, **environment: str
    ) -> Ended:
        name = name or three_steps.LABELS["name"]
        command = [three_steps.__file__, report_to, tmp_path / "out", name, json.dumps(limits or {})]
        code, output = _run_on_terminal([sys.executable, *map(str, command)], environment, tmp_path)
        began = re.search(r"training starts after (\S+) s", output)
        last_step = re.search(r"last step at (\S+)", output)
        assert began, output
        assert last_step, output
        return Ended(code, output, float(began[1]), time.time() - float(last_step[1]))

    return run


@pytest.fixture
def sync(wandb_server: Any, tmp_path: Path) -> Callable[[str], Any]:
    """``sync(output)`` runs the ``wandb sync`` that a terminal showed, against a healthy server; returns the run."""

    def run(output: str) -> Any:
        (told,) = re.findall(r"upload it with: wandb (sync .*)", output)
        with wandb_stand_in.serving() as server:
            program = str(Path(sys.executable).with_name("wandb"))
            environment = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
            code, said = _run_on_terminal([program, *shlex.split(told)], environment, tmp_path)
            assert code == 0, said
            (received,) = server.runs.values()
            return received

    return run


def _run_on_terminal(command: list[str], environment: dict[str, str], folder: Path) -> tuple[int, str]:
    """Exit code and output of ``command`` in ``folder``, its home, with nothing of our environment."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    terminal, end = pty.openpty()
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment, cwd=folder)
    os.close(end)
    giving_up = threading.Timer(120, process.kill)
    giving_up.start()
    output = b""
    with contextlib.suppress(OSError):  # the terminal is gone when the process has ended
        while text := os.read(terminal, 4096):
            output += text
    os.close(terminal)
    code = process.wait()
    giving_up.cancel()
    return code, output.decode().replace("\r\n", "\n")
