"""The checkpoints of a run, as its loop sees them: resume once, call after every step. One run a folder, by a lock.

checkpoints = Checkpoints(accelerator, folder / "checkpoints", TrainState(...), order=..., layout=..., ...)
resumed = checkpoints.resume_into(batches)  # before the first one is loaded
for batch in batches:
    ...
    checkpoints.after_step(batch.step + 1, state)  # state() gives {"clock": ..., "best": ...}
checkpoints.delete_last_step()  # when the results are written
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object
from filelock import FileLock, Timeout

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.step.batch_layout import BatchLayout, SampleOrder
from memsave_recipes.data.fingerprint import Fingerprint
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.checkpoints.commit import (
    Entry,
    Writer,
    begin,
    check_space,
    clear_leftovers,
    commit_together,
    discard,
    disk_errors_as_input_error,
    finish,
    settle,
)
from memsave_recipes.training.checkpoints.resume import (
    BEST,
    STEP,
    Found,
    check_same_data,
    check_same_samples,
    committed,
    describe_change,
    describe_run,
    find_newest,
    prune,
)
from memsave_recipes.training.checkpoints.state import RankState, Record, TrainState, fitting, read_record
from memsave_recipes.training.launch.distributed import (
    RankPoll,
    on_all_at_leisure,
    on_all_processes,
    on_main_process,
)
from memsave_recipes.training.launch.processes import StoppedBySignal, StopSignals, is_restarted
from memsave_recipes.training.optimizers import NotFinite

LOCK = "run.lock"
KEPT = 2
"""How many checkpoints are kept, the newest."""
GIVEN_BACK_S = 120.0
"""A lost rank may yet have to end, and a disk of several machines keeps the lock of one that is gone for 90 s (NFS)."""


class RunLock:
    """The lock of a run's folder, for rank 0 alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / LOCK
        self._lock = FileLock(self.path)
        self._file: os.stat_result | None = None

    def acquire(self) -> list[Path]:
        """Take the lock, for which restarted ranks wait ``GIVEN_BACK_S``; return the folders made, innermost first.

        Raises:
            InputError: another run holds it, or it cannot be written.
        """
        with disk_errors_as_input_error(self.path, LOCK, hint="or name another folder"):
            made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock.acquire(timeout=GIVEN_BACK_S if is_restarted() else 0)
                self._file = self.path.stat()
            except Timeout as error:
                raise InputError(
                    f"--output_dir {self.folder} belongs to a run that has not ended: wait for it, or name another "
                    "folder"
                ) from error
            except FileNotFoundError as error:
                raise InputError(
                    f"--output_dir {self.folder}: no folder can be made there, name another one"
                ) from error
        return made

    def keep(self) -> None:
        """Take the lock again, and say so, where its file has been deleted, as cleaners of old files do.

        Raises:
            InputError: another run has taken it meanwhile.
        """
        if self._is_whole():
            return
        self._lock.release()
        try:
            self.acquire()
        except InputError as refused:
            raise InputError(
                f"{self.path} was deleted while this run held it, and another run has begun in its folder: this one "
                "ends, nothing more of it is saved"
            ) from refused
        line = f"note: {self.path} had been deleted, and is held again: keep cleaners of old files away from it"
        print(line, flush=True)

    def release(self, made: list[Path]) -> None:
        """Give the lock back, and remove the folders that were ``made`` for it, if they are empty."""
        if self._lock.is_locked and self._is_whole():
            with suppress(OSError):  # it holds a run
                self.path.unlink()  # before others can have it; who opened it earlier is refused, or opens it again
                for folder in made:
                    folder.rmdir()
        self._lock.release()

    def _is_whole(self) -> bool:
        """Return whether the locked file is the one that others would lock."""
        try:
            return self._file is not None and os.path.samestat(self._file, self.path.stat())
        except FileNotFoundError:
            return False


@contextmanager
def locked_run_folder(accelerator: Accelerator, folder: Path) -> Iterator[RunLock]:
    """Hold ``folder`` until the block or the process ends; rank 0 does for all. Empty folders made for it go again.

    Raises:
        InputError: on all ranks, where another run holds it, or it cannot be written.
    """
    lock = RunLock(folder)
    made = on_main_process(accelerator, lock.acquire)
    try:
        yield lock
    finally:
        lock.release(made)


T = TypeVar("T")

