"""``python without_float64.py FOLDER``: the training recipes on a stand-in for CUDA, with warps, a plan and exact sums.

With ``STANDIN_FLOAT64=0`` the device counts among those that compute in the host's memory, as Apple's GPUs do, and
every run is broken off after a checkpoint, and goes on.
"""

import os
import sys
from pathlib import Path

from accelerate.state import AcceleratorState

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))

from lives import FLAGS, loaded  # noqa: E402

from memsave_recipes.core.host import state as host_state  # noqa: E402
from memsave_recipes.run.training_run import TrainingRun  # noqa: E402

FEW = ["--max_steps", "3", "--logging_steps", "1", "--eval_steps", "2", "--save_every", "2", "--report_to", "none"]
MORE = {
    "image_classification": ["--augmentation", "article", "--class_weights", "balanced", "--micro_batch_size", "8"],
    "language_modeling": ["--activation_checkpointing", "full", "--verify", "--ema_decay", "0.9"],
    "text_classification": ["--bitwise_topology", "--micro_batch_size", "8", "--optimizer", "sgd"],
}
steps = TrainingRun.steps


class BrokenOff(Exception):
    """The end of a first life."""


def two_steps(training):
    for number, batch in enumerate(steps(training), 1):
        if number == 3:
            raise BrokenOff
        yield batch


def train(module, *words: str) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    module.main(list(words))


def main(folder: Path) -> None:
    is_like_apples = os.environ.get("STANDIN_FLOAT64") == "0"
    if is_like_apples:
        host_state.HOST_MEMORY = ("cpu", "cuda")
    for recipe, flags in MORE.items():
        words = [*FLAGS[recipe], *FEW, *flags, "--output_dir", str(folder / recipe)]
        with loaded(recipe) as module:
            if is_like_apples:
                TrainingRun.steps = two_steps
                try:
                    train(module, *words)
                except BrokenOff:
                    words.append("--resume")
                TrainingRun.steps = steps
            train(module, *words)


main(Path(sys.argv[1]))
