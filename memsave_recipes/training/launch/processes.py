"""The end of processes: at a signal, with their launcher or parent, or by force.

A signal asks a run to stop (``docs/failures.md``): the handlers record it, and the ranks agree on it at the end of a
step. A rank ends with its launcher. Before it ends with an error it leaves its exit code in the store of the process
group, for the ranks that wait for it in a collective.

NOTE [ forced end ]
1. Python runs no handler while the main thread waits in a collective. So another thread ends the process, woken by a
   socket to which the interpreter writes the number of each signal at once (``signal.set_wakeup_fd``).
2. The first signal asks. After it a Ctrl-C ends the process at once, and so does a second SIGTERM. A first SIGTERM does
   not: schedulers send it some time after a SIGUSR1, and the process may be saving.
3. A second signal within a second is the same keystroke, or the same SIGTERM, which a launcher has passed on.
4. A step that has not ended, and been saved, within the limit after the first signal is ended as well.
"""

import atexit
import multiprocessing
import os
import re
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any, NoReturn

import psutil
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.distributed_c10d import _get_default_store

from memsave_recipes.core.processes import END_OF_LAUNCHER, STOPPING, only_errors_of_c10, signal_at_end_of_parent

LOST = 6
"""The exit code where a rank or a data worker is lost, or a step has no end."""
MID_STEP = "in the middle of a step; the last checkpoint is as it was, go on with --resume"
REPORT_DELAY_S = 2.0
"""Other ranks wait this long before they report: the launcher ends them with the first, and nothing is said twice."""
ENDED_WITH = "memsave_recipes/ended_with"
OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""The environment variable that each rank of torchrun has, which is the launcher of several ranks."""
EXIT_CODES = {number: 130 if number == signal.SIGINT else 143 for number in STOPPING}
"""128 and the signal's number, as in shells; SIGUSR1, sent before a time limit, counts as SIGTERM."""

SAME_KEYSTROKE_S = 1.0
REMOVED = 0
"""In the socket, in place of a signal's number: there is nothing more to wait for."""

MAX_NUMBERS = 512  # that are read at once

TORCHRUN = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}
ACCELERATE = {"accelerate", "accelerate.commands.accelerate_cli"}
"""It launches by its command ``launch``."""

MAX_DEFAULT_WORKERS = 4
BUSY = 1.5  # processes that want a core, above which another run would measure other seconds
KILLED = re.compile(r"DataLoader worker \(pid (?P<pid>\d+)\) is killed by signal: (?P<signal>[^.]+)")
EXITED = re.compile(r"DataLoader worker \(pid(\(s\))? (?P<pid>[\d, ]+)\) exited unexpectedly")
"""torch's errors on a lost worker; the former may be the cause of the latter."""
KILLED_WITHOUT_MEMORY = {
    "SIGKILL": "the host had no memory left: give",
    "SIGBUS": "shared memory (/dev/shm) is full: enlarge it, or give",
}
"""The signals by which a system without memory kills a data worker, with the reason and the remedy."""


class SignalHistory:
    """Tells a signal that asks a run to stop from one that ends it at once: rules 2 and 3 of NOTE [ forced end ]."""

    def __init__(self) -> None:
        self.first_at: dict[int, float] = {}
        """Signals, in the order in which they came, to seconds."""

    def forces_end(self, number: int, at: float) -> bool:
        """Return whether this signal, received at ``at`` seconds, is to end the process."""
        self.first_at.setdefault(number, at)
        asked_at = {signal.SIGINT: next(iter(self.first_at.values())), signal.SIGTERM: self.first_at[number]}
        return at - asked_at.get(signal.Signals(number), at) >= SAME_KEYSTROKE_S


class StoppedBySignal(SystemExit):
    """The run has stopped with a checkpoint saved; the code is that of the signal, ``message`` one line for people."""

    def __init__(self, number: int, step: int, folder: Path) -> None:
        self.exit_code = EXIT_CODES[signal.Signals(number)]
        super().__init__(self.exit_code)
        name = signal.Signals(number).name
        self.message = f"{name}: stopped after {step} steps, all of them saved in {folder}: go on with --resume"


class StopSignals:
    """Records the first signal that asks to stop, until ``remove()``. For the main thread.

    Further signals, and a run that does not stop within ``limit_s``, end it by NOTE [ forced end ].
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s = limit_s
        self.received = 0
        """The signal's number, 0 for none."""
        self._history = SignalHistory()
        self._handlers: dict[int, Any] = {number: signal.signal(number, self._record) for number in EXIT_CODES}
        self._numbers, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._thread = Thread(target=self._listen, name="forced end", daemon=True)
        self._thread.start()

    def remove(self) -> None:
        """Put back the handlers and the wakeup descriptor that were there."""
        signal.set_wakeup_fd(self._wakeup_before)
        self._wakeup.send(bytes([REMOVED]))  # closing it would not do: data workers hold it open
        self._thread.join()
        self._wakeup.close()
        self._numbers.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def __enter__(self) -> "StopSignals":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def _listen(self) -> None:
        while select.select([self._numbers], [], [], self._left_s())[0]:
            numbers = self._numbers.recv(MAX_NUMBERS)
            if REMOVED in numbers:
                return
            for number in (one for one in EXIT_CODES if one in numbers):
                if self._history.forces_end(number, time.monotonic()):
                    end_now(f"{number.name} after {self._first}: ended at once, {MID_STEP}", EXIT_CODES[number])
        end_now(f"error: {self.limit_s:g} s after {self._first} the run has not stopped: ended {MID_STEP}", LOST)

    def _left_s(self) -> float | None:
        """Return the seconds until rule 4 ends the process; ``None`` for ever."""
        if self.limit_s is None or not self._history.first_at:
            return None
        asked_at = next(iter(self._history.first_at.values()))
        return max(0.0, asked_at + self.limit_s - time.monotonic())

    @property
    def _first(self) -> str:
        return signal.Signals(next(iter(self._history.first_at))).name


