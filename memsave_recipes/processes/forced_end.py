"""A run that was asked to stop and does not is ended, whatever it waits for.

NOTE [ forced end ]
1. Python runs a handler between two instructions of the main thread, and one that waits in a collective comes to none.
   So what ends the process is a thread of its own. The interpreter wakes it: it writes the number of each signal that
   has a handler to a pipe, at once (``signal.set_wakeup_fd``).
2. The first signal asks. After it a Ctrl-C ends the process at once, and so does a second SIGTERM. A first SIGTERM does
   not: schedulers send it some time after a SIGUSR1, and the process may be saving.
3. What comes within a second is the same keystroke, or the same SIGTERM, which a launcher has passed on.
4. A step that has not ended, and been saved, within the limit after the first signal is ended as well.
"""

import os
import select
import signal
import time
from threading import Thread
from typing import NoReturn

from memsave_recipes.processes.ends import LOST, WAY_ON, end_now

SAME_KEYSTROKE_S = 1.0
REMOVED = 0
"""In the pipe, in place of a signal's number: there is nothing more to wait for."""


class Insistence:
    """Tells what asks a run to stop from what means it a second time: rules 2 and 3 of NOTE [ forced end ]."""

    def __init__(self) -> None:
        self.first_at: dict[int, float] = {}
        """Signals, in the order in which they came, to seconds."""

    def is_in(self, number: int, at: float) -> bool:
        """Whether this one, which comes at so many seconds, is to end the process."""
        self.first_at.setdefault(number, at)
        asked_at = {signal.SIGINT: next(iter(self.first_at.values())), signal.SIGTERM: self.first_at[number]}
        return at - asked_at.get(signal.Signals(number), at) >= SAME_KEYSTROKE_S


class ForcedEnd:
    """Ends the process by NOTE [ forced end ], until ``remove()``. For the main thread.

    Args:
        exit_codes: of the signals that ask to stop, by number; they have handlers.
        limit_s: rule 4; none by default.
    """

    def __init__(self, exit_codes: dict[signal.Signals, int], limit_s: float | None = None) -> None:
        self.exit_codes = exit_codes
        self.limit_s = limit_s
        self._insistence = Insistence()
        self._numbers, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._before = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._thread = Thread(target=self._listen, name="forced end", daemon=True)
        self._thread.start()

    def remove(self) -> None:
        """Put back what was there."""
        signal.set_wakeup_fd(self._before)
        os.write(self._wakeup, bytes([REMOVED]))  # closing it would not do: data workers hold it open
        self._thread.join()
        os.close(self._wakeup)
        os.close(self._numbers)

    def _listen(self) -> None:
        while select.select([self._numbers], [], [], self._left_s())[0]:
            numbers = os.read(self._numbers, select.PIPE_BUF)
            if REMOVED in numbers:
                return
            for number in (one for one in self.exit_codes if one in numbers):
                if self._insistence.is_in(number, time.monotonic()):
                    self._end(f"{number.name} after {self._first}: ended at once,", self.exit_codes[number])
        self._end(f"error: {self.limit_s:g} s after {self._first} the run has not stopped: ended", LOST)

    def _left_s(self) -> float | None:
        """Until rule 4; ``None`` for ever."""
        if self.limit_s is None or not self._insistence.first_at:
            return None
        asked_at = next(iter(self._insistence.first_at.values()))
        return max(0.0, asked_at + self.limit_s - time.monotonic())

    @property
    def _first(self) -> str:
        return signal.Signals(next(iter(self._insistence.first_at))).name

    def _end(self, words: str, code: int) -> NoReturn:
        end_now(f"{words} {WAY_ON}", code)
