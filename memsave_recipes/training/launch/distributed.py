"""Ranks that act as one: a result or failure of one is that of all, so that none waits in a collective for the others.

Work of rank 0 may take an hour, and a collective has a limit: the others wait in the store of the process group.

NOTE [ missing ranks ]
1. A thread of each rank reports to that store how often it has reported, and how many collectives it has begun in all
   of its groups.
2. A rank is missing that for longer than the limit has not reported, or is behind the furthest and begins nothing. Of
   those behind it is the last: the others wait for it in a smaller group.
3. While ranks wait for rank 0 (``on_main_process``), or for all, nobody is behind, so that may take any time.
4. All ranks find out and end; the lowest one that is not missing says so.
5. A rank's own ticks are the clock: one that was stopped and goes on blames nobody for it.
6. The limit of the process group itself is later. It names nobody, and where it is NCCL's it aborts.
7. Without the store nobody watches: then the launcher, which keeps it, is gone, and ends the ranks. What torch's
   C++ log says of the lost store is left out: the error says the same.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store, _world

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.processes import only_errors_of_c10
from memsave_recipes.training.launch.processes import LOST, MID_STEP, REPORT_DELAY_S, end_now, publish_exit_code

T = TypeVar("T")
Failure = tuple[str, str]
"""Its kind and its message: not every exception can be pickled for the other ranks."""
MISTAKE, MEMORY, OTHER = "mistake", "memory", "other"
"""The user's mistake, no memory left, and anything else."""
POLL_EVERY_S = 1.0
LOOK_EVERY_S = 0.25
_turns = itertools.count()

REPORT = "memsave_recipes/report"
DONE = "done"
TICKS_IN_LIMIT = 20
MAX_TICK_S = 10.0
SILENT = "does not answer"
BEHIND = "has not come to the collective that others wait in"


def on_main_process(accelerator: Accelerator, action: Callable[[], T]) -> T:
    """Let rank 0 call ``action()``; return its result, or fail, on all ranks.

    Raises:
        InputError: on every rank, where rank 0 raised one.
        RuntimeError: on the other ranks, where rank 0 raised something else.
    """
    result, error = _attempt(action) if accelerator.is_main_process else (None, None)
    _wait_for(accelerator)
    broadcast: list[tuple[T, Failure | None]] = broadcast_object_list([(result, _failure(error))])
    [(result_of_0, failure)] = broadcast
    _raise(error, [failure])
    return result_of_0


def on_all_processes(accelerator: Accelerator, action: Callable[[], T]) -> T:
    """Let every rank call ``action()``; where one fails, all do.

    Raises:
        InputError: on every rank, where one raised it.
        RuntimeError: on the other ranks, where one raised something else.
    """
    result, error = _attempt(action)
    fail_together(error)
    return result  # type: ignore[return-value]


def require_same(accelerator: Accelerator, values: Mapping[str, Any], hint: str) -> None:
    """Refuse ``values`` that are not those of rank 0.

    Raises:
        InputError: on every rank; it names the first that differs, and ends with ``hint``.
    """
    of_rank_0 = on_main_process(accelerator, lambda: dict(values))

    def compare() -> None:
        rank = accelerator.process_index
        for name, value in values.items():
            if value != of_rank_0[name]:
                raise InputError(f"rank {rank} has {name} {value}, rank 0 has {of_rank_0[name]}: {hint}")

    on_all_processes(accelerator, compare)


@contextmanager
def main_process_first(accelerator: Accelerator) -> Iterator[None]:
    """Run the block on rank 0 first, so that the others find its results in caches; where one fails, all do.

    Raises:
        InputError, RuntimeError: as ``on_all_processes``.
    """
    if not accelerator.is_main_process:
        _wait_for(accelerator)
        _raise(None, broadcast_object_list([None]))
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    if accelerator.is_main_process:
        _wait_for(accelerator)
        _raise(error, broadcast_object_list([_failure(error)]))
    fail_together(error)


def fail_together(error: Exception | None) -> None:
    """Raise on every rank where one has met an ``error``.

    Raises:
        InputError, RuntimeError: as ``on_all_processes``.
    """
    _raise(error, gather_object([_failure(error)]))


def on_all_at_leisure(accelerator: Accelerator, action: Callable[[], T]) -> T:
    """Let every rank call ``action()``, which may take any time; where one fails, all do.

    Raises:
        InputError, MemoryError, RuntimeError: as ``on_all_processes``.
    """
    result, error = _attempt(action)
    _wait_for(accelerator, range(accelerator.num_processes))
    fail_together(error)
    return result  # type: ignore[return-value]


