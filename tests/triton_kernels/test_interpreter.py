"""Why no test runs inductor's kernels by Triton's interpreter: the page says so, and has to change if this fails."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_interpreter_has_no_libdevice_and_cuts_bfloat16_off():
    script = Path(__file__).with_name("interpreted.py")
    ran = subprocess.run(
        [sys.executable, script], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["root"][0] == 2.0, "the interpreter runs no kernel at all"
    assert found["root_by_libdevice"] is None
    assert found["tanh_by_libdevice"] is None
    assert found["to_bfloat16"] == [0.25, 1.0, 1.9921875, 4.0]  # a card, as torch, rounds 1.999 to 2
