"""On CUDA devices: killed anywhere and resumed, with a loss scaler too; the same bits on several; one that is full.

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
from lives import (
    ROOT,
    assert_the_same_run,
    assert_the_same_weights,
    end_of,
    launch,
    rows_of,
    wait_for_checkpoint,
)

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


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_any_number_of_gpus_has_the_same_bits(tmp_path, precision):
    bits = [*RUN, "--bitwise_topology", "--micro_batch_size", "3"]  # 6 micro-batches, the last one of 1
    for num_ranks in range(1, min(4, torch.cuda.device_count()) + 1):
        process = launch(
            "image_classification",
            "single_gpu" if num_ranks == 1 else "multi_gpu",
            *bits,
            folder=tmp_path / str(num_ranks),
            precision=precision,
            num_ranks=num_ranks,
        )
        code, output = end_of(process)
        assert code == 0, output
        assert rows_of(tmp_path / str(num_ranks)) == rows_of(tmp_path / "1")
        assert_the_same_weights(tmp_path / str(num_ranks) / "final", tmp_path / "1" / "final")


def test_a_device_that_is_full_ends_with_its_page_and_a_plan(tmp_path):
    too_large = ["--model", "vgg16", "--image_size", "512", "--global_batch_size", "1024"]  # 64 GiB after one layer
    words = [ROOT / "recipes" / "image_classification.py", *too_large, "--report_to", "none", "--output_dir", tmp_path]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == OUT_OF_MEMORY, done.stderr
    assert "out of memory" in done.stderr
    assert "predicted to fit" in done.stderr