class RankPoll:
    """Asks for the largest value of all ranks about once every ``POLL_EVERY_S`` seconds; other steps cost a comparison.

    Reading the result of a collective waits for all that is queued on the device, so it is not done in each step. Each
    answer also says in how many steps the next one is due.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._last_step: int | None = None
        self._last_time = 0.0
        self._next_step = 0

    def max(self, step: int, value: int) -> int:
        """Return the largest ``value`` of all ranks after ``step``; 0 where all are 0 or it is not yet time to ask."""
        if self.accelerator.num_processes == 1:
            return value
        if step < self._next_step:
            return 0
        mine = torch.tensor([[value, self._steps_in_interval(step)]], device=self.accelerator.device)  # (1, 2)
        of_ranks: Tensor = self.accelerator.gather(mine)  # (ranks, 2)
        value, interval = of_ranks.amax(dim=0).tolist()
        self._next_step = step + interval
        return value

    def _steps_in_interval(self, step: int) -> int:
        """Return the steps until the next answer, by the pace since the last; 1 where that is not known."""
        now = time.monotonic()
        steps = 0 if self._last_step is None else step - self._last_step
        pace = steps / max(now - self._last_time, 1e-9)
        self._last_step, self._last_time = step, now
        return max(1, int(pace * POLL_EVERY_S))


@only_errors_of_c10()
def _wait_for(accelerator: Accelerator, ranks: Iterable[int] = (0,)) -> None:
    """Wait, outside of a collective, until these ranks have called this as often as the caller."""
    if accelerator.num_processes == 1:
        return
    turn, pause_s = f"memsave_recipes/turn-{next(_turns)}", 1e-3
    with suppress(RuntimeError):  # the launcher, which keeps the store, is gone: then in the collective
        store = _get_default_store()
        store.set(f"{turn}/{accelerator.process_index}", "done")
        while not store.check([f"{turn}/{rank}" for rank in ranks]):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_EVERY_S)


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def _failure(error: Exception | None) -> Failure | None:
    """Return ``error`` as it is sent to other ranks."""
    if error is None:
        return None
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    kind = MISTAKE if isinstance(error, InputError) else MEMORY if is_memory else OTHER
    return kind, str(error) or type(error).__name__


def _raise(own: Exception | None, of_ranks: list[Failure | None]) -> None:
    failures = [failure for failure in of_ranks if failure]
    for kind, message in failures:
        if kind == MISTAKE:
            raise InputError(message) from own
    if own is not None:
        raise own
    for kind, message in failures:
        failed = f"another rank failed: {message}"
        raise MemoryError(failed) if kind == MEMORY else RuntimeError(failed)


@contextmanager
def missing_ranks_end_the_run(limit_s: float) -> Iterator[None]:
    """Watch by NOTE [ missing ranks ] inside; for all ranks, after their process group has been made."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    watch = _RankWatch(limit_s)
    try:
        yield
    finally:
        watch.stop()
    watch.report(DONE)


@dataclass(kw_only=True)
class Lateness:
    """Finds by rule 2 the ranks that are late, from their reports."""

    num_ranks: int
    limit_s: float
    _reports: list[str] = field(init=False)
    _silent_s: list[float] = field(init=False)
    _behind_s: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._reports = [report_of(0, 0)] * self.num_ranks
        self._silent_s, self._behind_s = [0.0] * self.num_ranks, [0.0] * self.num_ranks

    def take_in(self, reports: list[str], elapsed_s: float) -> dict[int, str]:
        """Return the missing ranks and how each is, ``elapsed_s`` after the last reports."""
        furthest = max((_begun(report) for report in reports if report != DONE), default=0)
        for rank, (report, before) in enumerate(zip(reports, self._reports, strict=True)):
            is_silent = report == before != DONE
            is_behind = DONE not in (report, before) and _begun(before) == _begun(report) < furthest
            self._silent_s[rank] = self._silent_s[rank] + elapsed_s if is_silent else 0.0
            self._behind_s[rank] = self._behind_s[rank] + elapsed_s if is_behind else 0.0
        self._reports = reports
        behind = {rank: _begun(reports[rank]) for rank, late_s in enumerate(self._behind_s) if late_s > self.limit_s}
        last = {rank: BEHIND for rank, begun in behind.items() if begun == min(behind.values())}
        return last | {rank: SILENT for rank, late_s in enumerate(self._silent_s) if late_s > self.limit_s}


def report_of(count: int, begun: int) -> str:
    """Return a report: its number among those of the rank, and how many collectives the rank has begun."""
    return f"{count} {begun}"


def _begun(report: str) -> int:
    return int(report.split()[1])


class _RankWatch:
    def __init__(self, limit_s: float) -> None:
        self.rank, self.num_ranks, self.limit_s = dist.get_rank(), dist.get_world_size(), limit_s
        self.tick_s = min(limit_s / TICKS_IN_LIMIT, MAX_TICK_S)
        self._store = _get_default_store()
        self._stopped = Event()
        self._thread = Thread(target=self._watch, name="rank watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(MAX_TICK_S)

    @only_errors_of_c10()
    def report(self, report: str) -> None:
        with suppress(RuntimeError):  # rule 7
            self._store.set(f"{REPORT}/{self.rank}", report)

    def _watch(self) -> None:
        lateness, count, before = Lateness(num_ranks=self.num_ranks, limit_s=self.limit_s), 0, time.monotonic()
        while not self._stopped.wait(self.tick_s) and dist.is_initialized():
            count += 1
            self.report(report_of(count, _collectives_begun()))
            now = time.monotonic()
            missing = lateness.take_in(self._reports(), min(now - before, 2 * self.tick_s))  # rule 5
            before = now
            if missing:
                self._end(missing)

    @only_errors_of_c10()
    def _reports(self) -> list[str]:
        """Return the reports of all ranks; without the store nobody is late: rule 7."""
        keys = [f"{REPORT}/{rank}" for rank in range(self.num_ranks)]
        try:
            return [self._store.get(key).decode() if self._store.check([key]) else report_of(0, 0) for key in keys]
        except RuntimeError:
            return [DONE] * self.num_ranks

    def _end(self, missing: dict[int, str]) -> NoReturn:
        """End this rank: rule 4."""
        with suppress(RuntimeError):
            publish_exit_code(LOST)
        reporter = min(set(range(self.num_ranks)) - missing.keys(), default=self.rank)
        if self.rank != reporter:
            time.sleep(REPORT_DELAY_S)
            os._exit(LOST)
        named = ", ".join(f"rank {rank} of {self.num_ranks} {how}" for rank, how in sorted(missing.items()))
        end_now(f"error: for more than {self.limit_s / 60:g} minutes {named}: ended {MID_STEP}", LOST)


def _collectives_begun() -> int:
    return sum(group._get_sequence_number_for_group() for group in list(_world.pg_map))  # type: ignore[attr-defined]
