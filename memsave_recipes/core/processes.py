"""The signals that ask a process to stop, processes that end with their parent or work ahead, torch's log in C++."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count, islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Lock
from typing import TypeVar

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


T = TypeVar("T")
STDOUT, STDERR = 1, 2
NEXT = "next"


@contextmanager
def ahead(items: Iterator[T], *, all_at_once: bool = False) -> Iterator[Iterator[T]]:
    """Let another process make ``items``: the first from now on, any further one when it is asked for.

    That process is a fork, as torch's data workers are: it imports nothing again. It writes nothing, and is killed at
    the end. Where it is lost, on systems other than Linux, and where torch has been built for a device, whose threads
    of autograd no fork has, ``items`` are made here.

    Args:
        items: they, and the exceptions that making them raises, can be pickled.
        all_at_once: go on with the next one at once.
    """
    if sys.platform != "linux" or torch.backends.cuda.is_built() or torch.accelerator.is_available():
        yield items
        return
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(items, theirs, all_at_once), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _received(ours, items, all_at_once)
    finally:
        process.kill()
        process.join()
        ours.close()


def _send(items: Iterator[T], parent: Connection, all_at_once: bool) -> None:
    serve_parent_only()
    torch.set_num_threads(1)  # a fork has none of the threads that OpenMP counts on
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDOUT)
    os.dup2(nowhere, STDERR)
    try:
        for item in items:
            parent.send(([item], None))
            if not all_at_once:
                parent.recv()
        parent.send(([], None))
    except Exception as error:
        parent.send(([], error))


def _received(child: Connection, items: Iterator[T], all_at_once: bool) -> Iterator[T]:
    for number in count():
        try:
            if number and not all_at_once:
                child.send(NEXT)
            found, error = child.recv()
        except (EOFError, OSError):
            yield from islice(items, number, None)
            return
        if error is not None:
            raise error
        if not found:
            return
        yield from found
