"""The tests of the stand-in for CUDA, on it: a process sees it from its start, or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_the_device_is_what_its_readme_says(on_devices, tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", HERE / "test_device.py"]
    done = subprocess.run(
        list(map(str, command)),
        cwd=HERE.parents[1],
        env=on_devices(POISON=1, WAITS=tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