SAVE_ONLY = 1
"""A request to save, smaller than the number of any signal that stops a run."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a run goes on.

    Args:
        step: optimizer steps that are done.
        state: of the loop, as given to ``after_step``.
        notices: lines on damaged checkpoints that were skipped, and on differences from the saved run.
    """

    step: int
    state: Record
    notices: list[str]


class Checkpoints:
    """Saves a run and brings it back. All methods are for all ranks.

    Args:
        folder: of the checkpoints alone, seen by all ranks.
        training: the state that is saved.
        order, layout: the samples of each step, and their split over ranks and micro-batches.
        every_steps, every_minutes: when to save, besides a stop by a signal.
        data: of the training; without it, a resumed run does not check its data.
        lock: of the run's folder, checked at every save.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        training: TrainState,
        *,
        order: SampleOrder,
        layout: BatchLayout,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        signals: StopSignals | None = None,
        data: Fingerprint | None = None,
        lock: RunLock | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.folder = folder
        self.training = training
        self.order = order
        self.layout = layout
        self.every_steps = every_steps
        self.every_s = 60 * every_minutes if every_minutes else float("inf")
        self.signals = signals
        self.data = data
        self.lock = lock
        self.damaged: list[Path] = []
        self.last_saved: int | None = None
        self._last_time = time.monotonic()
        self._poll = RankPoll(accelerator)

    def resume_into(self, batches: GlobalBatches) -> Resumed | None:
        """Resume, and have ``batches`` begin there.

        Raises:
            InputError: as ``resume``, or the run would end before that.
        """
        resumed = self.resume()
        if resumed is not None:
            if resumed.step > batches.steps.stop:
                raise InputError(
                    f"--resume: {self.folder} has {resumed.step} steps and this run ends after {batches.steps.stop}: "
                    "raise --max_steps or --num_epochs"
                )
            batches.begin_after(resumed.step)
        return resumed

    def resume(self) -> Resumed | None:
        """Restore the newest whole checkpoint; ``None`` where none was ever committed.

        Raises:
            InputError: all of them are damaged, or the newest does not fit the run.
        """
        found = on_main_process(self.accelerator, self._find)
        if found is None:
            return None
        record, notices = on_all_processes(self.accelerator, lambda: self._restore(found))
        self.damaged, self.last_saved = list(found.damaged), found.step
        return Resumed(step=found.step, state=record["state"], notices=found.notices + notices)

    def after_step(self, step: int, state: Callable[[], Record]) -> None:
        """Save after ``step`` steps if it is time or a signal asks for it; ``state()`` is called only then.

        Raises:
            StoppedBySignal: a rank received a signal; the checkpoint has been saved.
            InputError, NotFinite: as ``save``.
        """
        request = self._poll.max(step, self._request())
        if request or (self.every_steps and step % self.every_steps == 0):
            self.save(step, state())
        if request > SAVE_ONLY:
            raise StoppedBySignal(request, step, self.folder)

    def until_signal(self, batches: Iterable[T], step: int, state: Callable[[], Record]) -> Iterator[T]:
        """Yield the ``batches`` of an evaluation after ``step`` steps, equally many on all ranks, until a signal.

        The resumed run begins with the evaluation.

        Raises:
            StoppedBySignal, InputError, NotFinite: as ``after_step``.
        """
        poll = RankPoll(self.accelerator)
        for number, batch in enumerate(batches):
            if signal := poll.max(number, self._signal()):
                self.save(step, state())
                raise StoppedBySignal(signal, step, self.folder)
            yield batch

    def save(self, step: int, state: Record) -> None:
        """Save after ``step`` steps, unless that has been done.

        Raises:
            InputError: it could not be saved; what was there is as it was.
            NotFinite: the weights are not; the one before is as it was.
        """
        if step != self.last_saved and not self._written(step, state):
            last = f"the last checkpoint is of step {self.last_saved}" if self.last_saved else "there is no checkpoint"
            raise NotFinite(
                f"the weights are not finite after step {step}, although its loss was: they are not saved, {last}; "
                "lower --learning_rate and --weight_decay"
            )
        self._last_time = time.monotonic()

    def save_best(self, step: int, writers: Iterable[Writer]) -> None:
        """Save what ``writers`` write on rank 0, such as the weights, as the only ``best-STEP``.

        Raises:
            InputError: it could not be saved; the one before is as it was.
        """
        name = f"{BEST}-{step}"
        disk_errors = partial(disk_errors_as_input_error, self.folder, name)
        commit_together(self.accelerator, self.folder, name, writers, disk_errors)

        def prune_best() -> None:
            with disk_errors():
                prune(self.folder, BEST, newest=step, keep=1)

        on_main_process(self.accelerator, prune_best)

    def find_best(self) -> Path | None:
        """Return ``best-STEP``, if one is there and whole."""
        try:
            found = find_newest(self.folder, BEST)
        except InputError:  # all are damaged
            return None
        return None if found is None else found.path

    def delete_last_step(self) -> None:
        """Delete the checkpoint of the last step of a finished run, if it is the only one and none was asked for."""
        if self.every_steps is None:
            on_main_process(self.accelerator, self._delete_the_only_one)

    def _delete_the_only_one(self) -> None:
        there = committed(self.folder)
        if [step for step, _ in there] != [self.last_saved]:
            return
        with disk_errors_as_input_error(self.folder, there[0][1].name):
            discard(there[0][1])
        with suppress(OSError):  # it holds the best weights
            self.folder.rmdir()

    def _request(self) -> int:
        """Return the number of this rank's signal, ``SAVE_ONLY`` or 0. Only rank 0's clock tells when it is time."""
        if signal := self._signal():
            return signal
        is_time = self.accelerator.is_main_process and time.monotonic() - self._last_time >= self.every_s
        return SAVE_ONLY if is_time else 0

    def _signal(self) -> int:
        return self.signals.received if self.signals is not None else 0

    def _written(self, step: int, state: Record) -> bool:
        """Return whether the weights are finite, so that they have been saved."""
        if not all(gather_object([self.training.is_finite()])):
            return False
        name, rank, record = f"{STEP}-{step}", self.accelerator.process_index, self._record(step, state)
        temporary = on_main_process(self.accelerator, lambda: self._begin(name))
        mine = on_all_processes(self.accelerator, lambda: self.training.rank_state(rank, record))
        try:
            entries = gather_object(on_all_at_leisure(self.accelerator, lambda: self._write(name, temporary, mine)))
            on_main_process(self.accelerator, lambda: self._commit(step, temporary, entries))
        except BaseException:
            if self.accelerator.is_main_process:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self.last_saved = step
        return True

    def _write(self, name: str, temporary: Path, mine: RankState) -> list[Entry]:
        """Write this rank's part: rule 6 of NOTE [ the commit ]."""
        with disk_errors_as_input_error(self.folder, name):
            return settle(temporary, mine.write(temporary))

    def _commit(self, step: int, temporary: Path, entries: list[Entry]) -> None:
        name = f"{STEP}-{step}"
        with disk_errors_as_input_error(self.folder, name):
            finish(temporary, self.folder / name, entries)
            prune(self.folder, STEP, newest=step, keep=KEPT, damaged=self.damaged)

    def _begin(self, name: str) -> Path:
        """Make the folder that the ranks fill."""
        if self.lock is not None:
            self.lock.keep()
        self._make_room()
        with disk_errors_as_input_error(self.folder, name):
            return begin(self.folder, name)

    def _make_room(self) -> None:
        clear_leftovers(self.folder)
        check_space(self.folder.parent, self.training.num_bytes())

    def _record(self, step: int, state: Record) -> Record:
        return {"step": step, "run": describe_run(self.order, self.layout, self.data), "state": state}

    def _find(self) -> Found | None:
        clear_leftovers(self.folder)
        return find_newest(self.folder)

    def _restore(self, found: Found) -> tuple[Record, list[str]]:
        """Return the record, and lines on differences from the saved run."""
        if not found.path.is_dir():
            raise InputError(
                f"--output_dir {self.folder.parent} is not seen by all ranks, so they cannot resume: put it on a disk "
                "that all machines share"
            )
        record = read_record(found.path, {"step", "run", "state"})
        if record["step"] != found.step:
            raise InputError(f"--resume: {found.path} holds step {record['step']}: give the folder its name back")
        with fitting(found.path):
            notices = check_same_data(record["run"], self.data)
            check_same_samples(record["run"], self.order)
            change = describe_change(record["run"], self.layout)
        self.training.read(found.path)
        return record, notices + ([change] if change else [])
