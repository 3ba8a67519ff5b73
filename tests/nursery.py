"""Real runs in a fraction of a second: forked from a process that has imported everything and computed nothing.

A process that has computed with torch must not be forked, its children can hang. So the process that forks, here the
*nursery*, is itself forked after the tests have been collected and before the first of them runs.

A trial is any function, in a process of its own, which may launch others and kill them. Ranks are processes of one
gloo world. A program ends as programs do, with an exit code.
"""

import gc
import importlib
import multiprocessing
import os
import pickle
import signal
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
from PIL import Image
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from memsave_recipes.training.launch.start import Accelerator

FORK = multiprocessing.get_context("fork")
TRIAL_TIMEOUT_S, RANKS_TIMEOUT_S, PROGRAM_TIMEOUT_S = 120, 60, 60
# What the first optimizer, DDP and loader of a process import: seconds for every rank, or once before the fork.
PRELOADED = ("torch._dynamo", "sympy", "datasets", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
PRELOADED += ("sklearn.datasets", "evaluate")  # the digits and metrics
END = b""
FIXTURES = {"run_trial", "run_on_ranks", "run_program"}

RankFunction = Callable[[Accelerator], Any]
Outcome = tuple[bool, Any]
"""Whether it succeeded, and its result or what went wrong."""


def preload() -> None:
    """What every first step and save of a process would import and compile anew."""
    for module in PRELOADED:
        importlib.import_module(module)
    get_checkpoint_conversion_mapping("gpt2")  # hundreds of patterns, whichever the model
    Image.init()


class Nursery:
    """Runs functions in processes of their own; ends when the tests do."""

    def __init__(self) -> None:
        preload()
        gc.freeze()  # or every child would copy what its collector looks through
        self._connection, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_serve, args=(theirs, self._connection))
        self._process.start()
        theirs.close()

    def run(self, trial: Callable[..., Any], *args: Any, timeout_s: float = TRIAL_TIMEOUT_S) -> Any:
        """What ``trial(*args)`` returns; it must be one that pickle finds by its name.

        Raises:
            RuntimeError: it failed, or had no result in time.
        """
        return self._ask(_run_trial, trial, args, timeout_s)

    def run_on_ranks(self, function: RankFunction, num_ranks: int, timeout_s: float = RANKS_TIMEOUT_S) -> list[Any]:
        """What ``function(accelerator)`` returns on each rank; it must be one that pickle finds by its name.

        Raises:
            RuntimeError: a rank failed, or had no result in time; all of them have been ended.
        """
        return self._ask(_run_ranks, function, num_ranks, timeout_s)

    def run_program(self, program: Callable[..., None], *args: Any, timeout_s: float = PROGRAM_TIMEOUT_S) -> int | None:
        """The exit code of ``program(*args)``, in a session of its own that ends with it; ``None`` if it had to be."""
        return self._ask(_run_program, program, args, timeout_s)

    def close(self) -> None:
        """By a word: data workers that a test has left behind hold this end of the pipe open as well."""
        self._connection.send_bytes(END)
        self._process.join()

    def _ask(self, *request: Any) -> Any:
        self._connection.send_bytes(pickle.dumps(request))
        succeeded, result = pickle.loads(self._connection.recv_bytes())
        if not succeeded:
            raise RuntimeError(result)
        return result


