"""A process whose workers are left at its end has an end, and one whose worker is killed has a line for it."""

import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from memsave_recipes.run.failures import run_recipe
from memsave_recipes.training.batching import make_loader
from memsave_recipes.training.launch import processes
from memsave_recipes.training.launch.processes import lost_worker, num_workers

LEFT = """
import multiprocessing
import sys
from accelerate import Accelerator
from memsave_recipes.training.batching import make_loader

multiprocessing.set_start_method(sys.argv[1])
loader = make_loader(Accelerator(cpu=True), list(range(8)), [[0], [1], [2]], None, num_workers=1)
workers = iter(loader)
next(workers)
sys.modules["kept"] = workers  # as a traceback in a cycle keeps it: longer than Python's exit
sys.exit(7)
"""


# Python's default up to 3.13, and from 3.14 on
@pytest.mark.parametrize("method", [pytest.param("fork", marks=pytest.mark.slow), "forkserver"])
def test_workers_that_are_left_do_not_keep_a_process_from_its_end(method):
    done = subprocess.run([sys.executable, "-c", LEFT, method], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr


class Deadly:
    """A sample costs its worker's life."""

    def __init__(self, number):
        self.number = number

    def __getitem__(self, index):
        os.kill(os.getpid(), self.number)


def load_one(number, told):
    """A program that loads it, and says what it has to say in a file."""
    with told.open("w") as file, redirect_stderr(file):
        run_recipe(lambda: next(iter(make_loader(Accelerator(cpu=True), Deadly(number), [[0]], None, num_workers=1))))


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGKILL, 3, "was killed by signal 9, most likely because the host had no memory left: give fewer"),
        (signal.SIGBUS, 3, "was killed by signal 7, most likely because shared memory (/dev/shm) is full"),
        (signal.SIGSEGV, 6, "was killed (Segmentation fault): --dataloader_num_workers 0 loads in this process"),
    ],
)
def test_a_worker_that_is_killed_ends_the_run_in_one_line(run_program, tmp_path, number, code, words):
    assert run_program(load_one, number, tmp_path / "told") == code
    told = (tmp_path / "told").read_text()
    lines = [line for line in told.split("\n") if "error: data worker" in line]
    assert "Traceback" not in told
    assert len(lines) == 1
    assert words in lines[0]
    assert lines[0].endswith("; the last checkpoint is as it was, go on with --resume")


def test_torch_does_not_always_know_the_signal():
    worker = lost_worker(RuntimeError("DataLoader worker (pid(s) 12, 13) exited unexpectedly"))
    assert worker.words.startswith("data worker 12, 13 ended unexpectedly: ")
    assert not worker.had_no_memory
    assert lost_worker(RuntimeError("anything else")) is None


@pytest.mark.parametrize(
    ("device", "asked", "cores", "ranks", "expected"),
    [
        ("cpu", None, 64, 1, 0),
        ("cpu", 3, 64, 1, 3),
        ("cuda", 0, 64, 1, 0),
        ("cuda", None, 64, 8, 4),
        ("cuda", None, 16, 8, 1),
        ("cuda", None, 1, 1, 0),
    ],
)
def test_workers_by_default_are_there_beside_an_accelerator(monkeypatch, device, asked, cores, ranks, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    said = []
    accelerator = SimpleNamespace(device=torch.device(device), print=said.append)
    assert num_workers(asked, accelerator) == expected
    is_chosen = device == "cuda" and asked is None
    assert [line.split()[0] for line in said] == ([str(expected)] if is_chosen else [])


def test_workers_by_default_are_forks(monkeypatch):
    monkeypatch.setattr(processes, "sys", SimpleNamespace(platform="darwin"))
    accelerator = SimpleNamespace(device=torch.device("mps"))
    assert num_workers(None, accelerator) == 0
    assert num_workers(2, accelerator) == 2
