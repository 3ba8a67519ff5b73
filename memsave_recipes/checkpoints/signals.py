"""A signal asks a run to stop: it finishes the step, saves and ends with the signal's exit code.

The handlers only take a note; what is done about it is agreed among the ranks at the end of a step. SIGUSR1 is what
SLURM sends some time before the limit (``#SBATCH --signal=B:USR1@120``).
"""

import os
import signal
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from memsave_recipes.training.workers import STOPPING

EXIT_CODES = {number: 130 if number == signal.SIGINT else 143 for number in STOPPING}
"""128 and the signal's number, as shells have it; what comes before a time limit counts as a termination."""
SAME_KEYSTROKE_S = 1.0
"""A launcher may pass on the Ctrl-C that the terminal has delivered already."""


class StoppedBySignal(SystemExit):
    """The run has stopped with a checkpoint saved; the code is that of the signal, ``message`` one line for people."""

    def __init__(self, number: int, step: int, folder: Path) -> None:
        self.exit_code = EXIT_CODES[signal.Signals(number)]
        super().__init__(self.exit_code)
        name = signal.Signals(number).name
        self.message = f"{name}: stopped after {step} steps, all of them saved in {folder}: go on with --resume"


class StopSignals:
    """Takes a note of the first signal that asks to stop, until ``remove()``. For the main thread.

    A second Ctrl-C, a second or more after the first, ends the process at once.
    """

    def __init__(self) -> None:
        self.received = 0
        """The signal's number, 0 for none."""
        self._since = 0.0
        self._before: dict[int, Any] = {number: signal.signal(number, self._take_note) for number in EXIT_CODES}

    def remove(self) -> None:
        """Put back the handlers that were there."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __enter__(self) -> "StopSignals":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and self.received == signal.SIGINT
        if again and time.monotonic() - self._since >= SAME_KEYSTROKE_S:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        if not self.received:
            self.received, self._since = number, time.monotonic()
