"""Processes that are launched and torn down as a user's are: what forked ranks, which leave early, cannot show."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from lives import ROOT
from trials.run import NUM_STEPS

from memsave_recipes.training.checkpoints.resume import find_newest

HERE = Path(__file__).parent
PROGRAM = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from trials.run import Log, Run, train
from memsave_recipes.training.launch.start import Accelerator

if __name__ == "__main__":
    folder, shard = sys.argv[2:]
    saves = dict(every_steps=None, with_signals=True)
    run = Run(folder=Path(folder), shard=shard, workers=2, step_s=0.3, **saves)
    accelerator = Accelerator()
    train(run, accelerator, Log(run, accelerator.process_index))
"""


def launch(tmp_path, *launcher, shards=("none",)):
    """The program, in a session and process group of its own, when it has done two steps.

    Args:
        shards: as the flag ``--shard``.
    """
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(program), str(HERE), str(tmp_path), *shards]
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


@pytest.mark.slow
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


def torchrun(num_ranks):
    return "torch.distributed.run", "--nproc-per-node", str(num_ranks)


def on_two_ranks(*launcher):
    return *launcher, "--config_file", str(ROOT / "accelerate_configs" / "cpu_ddp.yaml")


ACCELERATE = on_two_ranks("accelerate.commands.launch")
ONE_PROCESS = ("accelerate.commands.launch", "--cpu")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems send no signal")
@pytest.mark.parametrize(
    ("launcher", "shards", "number"),
    [
        pytest.param(ONE_PROCESS, ["none"], signal.SIGTERM, marks=pytest.mark.slow, id="one process, SIGTERM"),
        pytest.param(ONE_PROCESS, ["none"], signal.SIGKILL, marks=pytest.mark.slow, id="one process"),
        pytest.param(torchrun(2), ["none"], signal.SIGKILL, id="two ranks"),
        pytest.param(torchrun(2), ["full"], signal.SIGKILL, marks=pytest.mark.slow, id="shards"),
        pytest.param(torchrun(4), ["2"], signal.SIGKILL, marks=pytest.mark.slow, id="shards that are replicated"),
        pytest.param(ACCELERATE, ["full"], signal.SIGKILL, marks=pytest.mark.slow, id="shards, accelerate launch"),
    ],
)
def test_ranks_save_and_end_with_their_launcher(tmp_path, launcher, shards, number):
    process = launch(tmp_path, "-m", *launcher, shards=shards)
    ranks = psutil.Process(process.pid).children()
    process.send_signal(number)
    _, errors = process.communicate(timeout=90)
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
    assert "DataLoader worker" not in errors
    assert "frame #" not in errors  # of torch's C++ code, where the store is lost
    assert "Traceback" not in errors
    assert 2 <= find_newest(tmp_path / "checkpoints").step < NUM_STEPS
