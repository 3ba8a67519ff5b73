"""Runs that are broken in one way each: the trials have to catch every one of them."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trials import run as trial

from memsave_recipes.core.step.batch_layout import MicroBatchSampler
from memsave_recipes.training import batching
from memsave_recipes.training.batching import GlobalBatch
from memsave_recipes.training.checkpoints import commit, saver, state
from memsave_recipes.training.checkpoints import resume as resume_module
from memsave_recipes.training.launch.distributed import RankPoll


def no_seed_of_dropout() -> None:
    """Dropout goes on drawing from wherever the generator is."""
    GlobalBatch._seed_dropout = lambda self, index: None


def noise_from_the_workers() -> None:
    """Augmentation draws from the generator of the process that happens to load the sample."""
    trial.Samples.noise = lambda self, key: 0.3 * torch.randn(4, 6)


def position_off_by_one() -> None:
    """The step that was saved last is trained a second time."""
    original = saver.Checkpoints.resume

    def resume(self: Any) -> Any:
        resumed = original(self)
        return resumed and saver.Resumed(step=resumed.step - 1, state=resumed.state, notices=resumed.notices)

    saver.Checkpoints.resume = resume


def order_from_the_life() -> None:
    """A life begins its epoch anew, as a plain loader does, instead of where the last one was."""
    original = MicroBatchSampler.__iter__

    def restart(self: Any) -> Any:
        object.__setattr__(self, "last_step", self.last_step - self.first_step)
        object.__setattr__(self, "first_step", 0)
        return original(self)

    MicroBatchSampler.__iter__ = restart


def saved_within_a_step() -> None:
    """The step is said to be done, and saved, when only its first micro-batch has been computed."""
    forwards, after_step = GlobalBatch.forwards, saver.Checkpoints.after_step
    inside: dict[str, Any] = {}

    def remember(self: Any, step: int, make_state: Any) -> None:
        inside.update(checkpoints=self, state=make_state())

    def save_inside(self: Any, model: Any) -> Any:
        for index, micro_batch in enumerate(forwards(self, model)):
            if index == 1 and self.step % 2 and inside:
                after_step(inside["checkpoints"], self.step + 1, lambda: {"samples": 8 * (self.step + 1)})
            yield micro_batch

    GlobalBatch.forwards, saver.Checkpoints.after_step = save_inside, remember


def optimizer_not_restored() -> None:
    _not_restored("optimizer")


def schedule_not_restored() -> None:
    _not_restored("scheduler")


def buffers_not_restored() -> None:
    """BatchNorm begins its running statistics anew."""
    original = state.TrainState._load_model

    def load(self: Any, weights: dict[str, Tensor]) -> None:
        buffers = {name: tensor.clone() for name, tensor in self.model.named_buffers()}
        original(self, weights | buffers)

    state.TrainState._load_model = load


def saved_in_place() -> None:
    """Files are written where they will be looked for."""

    def begin(folder: Path, name: str) -> Path:
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        return target

    saver.begin = begin
    saver.finish = lambda temporary, target, settled: commit.write_manifest(target, settled)


def deleted_before_the_save() -> None:
    """The old checkpoints make room for the new one."""
    original = saver.begin

    def delete_and_begin(folder: Path, name: str) -> Path:
        for _, path in resume_module.committed(folder):
            commit.discard(path)
        return original(folder, name)

    saver.begin = delete_and_begin


def from_zero_when_damaged() -> None:
    """A damaged newest checkpoint counts as none at all."""
    original = resume_module.verify_manifest

    def find_newest(folder: Path) -> Any:
        for step, path in resume_module.committed(folder)[:1]:
            try:
                original(path)
            except resume_module.Damaged:
                break
            return resume_module.Found(path=path, step=step, damaged={})
        return None

    saver.find_newest = find_newest


def not_verified() -> None:
    """Whatever has the right name is taken."""
    resume_module.verify_manifest = lambda folder: None


def only_sizes_verified() -> None:
    """Of a file that is there, only the size is looked at."""
    original = resume_module.verify_manifest

    def verify(folder: Path) -> None:
        try:
            original(folder)
        except resume_module.Damaged as damaged:
            if "has other bytes" not in str(damaged):
                raise

    resume_module.verify_manifest = verify


def signals_not_agreed() -> None:
    """A rank that receives a signal stops by itself."""
    RankPoll.max = lambda self, step, value: value


def workers_hear_signals() -> None:
    """Data workers die of the signal that their parent wanted to finish its step after."""
    batching.serve_parent_only = lambda worker_id: None


def _not_restored(name: str) -> None:
    original = state.TrainState.read

    def read(self: Any, folder: Path) -> None:
        before = copy.deepcopy(self.stateful[name].state_dict())
        original(self, folder)
        self.stateful[name].load_state_dict(before)

    state.TrainState.read = read


BREAK = {
    function.__name__: function
    for function in (
        no_seed_of_dropout,
        noise_from_the_workers,
        position_off_by_one,
        order_from_the_life,
        saved_within_a_step,
        optimizer_not_restored,
        schedule_not_restored,
        buffers_not_restored,
        saved_in_place,
        deleted_before_the_save,
        from_zero_when_damaged,
        not_verified,
        only_sizes_verified,
        signals_not_agreed,
        workers_hear_signals,
    )
}
