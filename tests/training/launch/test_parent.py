"""A rank ends with its launcher, and no process with the shell, the scheduler or the notebook that started it."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from memsave_recipes.core import processes as core_processes
from memsave_recipes.core.processes import END_OF_LAUNCHER, signal_at_end_of_parent
from memsave_recipes.training.launch import processes
from memsave_recipes.training.launch.processes import is_launcher

linux_alone = pytest.mark.skipif(sys.platform != "linux", reason="other systems send no signal")

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[-1]], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""
CHILD = """
import time
from memsave_recipes.training.launch.processes import end_with_launcher
end_with_launcher()
print("ready", flush=True)
time.sleep(60)
"""

LATE = """
import os, time
from memsave_recipes.training.launch.processes import end_with_launcher
os.environ["TORCHELASTIC_RUN_ID"] = "none"
parent = os.getppid()
print("ready", flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
end_with_launcher()
time.sleep(60)
"""


def outlives(child, seconds):
    try:
        child.wait(seconds)
    except psutil.TimeoutExpired:
        return True
    return False


@pytest.fixture
def child_of(tmp_path):
    """A process whose parent, a script of that name, has just been killed."""
    children = []

    def start(name, *words, child=CHILD):
        script = tmp_path / name
        script.write_text(PARENT)
        command = [sys.executable, str(script), *words, child]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            children.append(psutil.Process(int(process.stdout.readline())))
            process.kill()
        return children[-1]

    yield start
    for child in children:
        if child.is_running():
            child.kill()


@linux_alone
def test_a_rank_hears_of_the_end_of_its_launcher(child_of):
    assert not outlives(child_of("accelerate", "launch"), 20)


@linux_alone
def test_a_rank_hears_that_its_launcher_ended_while_it_imported(child_of):
    child = child_of("accelerate", "launch", child=LATE)
    if child.ppid() != 1:
        pytest.skip("another process than the first takes orphans here")
    assert not outlives(child, 20)


def test_a_run_outlives_whatever_else_started_it(child_of):
    assert outlives(child_of("accelerate", "env"), 1)


def test_a_parent_that_has_ended_already_is_noticed(monkeypatch):
    sent = []
    monkeypatch.setattr(processes.os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(core_processes.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *words: 0))
    signal_at_end_of_parent(END_OF_LAUNCHER, processes.os.getppid())
    assert sent == []
    signal_at_end_of_parent(END_OF_LAUNCHER, 2**22)
    assert sent == [END_OF_LAUNCHER]


@pytest.mark.parametrize(
    ("command", "is_one"),
    [
        (["python", "/venv/bin/torchrun", "recipe.py"], True),
        (["python", "-m", "torch.distributed.run", "recipe.py"], True),
        (["python", "/venv/bin/accelerate", "launch", "recipe.py"], True),
        (["python", "/venv/bin/memsave", "plan", "recipe.py"], False),
        (["bash", "-c", "torchrun recipe.py"], False),
        (["slurmstepd: [7.0]"], False),
        (["python", "-m", "ipykernel_launcher"], False),
        (["sh", "job.sh"], False),
        (["srun", "python", "recipe.py"], False),
        ([], False),
    ],
)
def test_which_parents_are_launchers(command, is_one):
    assert is_launcher(command) is is_one
