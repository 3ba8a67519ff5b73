"""A process that hears of the end of the one that started it, and a rank that ends with its launcher."""

import ctypes
import os
import signal
import sys
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
END_OF_LAUNCHER = signal.SIGUSR1
"""It asks to save and to stop; unlike a second SIGTERM, it never ends a rank in the middle of that."""
TORCHRUN = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}


def signal_at_end_of_parent(number: signal.Signals, parent: int) -> None:
    """Have Linux send ``number`` to this process when ``parent``, its process id, ends; other systems send nothing.

    See prctl(2), PR_SET_PDEATHSIG: forks of this process do not inherit it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the kernel was told
        os.kill(os.getpid(), number)


def end_with_launcher() -> None:
    """Have a rank stop, as a signal stops it, when the launcher that started it is gone.

    A launcher is ``accelerate launch`` or torchrun, told by the command line of the parent process. The end of anything
    else, such as a shell, ``srun``, ``mpirun`` or a notebook, is not the end of the run.
    """
    try:
        parent = psutil.Process().parent()
        is_launchers = parent is not None and is_launcher(parent.cmdline())
    except psutil.Error:
        return
    if parent is not None and is_launchers:
        signal_at_end_of_parent(END_OF_LAUNCHER, parent.pid)


def is_launcher(command: list[str]) -> bool:
    """Whether a command line is that of ``accelerate launch`` or torchrun."""
    return launch_arguments(command) is not None or any(TORCHRUN & {word, Path(word).stem} for word in command)


def launch_arguments(command: list[str]) -> list[str] | None:
    """Return what follows ``accelerate launch`` in a command line, or ``None`` where that is not in it."""
    for position, word in enumerate(command):
        names, rest = {word, Path(word).stem}, command[position + 1 :]
        if names & {"accelerate-launch", "accelerate.commands.launch"}:
            return rest
        if names & {"accelerate", "accelerate.commands.accelerate_cli"} and rest[:1] == ["launch"]:
            return rest[1:]
    return None
