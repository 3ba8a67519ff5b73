"""The signals that ask a process to stop, processes that end with their parent, and torch's log in C++."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock

import torch

END_OF_LAUNCHER = signal.SIGUSR1
"""It asks to save and to stop; unlike a second SIGTERM, it never ends a rank in the middle of that."""
STOPPING = (signal.SIGINT, signal.SIGTERM, END_OF_LAUNCHER)
"""The signals that ask a run to stop: of a keyboard, of a launcher or scheduler, of SLURM before its limit."""
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
C10_ERROR = 2
"""The level of errors in the C++ log of torch, above that of warnings."""
_levels_before: list[int] = []
_level_lock = Lock()


@contextmanager
def only_errors_of_c10() -> Iterator[None]:
    """Keep the warnings of torch's C++ log off the terminal inside, such as the frames of a lost store.

    torch reads the level from the environment when it is imported (``TORCH_CPP_LOG_LEVEL``), and has no function that
    changes it. Where its library does not export the variable, the warnings are printed.
    """
    level = _level_of_c10()
    with _level_lock:
        _levels_before.append(level.value)
        level.value = max(level.value, C10_ERROR)
    try:
        yield
    finally:
        with _level_lock:  # the last thread that leaves restores the first one's
            level.value = _levels_before.pop()


def silence_c10() -> None:
    """Keep them off the terminal until the process ends: NCCL warns of a process group that a failure has left over."""
    level = _level_of_c10()
    level.value = max(level.value, C10_ERROR)


def _level_of_c10() -> ctypes.c_int:
    with suppress(OSError, ValueError):
        return ctypes.c_int.in_dll(ctypes.CDLL(torch._C.__file__), "FLAGS_caffe2_log_level")
    return ctypes.c_int()  # which changes nothing


def signal_at_end_of_parent(number: signal.Signals, parent: int) -> None:
    """Have Linux send ``number`` to this process, not to its forks, when the process ``parent`` ends: prctl(2)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before prctl
        os.kill(os.getpid(), number)


def serve_parent_only(worker_id: int = 0) -> None:
    """Leave signals to the parent of this process, and end with it; the ``worker_init_fn`` of a ``DataLoader``.

    A signal to the process group would end workers first. Torch lets a worker look for a killed parent every five
    seconds, and some live on.
    """
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)  # a fork has the parent's
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        signal_at_end_of_parent(signal.SIGKILL, parent.pid)
