"""What a run leaves when it is done: ``final/`` and ``results.json``, each whole or not there.

Before them comes a checkpoint of the last step, so that a full disk costs nothing: ``--resume`` writes what is missing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from memsave_recipes.agreement import by_rank_0
from memsave_recipes.checkpoints import Checkpoints
from memsave_recipes.checkpoints.commit import make_whole, told_in_one_line
from memsave_recipes.reporting.run_folder import FINAL, RESULTS, write_json

GO_ON = "then go on with --resume"


def save_model(accelerator: Accelerator, model: nn.Module, folder: Path) -> None:
    """Write the weights as safetensors, for a model of transformers or peft in its ``save_pretrained`` layout."""
    bare = accelerator.unwrap_model(model)
    if hasattr(bare, "save_pretrained"):
        bare.save_pretrained(folder, is_main_process=accelerator.is_main_process)
    else:
        accelerator.save_model(bare, folder)


def save_final(accelerator: Accelerator, folder: Path, *writers: Callable[[Path], Any], way_out: str = GO_ON) -> None:
    """Let ``writers`` fill ``final/`` on rank 0, one after the other; it replaces that of an earlier life.

    Raises:
        InputError: on all ranks, where the disk does not take it; what was there before is as it was.
    """

    def write(temporary: Path) -> None:
        for writer in writers:
            writer(temporary)

    def put() -> None:
        with told_in_one_line(folder / FINAL, f"{FINAL}/", way_out=way_out):
            make_whole(folder, FINAL, write)

    by_rank_0(accelerator, put)


def write_results(
    accelerator: Accelerator,
    folder: Path,
    results: dict[str, Any],
    checkpoints: Checkpoints | None = None,
    *,
    way_out: str = GO_ON,
) -> None:
    """Write ``results.json`` on rank 0; then the checkpoint of the last step may go.

    Raises:
        InputError: on all ranks, where the disk does not take it.
    """

    def write() -> None:
        with told_in_one_line(folder / RESULTS, RESULTS, way_out=way_out):
            write_json(folder / RESULTS, results)

    by_rank_0(accelerator, write)
    if checkpoints is not None:
        checkpoints.give_up_the_end()
