"""Launched as people launch it, ended with its launcher, launched again: the same run, in every tracker."""

import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lives import FLAGS, IMAGES, NUM_STEPS, ROOT, assert_the_same_run, end_of, launch, results_of, wait_for_checkpoint

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("config", ["cpu", "cpu_ddp"])
@pytest.mark.parametrize("name", FLAGS)
def test_launched_killed_and_launched_again(tmp_path, name, config):
    straight, folder = tmp_path / "straight", tmp_path / "run"
    assert end_of(launch(name, config, folder=straight))[0] == 0
    process = launch(name, config, "--save_every", "1", folder=folder)
    wait_for_checkpoint(process, folder)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    code, output = end_of(launch(name, config, "--save_every", "1", "--resume", folder=folder))
    assert code == 0, output
    assert "going on after" in output
    assert_the_same_run(folder, straight)


def test_launched_and_told_to_stop(tmp_path):
    """The launcher passes the signal on to its ranks, which save; it ends with 1 whatever they end with."""
    folder = tmp_path / "run"
    process = launch("image_classification", "cpu_ddp", "--save_every", "1", "--max_steps", "2000", folder=folder)
    wait_for_checkpoint(process, folder)
    process.send_signal(signal.SIGTERM)
    code, output = end_of(process)
    assert code == 1
    assert "steps, all of them saved in" in output
    assert "Traceback (most recent call last)" not in output.partition("SIGTERM: stopped")[0]
    step = max(int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("step-*"))
    end = ["--max_steps", "2000", "--save_every", "1", "--resume"]
    process = launch("image_classification", "cpu", *end, folder=folder)  # and on another number of ranks
    while f"going on after {step} steps" not in (line := process.stdout.readline()):
        assert line, "it ended before it went on"
        announced = line if "data-exact" in line else ""
    assert announced
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


KILLED_AT_7 = """
import os, signal, sys
from memsave_recipes.training.checkpoints import Checkpoints
sys.path.insert(0, {recipes!r})
import image_classification

after_step = Checkpoints.after_step
def and_then_kill(self, step, state):
    after_step(self, step, state)
    if step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
Checkpoints.after_step = and_then_kill
image_classification.main()
"""


def test_trackers_go_on_with_the_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    killed, whole = tmp_path / "killed.py", ROOT / "recipes" / "image_classification.py"
    killed.write_text(KILLED_AT_7.format(recipes=str(ROOT / "recipes")))
    flags = [*IMAGES, "--logging_steps", "1", "--save_every", "2", "--report_to", "wandb", "tensorboard", "trackio"]
    store = tmp_path / "store"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "TRACKIO_DIR": str(store)}
    for program, more in ((killed, []), (whole, ["--resume"])):
        words = [sys.executable, program, *flags, "--output_dir", tmp_path / "run", *more]
        subprocess.run([str(word) for word in words], env=environment, timeout=200, check=False, capture_output=True)
    assert results_of(tmp_path / "run")["steps"] == NUM_STEPS
    ids = [path.name.rpartition("-")[2] for path in (tmp_path / "run" / "wandb").glob("offline-run-*")]
    assert len(ids) == 2
    assert len(set(ids)) == 1
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, NUM_STEPS + 1))
    (database,) = [path for path in store.glob("*.db") if "image" in path.name]
    with sqlite3.connect(database) as connection:
        assert connection.execute("SELECT count(DISTINCT run_name) FROM metrics").fetchone() == (1,)
        steps = {step for (step,) in connection.execute("SELECT step FROM metrics")}
    assert steps >= {7, 8, 9, 10}  # of the others what it had written before the kill


@pytest.fixture
def slurm_script(tmp_path):
    """The script of docs/failures.md, on two CPU ranks; its ``scontrol`` takes a note."""
    page = (ROOT / "docs" / "failures.md").read_text()
    script = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", page, re.DOTALL)[1]
    flags = shlex.join([*IMAGES, "--max_steps", "5000", "--logging_steps", "1", "--report_to", "none"])
    for theirs, ours in (
        ("multi_gpu.yaml --num_processes 4", "cpu_ddp.yaml"),
        ("language_modeling.py", "image_classification.py"),
        ("--config my_run.yaml", flags),
    ):
        assert theirs in script
        script = script.replace(theirs, ours)
    (tmp_path / "job.sh").write_text(script)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    return tmp_path / "job.sh"


def test_the_script_for_slurm(slurm_script, tmp_path):
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "SCRATCH": str(tmp_path), "SLURM_JOB_ID": "7"}
    rows, log, began_at = tmp_path / "my-run" / "metrics.jsonl", tmp_path / "log", 0
    for life in (1, 2):
        with log.open("w") as output:
            job = subprocess.Popen(["bash", slurm_script], cwd=ROOT, env=environment, stdout=output, stderr=output)
        deadline = time.monotonic() + 60
        while not (rows.exists() and f'"step": {began_at + 2},' in rows.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)  # to the script alone
        job.wait(60)
        told = log.read_text()
        assert (f"going on after {began_at} steps" in told) == (life == 2), told
        began_at = int(re.search(r"SIGUSR1: stopped after (\d+) steps", told)[1])
        assert (tmp_path / "asked").read_text() == "requeue 7\n" * life
