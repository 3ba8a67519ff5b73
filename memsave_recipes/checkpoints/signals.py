"""A signal asks a run to stop: it finishes the step, saves and ends with the signal's exit code.

The handlers only take a note; what is done about it is agreed among the ranks at the end of a step. SIGUSR1 is what
SLURM sends some time before the limit (``#SBATCH --signal=B:USR1@120``).
"""

import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from memsave_recipes.processes.forced_end import ForcedEnd
from memsave_recipes.training.workers import STOPPING

EXIT_CODES = {number: 130 if number == signal.SIGINT else 143 for number in STOPPING}
"""128 and the signal's number, as shells have it; what comes before a time limit counts as a termination."""


class StoppedBySignal(SystemExit):
    """The run has stopped with a checkpoint saved; the code is that of the signal, ``message`` one line for people."""

    def __init__(self, number: int, step: int, folder: Path) -> None:
        self.exit_code = EXIT_CODES[signal.Signals(number)]
        super().__init__(self.exit_code)
        name = signal.Signals(number).name
        self.message = f"{name}: stopped after {step} steps, all of them saved in {folder}: go on with --resume"


class StopSignals:
    """Takes a note of the first signal that asks to stop, until ``remove()``. For the main thread.

    What insists after it, or does not stop within ``limit_s``, ends by NOTE [ forced end ] of
    ``memsave_recipes.processes.forced_end``.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.received = 0
        """The signal's number, 0 for none."""
        self._before: dict[int, Any] = {number: signal.signal(number, self._take_note) for number in EXIT_CODES}
        self._forced_end = ForcedEnd(EXIT_CODES, limit_s)

    def remove(self) -> None:
        """Put back the handlers that were there."""
        self._forced_end.remove()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __enter__(self) -> "StopSignals":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