NURSERY = pytest.StashKey[Nursery]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the nursery if a test needs it, while this process is still fit to be forked."""
    wanted = any(FIXTURES & set(getattr(item, "fixturenames", ())) for item in session.items)
    if wanted and not session.config.option.collectonly:
        nursery = session.config.stash[NURSERY] = Nursery()
        session.config.add_cleanup(nursery.close)


@pytest.fixture(scope="session")
def run_trial(pytestconfig: pytest.Config) -> Callable[..., Any]:
    """``run_trial(trial, *args, timeout_s=120)``: see ``Nursery.run``."""
    return pytestconfig.stash[NURSERY].run


@pytest.fixture(scope="session")
def run_on_ranks(pytestconfig: pytest.Config) -> Callable[..., list[Any]]:
    """``run_on_ranks(function, num_ranks, timeout_s=60)``: see ``Nursery.run_on_ranks``."""
    return pytestconfig.stash[NURSERY].run_on_ranks


@pytest.fixture(scope="session")
def run_program(pytestconfig: pytest.Config) -> Callable[..., int | None]:
    """``run_program(program, *args, timeout_s=60)``: see ``Nursery.run_program``."""
    return pytestconfig.stash[NURSERY].run_program


def _serve(requests: Connection, other_end: Connection) -> None:
    other_end.close()  # or the end of the tests would not be seen here
    torch.set_num_threads(1)
    os.environ |= {"ACCELERATE_USE_CPU": "true", "KINETO_LOG_LEVEL": "99"}  # the profiler announces itself below that
    with suppress(EOFError):
        while (request := requests.recv_bytes()) != END:
            run, *args = pickle.loads(request)
            requests.send_bytes(pickle.dumps(run(*args)))


def _run_program(program: Callable[..., None], args: tuple[Any, ...], timeout_s: float) -> Outcome:
    process = FORK.Process(target=_be_program, args=(program, args))
    process.start()
    process.join(timeout_s)
    code = process.exitcode
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its data workers too
    process.join()
    return True, code


def _be_program(program: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.setsid()
    torch.set_num_threads(1)  # torch makes a forked process a new pool, which two threads must not begin at once
    program(*args)


def _run_trial(trial: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Outcome:
    process, results = _start(_be_trial, trial, args)
    outcome = _receive(results, time.monotonic() + timeout_s)
    process.kill()
    process.join()
    return outcome


def _run_ranks(function: RankFunction, num_ranks: int, timeout_s: float) -> Outcome:
    port, deadline = free_port(), time.monotonic() + timeout_s
    ranks = [_start(_be_rank, function, rank, num_ranks, port) for rank in range(num_ranks)]
    outcomes = [_receive(results, deadline) for _, results in ranks]
    for process, _ in ranks:
        process.kill()  # it has answered, failed, or hangs
        process.join()
    failures = [f"rank {rank}: {outcome}" for rank, (succeeded, outcome) in enumerate(outcomes) if not succeeded]
    return (False, "\n".join(failures)) if failures else (True, [outcome for _, outcome in outcomes])


def _start(target: Callable[..., None], *args: Any) -> tuple[ForkProcess, Connection]:
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=target, args=(*args, theirs))
    process.start()
    theirs.close()  # so that the end of the process is the end of its pipe
    return process, ours


def _receive(results: Connection, deadline: float) -> Outcome:
    if not results.poll(max(0.0, deadline - time.monotonic())):
        return False, "no result in time"
    try:
        return pickle.loads(results.recv_bytes())
    except EOFError:
        return False, "ended without a result"


def _be_trial(trial: Callable[..., Any], args: tuple[Any, ...], results: Connection) -> None:
    _answer(results, lambda: trial(*args))


def _be_rank(function: RankFunction, rank: int, num_ranks: int, port: int, results: Connection) -> None:
    if num_ranks > 1:
        world = {"WORLD_SIZE": num_ranks, "RANK": rank, "LOCAL_WORLD_SIZE": num_ranks, "LOCAL_RANK": rank}
        os.environ |= {name: str(value) for name, value in world.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if _answer(results, lambda: function(Accelerator())):
        time.sleep(600)  # until it is ended: a rank that left early could break the last collective of the others


def _answer(results: Connection, action: Callable[[], Any]) -> bool:
    """Send what ``action`` returns, or its traceback; whether it succeeded."""
    torch.set_num_threads(1)  # as of a program
    try:
        outcome = True, action()
    except Exception:
        outcome = False, traceback.format_exc()
    # Plain bytes: torch's own way through a pipe leaves the tensors in memory that ends with this process.
    results.send_bytes(pickle.dumps(outcome))
    return outcome[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
