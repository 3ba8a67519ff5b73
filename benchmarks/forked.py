"""Functions in processes of their own, forked from one that has imported what they need and computed nothing.

Nothing of one is then in another's way: Accelerate keeps its state for a whole process, and so does torch's profiler.
A ``Runner`` is a training loop that makes a step when it is its turn; ``run_apart`` runs a function to its end.
"""

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import harness

PRELOADED = [
    *("torch", "accelerate", "datasets", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
    *("trl.trainer.sft_trainer", "lightning_fabric", "memsave_recipes.core.costs.breakdown"),
]
"""Modules that the first process imports; those that are not installed are left out."""

EndStep = Callable[..., None]
"""Ends a step: ``end_step(between)`` takes its time, calls ``between``, if it is given, and waits for the next turn."""


class Runner:
    """``loop(end_step)`` in a process of its own, which makes a step when it is told to.

    Raises:
        RuntimeError: the loop has failed; its traceback is in the message. All methods may raise it.
    """

    def __init__(self, loop: Callable[[EndStep], Any]) -> None:
        self._process, self._connection = _start(_take_turns, loop)
        _receive(self._connection)  # ready; what comes before is no step

    def step(self) -> float:
        """The seconds of one step."""
        self._connection.send(None)
        seconds: float = _receive(self._connection)
        return seconds

    def close(self) -> Any:
        """Let the loop come to its end; what it returns."""
        self._connection.send(None)
        result = _receive(self._connection)
        self._process.join()
        return result


def run_apart(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(*args)`` returns; pickle must find it by its name.

    Raises:
        RuntimeError: it has failed; its traceback is in the message.
    """
    process, connection = _start(_run, function, args)
    result = _receive(connection)
    process.join()
    return result


def _start(target: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, target, args), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is the end of its pipe
    return process, ours


def _receive(connection: Connection) -> Any:
    try:
        succeeded, value = connection.recv()
    except EOFError:
        raise RuntimeError("a process has ended without an answer") from None
    if not succeeded:
        raise RuntimeError(value)
    return value


def _answer(connection: Connection, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    try:
        target(connection, *args)
    except Exception:
        connection.send((False, traceback.format_exc()))


def _run(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    connection.send((True, function(*args)))


def _take_turns(connection: Connection, loop: Callable[[EndStep], Any]) -> None:
    began = 0.0

    def wait_for_turn(message: Any) -> None:
        nonlocal began
        connection.send((True, message))
        try:
            connection.recv()
        except EOFError:  # nobody wants another step
            sys.exit()
        began = time.perf_counter()

    def end_step(between: Callable[[], Any] = lambda: None) -> None:
        harness.wait_for_device()
        seconds = time.perf_counter() - began
        between()
        wait_for_turn(seconds)

    wait_for_turn("ready")
    connection.send((True, loop(end_step)))
