"""A process whose workers are left at its end has an end."""

import subprocess
import sys

LEFT = """
import sys
from accelerate import Accelerator
from memsave_recipes.training.batching import make_loader

loader = make_loader(Accelerator(cpu=True), list(range(8)), [[0], [1], [2]], None, num_workers=1)
workers = iter(loader)
next(workers)
sys.modules["kept"] = workers  # as a traceback in a cycle keeps it: longer than Python's exit
sys.exit(7)
"""


def test_workers_that_are_left_do_not_keep_a_process_from_its_end():
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr
