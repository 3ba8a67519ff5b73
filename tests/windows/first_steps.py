"""``python first_steps.py FOLDER``: every module, the help, a plan, and a training in two lives, as seen by Windows."""

import multiprocessing
import signal
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest
from accelerate.state import AcceleratorState

import memsave_recipes
from memsave_recipes.run.training_run import TrainingRun
from memsave_recipes.tools import cli
from memsave_recipes.training.launch import processes

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
PLAN = "plan image_classification --model vgg_small --memory_budget_gib 0.05 --target cpu --micro_batch_size 8"
TRAIN = "--model vgg_small --global_batch_size 8 --image_size 32 --max_steps 3 --save_every 3 --report_to none"
steps = TrainingRun.steps


def stopped_in_the_first(training):
    for batch in steps(training):
        signal.raise_signal(signal.SIGTERM)
        yield batch


def train(folder: Path, *more: str) -> None:
    import image_classification

    AcceleratorState._reset_state(reset_partial_state=True)
    image_classification.main([*TRAIN.split(), "--output_dir", str(folder), *more])


def main(folder: Path) -> None:
    assert processes.sys.platform == "win32"
    assert [number.name for number in processes.STOPPING] == ["SIGINT", "SIGTERM"]
    for module in walk_packages(memsave_recipes.__path__, "memsave_recipes."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert cli.main(PLAN.split()) == 0
    TrainingRun.steps = stopped_in_the_first
    with pytest.raises(SystemExit, match="143"):
        train(folder)
    TrainingRun.steps = steps
    train(folder, "--resume", "--dataloader_num_workers", "1")


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main(Path(sys.argv[1]))
