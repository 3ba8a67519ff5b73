"""``python many_runs.py RUNS.json``: runs of recipes, one after the other in this process, or in each rank of a launch.

A run may have several lives. A life ends after step 2, within the next step: in the middle of the optimizer's where
that has pieces. The next one goes on, and leaves ``read-RANK.json``: how much the device's memory grew while it read
the checkpoint, and the bytes of state in shards that the host has in another place, too. Small tensors of optimizer
state count as large here. With ``STANDIN_WAITS`` a run leaves ``waits-RANK.json``: what the host waits for in a step.
"""

import gc
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "recipes")]

from lives import Killed, loaded  # noqa: E402
from step_waits import waits_of_a_step  # noqa: E402

from memsave_recipes.core.activations import offload  # noqa: E402
from memsave_recipes.core.host import state as host_state  # noqa: E402
from memsave_recipes.core.host import step as host_step  # noqa: E402
from memsave_recipes.core.host.state import StateOnHost  # noqa: E402
from memsave_recipes.core.host.step import HostMasters  # noqa: E402
from memsave_recipes.core.sharding.tensors import local  # noqa: E402
from memsave_recipes.run import building  # noqa: E402
from memsave_recipes.training.checkpoints import (  # noqa: E402
    Checkpoints,
    TrainState,
    state,
)
from memsave_recipes.training.checkpoints.shard_files import read_shards  # noqa: E402

ENDS_AFTER = 2
_meetings = itertools.count()


def main(path: Path) -> None:
    host_state.PIECE_BYTES, host_state.SLAB_BYTES, host_state.SMALLEST_BYTES = 2**14, 2**18, 2**9
    host_step.LEAVING_BYTES = 2**12
    if torch.cuda.is_available():
        offload._engine_for(torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))).smallest_bytes = 1
        TrainState.read = _measured(TrainState.read)
    for run in json.loads(path.read_text()):
        os.environ["ACCELERATE_MIXED_PRECISION"] = run.get("precision", "no")
        *ended, last = run["lives"]
        for life in ended:
            with _ending(offloads="--offload_optimizer" in life):
                _live(run, [*life, "--resume"])
        _live(run, [*last, *["--resume"] * bool(ended)])


def _live(run: dict, flags: list[str]) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()  # what is left of the run before would count as memory of this one
    _meet_anew()
    waits, counts = {}, "STANDIN_WAITS" in os.environ
    reducing = _reducing_once() if run.get("reduces_once") else nullcontext()
    with loaded(run["recipe"]) as recipe, reducing, waits_of_a_step(waits) if counts else nullcontext():
        recipe.main([*flags, "--report_to", "none", "--output_dir", run["folder"]])
    if counts:
        _leave(Path(run["folder"]), "waits", waits)


@contextmanager
def _reducing_once() -> Iterator[None]:
    """Gradients in shards are reduced once a step, as if a search for a budget had found that."""
    plan_run = building.plan_run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "plan_run", lambda *args: replace(plan_run(*args), reduces_once=True))
        yield


def _meet_anew() -> None:
    """Make a process group of the ranks of a launch: at a used address they would not find each other."""
    if "RANK" not in os.environ:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{sys.argv[1]}.store-{next(_meetings)}", num_ranks)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)


def _leave(folder: Path, name: str, figures: dict[str, int]) -> None:
    (folder / f"{name}-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(figures))


def _measured(read: Callable[[TrainState, Path], None]) -> Callable[[TrainState, Path], None]:
    def measured(self: TrainState, folder: Path) -> None:
        shards: dict[str, torch.Tensor] = {}
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state, "read_shards", lambda *args: shards.update(read_shards(*args)) or shards)
            read(self, folder)
        parts = [local(tensor) for name, tensor in shards.items() if name.startswith("optimizer.")]
        kept = {local(value).data_ptr() for value in _tensors_of(self.stateful["optimizer"].state)}
        on_host = [part for part in parts if part.is_cpu and host_state.waits(part) and not part.is_pinned()]
        twice = [part for part in on_host if part.data_ptr() not in kept]
        figures = {"grown": torch.cuda.max_memory_allocated() - before, "twice": sum(part.nbytes for part in twice)}
        _leave(folder.parents[1], "read", figures)

    return measured


def _tensors_of(state: dict) -> Iterator[torch.Tensor]:
    return (value for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor))


@contextmanager
def _ending(*, offloads: bool):
    """The run inside ends within the step after ``ENDS_AFTER``, or before it."""
    after_step, done = Checkpoints.after_step, [0]

    def counted(self, step, state):
        after_step(self, step, state)
        done[0] = step
        if step == ENDS_AFTER and not offloads:
            raise Killed

    def ending_between_pieces(method):
        def end(self, tensors):
            if tensors and done[0] >= ENDS_AFTER:  # fp16 may leave a step out
                raise Killed
            return method(self, tensors)

        return end

    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        patch.setattr(Checkpoints, "after_step", counted)
        patch.setattr(StateOnHost, "_bring_home", ending_between_pieces(StateOnHost._bring_home))
        patch.setattr(HostMasters, "send", ending_between_pieces(HostMasters.send))
        yield
        raise AssertionError(f"it did not come to step {ENDS_AFTER}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
