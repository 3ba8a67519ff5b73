"""Optimizer state on the host in Trainer, TRL and Lightning, on a stand-in for CUDA whose copies are late."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_weights_are_those_without_and_checkpoints_go_on(on_devices, tmp_path):
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("state_on_the_host.py"), tmp_path],
        env=on_devices(POISON=1),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
