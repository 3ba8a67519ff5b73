"""Data workers leave signals to their parent, and never outlive it.

A signal to the process group, which is how torchrun passes one on, or a scheduler's to every process of a job, would
end the workers first, and with them the step that the parent wants to finish. A parent that is killed takes no leave of
its workers: torch lets each look for itself every five seconds, and some live on. At its own end Python asks those that
are left by SIGTERM, which they do not hear, and would wait for them forever.
"""

import atexit
import multiprocessing
import os
import re
import signal
from dataclasses import dataclass
from functools import cache

from accelerate import Accelerator

from memsave_recipes.processes.parent import signal_at_end_of_parent

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What asks a run to stop: a keyboard, a launcher or scheduler, and SLURM some time before its limit."""
MOST_BY_DEFAULT = 4

KILLED = re.compile(r"DataLoader worker \(pid (?P<pid>\d+)\) is killed by signal: (?P<signal>[^.]+)")
EXITED = re.compile(r"DataLoader worker \(pid(\(s\))? (?P<pid>[\d, ]+)\) exited unexpectedly")
"""What torch says of a worker; the former may be the cause of the latter."""


@dataclass(frozen=True)
class LostWorker:
    """A data worker that has died, by ``words`` for the user; most likely because the host ``had_no_memory``."""

    words: str
    had_no_memory: bool


def lost_worker(error: Exception) -> LostWorker | None:
    """The one that an error of torch tells of; ``None`` where it tells of something else."""
    death = KILLED.search(f"{error} {error.__cause__}") or EXITED.search(str(error))
    if death is None:
        return None
    worker, by = f"data worker {death['pid']}", death.groupdict().get("signal")
    if by == signal.strsignal(signal.SIGKILL):
        why = "was killed by signal 9, most likely because the host had no memory left: give fewer"
        return LostWorker(f"{worker} {why} --dataloader_num_workers", had_no_memory=True)
    if by == signal.strsignal(signal.SIGBUS):
        why = "was killed by signal 7, most likely because shared memory (/dev/shm) is full: enlarge it, or give fewer"
        return LostWorker(f"{worker} {why} --dataloader_num_workers", had_no_memory=True)
    why = f"was killed ({by})" if by else "ended unexpectedly"
    return LostWorker(f"{worker} {why}: --dataloader_num_workers 0 loads in this process and shows why", False)


def num_workers(asked: int | None, accelerator: Accelerator) -> int:
    """As many as ``asked``; else none on a CPU, whose cores compute, and beside an accelerator what is said.

    There the main process has one of a rank's cores, to stay ahead of the device; more than ``MOST_BY_DEFAULT`` workers
    are rarely of use. No sample depends on them.
    """
    if asked is not None or accelerator.device.type == "cpu":
        return asked or 0
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chosen = max(0, min(MOST_BY_DEFAULT, cores // ranks_here - 1))
    accelerator.print(f"{chosen} processes load data for each rank: --dataloader_num_workers takes another number")
    return chosen


def serve_parent_only(worker_id: int) -> None:
    """The ``worker_init_fn`` of a ``DataLoader``."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)  # a fork has the parent's
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        signal_at_end_of_parent(signal.SIGKILL, parent.pid)


@cache
def end_workers_at_exit() -> None:
    """Of this process; call it before there are any."""
    atexit.register(_kill_workers)


def _kill_workers() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would call their end an error
    for process in multiprocessing.active_children():
        if process.daemon:  # those that multiprocessing would ask to end
            process.kill()
