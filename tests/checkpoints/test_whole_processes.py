"""Processes that are launched and torn down as a user's are: what forked ranks, which leave early, cannot show."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from trials.run import NUM_STEPS

from memsave_recipes.checkpoints.resume import find_newest

HERE = Path(__file__).parent
PROGRAM = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from trials.run import Log, Run, train
from memsave_recipes.training.launch import start_accelerator

if __name__ == "__main__":
    folder, shard = sys.argv[2:]
    run = Run(folder=Path(folder), shard=shard, every_steps=None, workers=2, with_signals=True, step_s=0.3)
    accelerator = start_accelerator()
    train(run, accelerator, Log(run, accelerator.process_index))
"""


def launch(tmp_path, *launcher, shard="none"):
    """The program, in a session and process group of its own, when it has done two steps."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(program), str(HERE), str(tmp_path), shard]
    process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    log = tmp_path / "log-0.jsonl"
    while not (log.exists() and log.read_text().count('"step"') >= 2):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def group_is_gone(process):
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_one_process_ends_with_the_code_of_the_signal_and_leaves_no_worker(tmp_path, number, code):
    process = launch(tmp_path)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert group_is_gone(process)
    assert find_newest(tmp_path / "checkpoints").step >= 2


def test_workers_end_with_a_process_that_is_killed(tmp_path):
    process = launch(tmp_path)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 3  # torch's own watch takes five seconds
    while not group_is_gone(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_is_gone(process)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_two_ranks_under_torchrun(tmp_path, number):
    """It passes a signal on to the process group of every rank, data workers among it; they save before they end."""
    process = launch(tmp_path, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    process.send_signal(number)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1  # whatever its ranks ended with
    assert "DataLoader worker" not in errors
    assert find_newest(tmp_path / "checkpoints").step >= 2


@pytest.mark.skipif(sys.platform != "linux", reason="other systems send no signal")
@pytest.mark.parametrize(
    ("launcher", "shard", "number"),
    [
        pytest.param(("accelerate.commands.launch", "--cpu"), "none", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(("accelerate.commands.launch", "--cpu"), "none", signal.SIGKILL, marks=pytest.mark.slow),
        (("torch.distributed.run", "--nproc-per-node", "2"), "none", signal.SIGKILL),
        pytest.param(
            ("torch.distributed.run", "--nproc-per-node", "2"), "full", signal.SIGKILL, marks=pytest.mark.slow
        ),
    ],
    ids=["one process, SIGTERM", "one process, SIGKILL", "two ranks, SIGKILL", "two ranks in shards, SIGKILL"],
)
def test_ranks_save_and_end_with_their_launcher(tmp_path, launcher, shard, number):
    process = launch(tmp_path, "-m", *launcher, shard=shard)
    ranks = psutil.Process(process.pid).children()
    process.send_signal(number)
    _, errors = process.communicate(timeout=90)
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
    assert "DataLoader worker" not in errors
    assert "frame #" not in errors  # of torch's C++ code, where the store is lost
    assert "Traceback" not in errors
    assert 2 <= find_newest(tmp_path / "checkpoints").step < NUM_STEPS
