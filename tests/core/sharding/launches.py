"""A recipe, launched as its users do, and the text that it trains on."""

import json
import os
import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[3]
ACCELERATE = Path(sysconfig.get_path("scripts")) / "accelerate"
RECIPE = ROOT / "recipes" / "language_modeling.py"


def write_text(folder):
    """A training file in ``folder``."""
    text = folder / "text.txt"
    text.write_text(
        "\n\n".join(f"Line {number} of a text, and {number * number} is its square." for number in range(300))
    )
    return text


def launch(config, *flags, num_processes=None, of_launch=(), program=RECIPE):
    of_ranks = ["--num_processes", str(num_processes)] if num_processes else []
    of_launch = ["--config_file", ROOT / "accelerate_configs" / config, *of_ranks, *of_launch]
    return subprocess.run(
        [ACCELERATE, "launch", *of_launch, program, *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def exit_codes(done):
    """Of the ranks, as their launcher reports them; its own is 1."""
    return [line.split()[2] for line in done.stderr.splitlines() if line.split()[:2] == ["exitcode", ":"]]


def results(folder):
    return json.loads((folder / "results.json").read_text())
