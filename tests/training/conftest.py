"""Real gloo ranks in a fraction of a second: forked from a process that has imported everything and computed nothing.

A process that has computed with torch must not be forked, its children can hang. So the process that forks the ranks,
here the *nursery*, is itself forked after the tests have been collected and before the first of them runs.
"""

import importlib
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from memsave_recipes.training.launch import start_accelerator

FORK = multiprocessing.get_context("fork")
TIMEOUT_S = 60
# What the first optimizer, DDP and loader of a process import: seconds for every rank, or once before the fork.
PRELOADED = ("torch._dynamo", "sympy", "datasets", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks")

RankFunction = Callable[[Accelerator], Any]


class Nursery:
    """Forks ranks on request; ends when the tests do."""

    def __init__(self) -> None:
        for module in PRELOADED:
            importlib.import_module(module)
        self._connection, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_serve, args=(theirs, self._connection))
        self._process.start()
        theirs.close()

    def run(self, function: RankFunction, num_ranks: int, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """What ``function(accelerator)`` returns on each rank; it must be one that pickle finds by its name.

        Raises:
            RuntimeError: a rank failed, or had no result in time; all of them have been ended.
        """
        self._connection.send_bytes(pickle.dumps((function, num_ranks, timeout_s)))
        succeeded, outcome = pickle.loads(self._connection.recv_bytes())
        if not succeeded:
            raise RuntimeError(outcome)
        return outcome

    def close(self) -> None:
        self._connection.close()
        self._process.join()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the nursery if a test needs it, while this process is still fit to be forked."""
    wanted = any("run_on_ranks" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not session.config.option.collectonly:
        nursery = session.config.stash[NURSERY] = Nursery()
        session.config.add_cleanup(nursery.close)


NURSERY = pytest.StashKey[Nursery]()


@pytest.fixture(scope="session")
def run_on_ranks(pytestconfig: pytest.Config) -> Callable[..., list[Any]]:
    """``run_on_ranks(function, num_ranks, timeout_s=60)``: see ``Nursery.run``."""
    return pytestconfig.stash[NURSERY].run


def _serve(requests: Connection, other_end: Connection) -> None:
    other_end.close()  # or the end of the tests would not be seen here
    torch.set_num_threads(1)
    with suppress(EOFError):
        while True:
            function, num_ranks, timeout_s = pickle.loads(requests.recv_bytes())
            requests.send_bytes(pickle.dumps(_run_ranks(function, num_ranks, timeout_s)))


def _run_ranks(function: RankFunction, num_ranks: int, timeout_s: float) -> tuple[bool, Any]:
    port, deadline = _free_port(), time.monotonic() + timeout_s
    ranks = [_start_rank(function, rank, num_ranks, port) for rank in range(num_ranks)]
    outcomes = [_receive(results, deadline) for _, results in ranks]
    for process, _ in ranks:
        process.kill()  # it has answered, failed, or hangs
        process.join()
    failures = [f"rank {rank}: {outcome}" for rank, (succeeded, outcome) in enumerate(outcomes) if not succeeded]
    return (False, "\n".join(failures)) if failures else (True, [outcome for _, outcome in outcomes])


def _start_rank(function: RankFunction, rank: int, num_ranks: int, port: int) -> tuple[ForkProcess, Connection]:
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_be_rank, args=(function, rank, num_ranks, port, theirs))
    process.start()
    theirs.close()  # so that the end of the rank is the end of its pipe
    return process, ours


def _receive(results: Connection, deadline: float) -> tuple[bool, Any]:
    if not results.poll(max(0.0, deadline - time.monotonic())):
        return False, "no result in time"
    try:
        return pickle.loads(results.recv_bytes())
    except EOFError:
        return False, "ended without a result"


def _be_rank(function: RankFunction, rank: int, num_ranks: int, port: int, results: Connection) -> None:
    os.environ |= {"ACCELERATE_USE_CPU": "true", "KINETO_LOG_LEVEL": "99"}  # the profiler announces itself below that
    if num_ranks > 1:
        world = {"WORLD_SIZE": num_ranks, "RANK": rank, "LOCAL_WORLD_SIZE": num_ranks, "LOCAL_RANK": rank}
        os.environ |= {name: str(value) for name, value in world.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        accelerator = start_accelerator()
        outcome = True, function(accelerator)
    except Exception:
        outcome = False, traceback.format_exc()
    # Plain bytes: torch's own way through a pipe leaves the tensors in memory that ends with this process.
    results.send_bytes(pickle.dumps(outcome))
    if outcome[0]:
        time.sleep(600)  # until it is ended: a rank that left early could break the last collective of the others


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
