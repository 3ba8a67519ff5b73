"""A rank of ``accelerate launch`` that trains recipes one after the other: each in a fork, which imports nothing again.

    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml --num_processes 2 benchmarks/warm_rank.py SOCKET

It is told what to train by the process that listens at ``SOCKET``. It computes nothing by itself, as the children of a
process that has computed with torch can hang.
"""

import importlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path

import torch

from memsave_recipes.run.failures import run_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
OF_LAUNCHER = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")
"""They name the store of the launcher's own process group, of which there is one a launch."""
PRELOADED = (  # what a first step imports
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "vit")),
    *("transformers.optimization", "torch._dynamo"),  # whose imports take seconds
    *("torch.distributed.algorithms.ddp_comm_hooks.default_hooks", "sklearn.datasets"),
)


@dataclass(frozen=True)
class Training:
    """A command line of a recipe, and what the ranks of its world share."""

    recipe: str
    words: tuple[str, ...]
    port: int
    log: str


def main(address: str) -> None:
    """Train what is asked for, until the other end is closed."""
    sys.path.insert(0, str(RECIPES))
    for name in (*PRELOADED, *(path.stem for path in RECIPES.glob("*.py"))):
        importlib.import_module(name)
    torch.set_num_threads(1)
    with suppress(EOFError), Client(address) as asking:
        while True:
            process = multiprocessing.get_context("fork").Process(target=_train, args=(asking.recv(),))
            process.start()
            asking.send(process.pid)
            process.join()
            asking.send(process.exitcode)


def _train(training: Training) -> None:
    torch.set_num_threads(1)
    for name in OF_LAUNCHER:
        os.environ.pop(name, None)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(training.port)}
    log = os.open(training.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    recipe = sys.modules[training.recipe]
    sys.argv = [str(RECIPES / f"{training.recipe}.py"), *training.words]
    run_recipe(recipe.main, recipe.task)


if __name__ == "__main__":
    arguments: Sequence[str] = sys.argv[1:]
    main(*arguments)
