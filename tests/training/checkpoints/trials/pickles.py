"""Put a pickle that executes code where a checkpoint's files are, with a manifest that fits, and go on from it."""

import io
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from trials.damage import stopped_run
from trials.run import Run
from trials.world import DONE, REFUSED, read_log, run_to_end

from memsave_recipes.training.checkpoints.commit import MANIFEST, write_manifest

# Names that Accelerate's load_state would read.
OF_OTHERS = (
    "random_states_0.pkl",
    "custom_checkpoint_0.pkl",
    "optimizer.bin",
    "scheduler.bin",
    "pytorch_model.bin",
    "scaler.pt",
    "sampler.bin",
)


class Crafted:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def as_pickle(mark: Path) -> bytes:
    return pickle.dumps(Crafted(mark))


def as_torch_file(mark: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"state": Crafted(mark)}, buffer)
    return buffer.getvalue()


FORMS = {"pickle": as_pickle, "torch": as_torch_file}


def pickle_trials(run: Run) -> dict[str, Any]:
    """For each file, form and manifest (old or fitting): whether code ran, and how the run ended."""
    stopped = stopped_run(replace(run, folder=run.folder / "stopped"))
    names = sorted(path.name for path in (stopped.folder / "checkpoints" / "step-6").iterdir())
    return {
        f"{name}, {form}, {'new' if fits else 'old'} manifest": _plant(run, stopped, name, form, fits)
        for name, form, fits in _trials(names)
    }


def _trials(names: list[str]) -> Iterator[tuple[str, str, bool]]:
    """Where the manifest is old, digests differ whatever the form; the others' files have their own one."""
    for name in names:
        yield from ((name, "pickle", False), *((name, form, True) for form in FORMS))
    yield OF_OTHERS[0], "pickle", False
    yield from ((name, "pickle" if name.endswith("pkl") else "torch", True) for name in OF_OTHERS)


def _plant(run: Run, stopped: Run, name: str, form: str, fits: bool) -> tuple[bool, bool, Any]:
    """Whether code ran; whether the run ended as it should; its last words."""
    trial = replace(run, folder=run.folder / "trial")
    shutil.rmtree(trial.folder, ignore_errors=True)
    shutil.copytree(stopped.folder, trial.folder)
    mark = run.folder / "executed"
    folder = trial.folder / "checkpoints" / "step-6"
    (folder / name).write_bytes(FORMS[form](mark))
    if fits and name != MANIFEST:
        write_manifest(folder)
    codes, log = run_to_end(trial), read_log(trial)
    executed = mark.exists()
    mark.unlink(missing_ok=True)
    life = log[max(index for index, line in enumerate(log) if line.keys() & {"resumed", "refused"}) :]
    if not fits or name == MANIFEST:  # the one before is whole
        return executed, codes == [DONE] and life[0].get("resumed") == 4, life[0]
    if name in OF_OTHERS:  # nobody reads it
        return executed, codes == [DONE] and life[0].get("resumed") == 6, life[0]
    return executed, codes == [REFUSED] and "\n" not in life[0].get("refused", "\n"), life[0]
