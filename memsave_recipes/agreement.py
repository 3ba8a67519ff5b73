"""Ranks that act as one: what one finds, all do, so that none waits for a collective that another never joins.

What rank 0 alone does may take an hour, and a collective has a limit. So the others wait for it in the store of the
process group, and all meet in the collective that tells them its end.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.distributed_c10d import _get_default_store

from memsave_recipes.errors import InputError

T = TypeVar("T")

ASK_EVERY_S = 1.0
LOOK_EVERY_S = 0.25
_turns = itertools.count()


def by_rank_0(accelerator: Accelerator, action: Callable[[], T]) -> T:
    """Let rank 0 call ``action()``; its result, or its failure, is that of all ranks.

    Raises:
        InputError: on every rank, where rank 0 raised one.
        RuntimeError: on the other ranks, where rank 0 raised something else.
    """
    result, error = _attempt(action) if accelerator.is_main_process else (None, None)
    _wait_for_rank_0(accelerator)
    [(result_of_0, told)] = broadcast_object_list([(result, _told(error))])
    _raise(error, [told])
    return result_of_0


def by_all_ranks(accelerator: Accelerator, action: Callable[[], T]) -> T:
    """Let every rank call ``action()``; where one fails, all do.

    Raises:
        InputError: on every rank, where one raised it.
        RuntimeError: on the other ranks, where one raised something else.
    """
    result, error = _attempt(action)
    fail_together(error)
    return result  # type: ignore[return-value]


@contextmanager
def rank_0_first(accelerator: Accelerator) -> Iterator[None]:
    """Inside, the other ranks come after rank 0 and find in caches what it has made; where one fails, all do.

    Raises:
        InputError: on every rank, where one raised it.
        RuntimeError: on the other ranks, where one raised something else.
    """
    if not accelerator.is_main_process:
        _wait_for_rank_0(accelerator)
        _raise(None, broadcast_object_list([None]))
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    if accelerator.is_main_process:
        _wait_for_rank_0(accelerator)
        _raise(error, broadcast_object_list([_told(error)]))
    fail_together(error)


def fail_together(error: Exception | None) -> None:
    """Raise ``error``, which this rank may have met; where one rank has, all do.

    Raises:
        InputError: on every rank, where one raised it.
        RuntimeError: on the other ranks, where one raised something else.
    """
    _raise(error, gather_object([_told(error)]))


class Ear:
    """Hears what any rank wishes, about once every ``ASK_EVERY_S`` seconds; every other step costs a comparison.

    A collective each step would be cheap, but on a device reading its result waits for everything queued there, and the
    host could no longer run ahead. So the ranks agree, with each answer, on how many steps the next one is away.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._last_step: int | None = None
        self._last_time = 0.0
        self._next_step = 0

    def hear(self, step: int, wish: int) -> int:
        """The largest wish of all ranks after ``step``, 0 where there is none or it is not yet time to ask."""
        if self.accelerator.num_processes == 1:
            return wish
        if step < self._next_step:
            return 0
        if wish:
            self.accelerator.set_trigger()
        if not self.accelerator.check_trigger():
            wish = 0
        wish, interval = self._largest(wish, self._steps_in_interval(step))
        self._next_step = step + interval
        return wish

    def _steps_in_interval(self, step: int) -> int:
        """By this rank's pace since the last answer; 1 where it is not known."""
        now = time.monotonic()
        steps = 0 if self._last_step is None else step - self._last_step
        pace = steps / max(now - self._last_time, 1e-9)
        self._last_step, self._last_time = step, now
        return max(1, int(pace * ASK_EVERY_S))

    def _largest(self, *numbers: int) -> list[int]:
        mine = torch.tensor([numbers], device=self.accelerator.device)  # (1, N)
        return self.accelerator.gather(mine).amax(dim=0).tolist()  # (ranks, N) -> (N)


def _wait_for_rank_0(accelerator: Accelerator) -> None:
    """Outside of a collective, until rank 0 has called this as often as the caller."""
    if accelerator.num_processes == 1:
        return
    turn, pause_s = f"memsave_recipes/turn-{next(_turns)}", 1e-3
    with suppress(RuntimeError):  # the launcher, which keeps the store, is gone: then in the collective
        store = _get_default_store()
        if accelerator.is_main_process:
            store.set(turn, "done")
        while not store.check([turn]):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_EVERY_S)


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def _told(error: Exception | None) -> tuple[bool, str] | None:
    """A failure as other ranks hear of it: whether it is the user's, and its words. Not every exception can travel."""
    if error is None:
        return None
    return isinstance(error, InputError), str(error) or type(error).__name__


def _raise(own: Exception | None, told: list[tuple[bool, str] | None]) -> None:
    failures = [failure for failure in told if failure]
    for is_input_error, words in failures:
        if is_input_error:
            raise InputError(words) from own
    if own is not None:
        raise own
    if failures:
        raise RuntimeError(f"another rank failed: {failures[0][1]}")
