"""On a CUDA device: killed anywhere and resumed, with a loss scaler too, and a device that is really full.

python -m pytest tests/recipes/test_on_a_gpu.py
"""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from lives import ROOT, assert_the_same_run, end_of, launch, wait_for_checkpoint

from memsave_recipes.run.failures import OUT_OF_MEMORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KILLS = 10  # for each precision
LATEST_S = 3.0  # after the first checkpoint; a run takes about as long from there
RUN = ["--full_determinism", "--max_steps", "200", "--eval_steps", "50"]


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_killed_anywhere_and_resumed(tmp_path, precision):
    straight = tmp_path / "straight"
    code, output = end_of(launch("image_classification", "single_gpu", *RUN, folder=straight, precision=precision))
    assert code == 0, output
    resumed, drawn = [*RUN, "--save_every", "5", "--resume"], random.Random(0)
    for number in range(KILLS):
        folder = tmp_path / str(number)
        process = launch("image_classification", "single_gpu", *resumed, folder=folder, precision=precision)
        wait_for_checkpoint(process, folder)
        time.sleep(drawn.uniform(0, LATEST_S))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        code, output = end_of(
            launch("image_classification", "single_gpu", *resumed, folder=folder, precision=precision)
        )
        assert code == 0, output
        assert_the_same_run(folder, straight)


def test_a_device_that_is_full_ends_with_its_page_and_a_plan(tmp_path):
    too_large = ["--model", "vgg16", "--image_size", "512", "--global_batch_size", "1024"]  # 64 GiB after one layer
    words = [ROOT / "recipes" / "image_classification.py", *too_large, "--report_to", "none", "--output_dir", tmp_path]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == OUT_OF_MEMORY, done.stderr
    assert "out of memory" in done.stderr
    assert "predicted to fit" in done.stderr
