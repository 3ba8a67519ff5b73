"""Real runs in a fraction of a second, to be killed: forked from a process that imported everything, computed nothing.

As in ``tests/training/conftest.py``, the process that forks (the nursery) is itself forked after the tests have been
collected and before the first of them runs. Here it runs whole trials: a trial launches ranks, kills them, launches
them again. What a trial does is in ``trials/``.
"""

import importlib
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for the tests to import ``trials``

FORK = multiprocessing.get_context("fork")
TIMEOUT_S = 120
# What the first optimizer, DDP and loader of a process import: seconds for every rank, or once before the fork.
PRELOADED = ("torch._dynamo", "sympy", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
TRIALS = ("trials.killing", "trials.damage", "trials.signalling", "trials.pickles", "trials.faults")


class Nursery:
    """Runs trials in processes of their own; ends when the tests do."""

    def __init__(self) -> None:
        for module in (*PRELOADED, *TRIALS):
            importlib.import_module(module)
        self._connection, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_serve, args=(theirs, self._connection))
        self._process.start()
        theirs.close()

    def run(self, trial: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> Any:
        """What ``trial(*args)`` returns; it must be one that pickle finds by its name.

        Raises:
            RuntimeError: it failed, or had no result in time.
        """
        self._connection.send_bytes(pickle.dumps((trial, args, timeout_s)))
        succeeded, outcome = pickle.loads(self._connection.recv_bytes())
        if not succeeded:
            raise RuntimeError(outcome)
        return outcome

    def close(self) -> None:
        self._connection.close()
        self._process.join()


NURSERY = pytest.StashKey[Nursery]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the nursery if a test needs it, while this process is still fit to be forked."""
    wanted = any("run_trial" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not session.config.option.collectonly:
        nursery = session.config.stash[NURSERY] = Nursery()
        session.config.add_cleanup(nursery.close)


@pytest.fixture(scope="session")
def run_trial(pytestconfig: pytest.Config) -> Callable[..., Any]:
    """``run_trial(trial, *args, timeout_s=120)``: see ``Nursery.run``."""
    return pytestconfig.stash[NURSERY].run


def _serve(requests: Connection, other_end: Connection) -> None:
    other_end.close()  # or the end of the tests would not be seen here
    torch.set_num_threads(1)
    with suppress(EOFError):
        while True:
            trial, args, timeout_s = pickle.loads(requests.recv_bytes())
            requests.send_bytes(pickle.dumps(_run(trial, args, timeout_s)))


def _run(trial: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> tuple[bool, Any]:
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_be_trial, args=(trial, args, theirs))
    process.start()
    theirs.close()
    try:
        return pickle.loads(ours.recv_bytes()) if ours.poll(timeout_s) else (False, "no result in time")
    except EOFError:
        return False, "ended without a result"
    finally:
        process.kill()
        process.join()


def _be_trial(trial: Callable[..., Any], args: tuple[Any, ...], results: Connection) -> None:
    os.environ |= {"ACCELERATE_USE_CPU": "true", "KINETO_LOG_LEVEL": "99"}
    try:
        outcome = True, trial(*args)
    except Exception:
        outcome = False, traceback.format_exc()
    results.send_bytes(pickle.dumps(outcome))