def end_now(message: str, code: int) -> NoReturn:
    """End from any thread, in the middle of whatever the others do: no handler runs, and no file is flushed."""
    os.write(sys.stderr.fileno(), f"\n{message}\n".encode())  # a progress bar may be in the line
    os._exit(code)


@only_errors_of_c10()
def publish_exit_code(code: int) -> None:
    """Leave the exit code of this rank for the others."""
    if dist.is_initialized():
        _get_default_store().set(ENDED_WITH, str(code))


@only_errors_of_c10()
def exit_code_of_another_rank() -> int | None:
    """Return the exit code that another rank has left, if one has; for a rank whose collective has failed."""
    with suppress(RuntimeError):  # the process that keeps the store has ended as well
        if dist.is_initialized() and _get_default_store().check([ENDED_WITH]):
            return int(_get_default_store().get(ENDED_WITH))
    return None


def end_with_launcher() -> None:
    """Stop a rank, as a signal stops it, when the launcher that started it is gone, or has gone before this call.

    The end of another parent, such as a shell, ``srun``, ``mpirun`` or a notebook, is not the end of the run.
    """
    with suppress(psutil.Error):
        parent = psutil.Process().parent()
        if parent is not None and is_launcher(parent.cmdline()):
            signal_at_end_of_parent(END_OF_LAUNCHER, parent.pid)
        elif OF_TORCHRUN in os.environ and (parent is None or _takes_orphans(parent)):  # it ended during the imports
            os.kill(os.getpid(), END_OF_LAUNCHER)


def _takes_orphans(process: psutil.Process) -> bool:
    """Tell the first process of a machine or container, unless it is a Python program that starts ranks itself."""
    return process.pid == 1 and not process.name().startswith("python")


def is_launcher(command: list[str]) -> bool:
    """Return whether a command line is that of ``accelerate launch`` or torchrun."""
    return launch_arguments(command) is not None or any(TORCHRUN & {word, Path(word).stem} for word in command)


def launch_arguments(command: list[str]) -> list[str] | None:
    """Return the arguments after ``accelerate launch`` in a command line; ``None`` without."""
    for position, word in enumerate(command):
        names, rest = {word, Path(word).stem}, command[position + 1 :]
        if names & {"accelerate-launch", "accelerate.commands.launch"}:
            return rest
        if names & ACCELERATE and rest[:1] == ["launch"]:
            return rest[1:]
    return None


def is_restarted() -> bool:
    """Return whether torchrun, which is also the engine of ``accelerate launch``, has started these ranks before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def num_workers(asked: int | None, accelerator: Accelerator) -> int:
    """Return the number of data workers of a rank: ``asked``, by default none on a CPU, whose cores compute.

    With an accelerator one of a rank's cores is left to the main process. None, too, where workers are no forks, and
    each would import torch and get a copy of the data. No sample depends on the number.
    """
    if asked is not None or accelerator.device.type == "cpu" or sys.platform != "linux":
        return asked or 0
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    chosen = max(0, min(MAX_DEFAULT_WORKERS, _num_cores() // ranks_here - 1))
    accelerator.print(f"{chosen} processes load data for each rank: --dataloader_num_workers takes another number")
    return chosen


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_busy_host() -> str | None:
    """Return a line where so many processes want the cores that seconds which are measured here are rough."""
    load, cores = os.getloadavg()[0], _num_cores()
    if load <= BUSY * cores:
        return None
    return f"note: this machine is busy (load {load:.1f} on {cores} cores): measured seconds, and choices by them, vary"


@cache
def end_workers_at_exit() -> None:
    """Kill data workers when this process exits: Python would wait for ever for those that ignore its SIGTERM.

    To be called before there are any.
    """
    atexit.register(_kill_workers)


def _kill_workers() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would call their end an error
    for process in multiprocessing.active_children():
        if process.daemon:  # those that multiprocessing would ask to end
            process.kill()


@dataclass(frozen=True)
class LostWorker:
    """A data worker that has died, in ``words``, and whether most likely the host ``had_no_memory`` left."""

    words: str
    had_no_memory: bool


def lost_worker(error: Exception) -> LostWorker | None:
    """Return the worker that torch reports as lost; ``None`` for any other error."""
    death = KILLED.search(f"{error} {error.__cause__}") or EXITED.search(str(error))
    if death is None:
        return None
    worker, by = f"data worker {death['pid']}", death.groupdict().get("signal")
    for name, reason in KILLED_WITHOUT_MEMORY.items():
        number = signal.Signals[name]
        if by == signal.strsignal(number):
            why = f"was killed by signal {number:d}, most likely because {reason} fewer --dataloader_num_workers"
            return LostWorker(f"{worker} {why}", had_no_memory=True)
    why = f"was killed ({by})" if by else "ended unexpectedly"
    return LostWorker(f"{worker} {why}: --dataloader_num_workers 0 loads in this process and shows why", False)
