"""Exit codes and last messages of a recipe: ``docs/failures.md``. Expected failures end in one line or on one page."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from memsave_recipes.core.costs.memory import is_out_of_memory, read_device_use
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.task import Launch, Task
from memsave_recipes.core.processes import silence_c10
from memsave_recipes.core.text import first_line
from memsave_recipes.run.verification import VerificationFailed
from memsave_recipes.tools.fit.advice import advice
from memsave_recipes.training.checkpoints import StoppedBySignal
from memsave_recipes.training.launch.processes import (
    LOST,
    REPORT_DELAY_S,
    LostWorker,
    exit_code_of_another_rank,
    lost_worker,
    publish_exit_code,
)
from memsave_recipes.training.optimizers import NotFinite

USER_INPUT = 2
OUT_OF_MEMORY = 3
NOT_FINITE = 4
FAILED_VERIFICATION = 5
GO_ON_FROM_LAST = "the last checkpoint is as it was, go on with --resume"
PEER_IS_GONE = ("closed by peer", "reset by peer", "remote process exited")
"""In the errors of gloo's and NCCL's collectives."""


class RunIsDone(Exception):
    """The run that is to go on is done, under the same flags; all ranks know it."""


def run_recipe(main: Callable[[], Any], task: Callable[[], Task] | None = None) -> None:
    """Call ``main()`` and turn its exception into a message on stderr and an exit code.

    Rank 0 tells what all ranks know: a user's mistake, a failed ``--verify``, numbers that are not finite, a stop by a
    signal. One rank tells what it alone has found: a lost data worker or rank, or no memory left.
    """
    try:
        main()
    except RunIsDone as done:
        if _is_rank_0():
            print(done, flush=True)
    except InputError as error:
        _say_and_exit(f"error: {error.one_line}", USER_INPUT, on_all_ranks=not error.found_by_one_rank)
    except NotFinite as error:
        _say_and_exit(f"error: {error}", NOT_FINITE, on_all_ranks=True)
    except VerificationFailed as error:
        _say_and_exit(str(error), FAILED_VERIFICATION, on_all_ranks=True)
    except StoppedBySignal as stop:
        _say_and_exit(stop.message, stop.exit_code, on_all_ranks=True)
    except (RuntimeError, MemoryError, OSError) as error:
        if worker := lost_worker(error):
            _end_without_worker(worker)
        if is_out_of_memory(error):
            _end_without_memory(error, task)
        code = exit_code_of_another_rank()
        if code is None and _is_of_a_lost_rank(error):
            _say_and_exit(f"error: another rank is gone ({first_line(error)}); {GO_ON_FROM_LAST}", LOST)
        if code is None:
            raise
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends one now, and the code would be that of it
        sys.exit(code)  # that rank has spoken


def describe_early_end(error: BaseException) -> tuple[str, str]:
    """Return the title and the text of an alert on the error that has ended a run."""
    without_memory = is_out_of_memory(error)
    if isinstance(error, RuntimeError) and not without_memory:  # it may be a lost rank
        without_memory = exit_code_of_another_rank() == OUT_OF_MEMORY
    text = error.message if isinstance(error, StoppedBySignal) else first_line(error)
    return "out of memory" if without_memory else "the run has ended early", text


def _is_of_a_lost_rank(error: Exception) -> bool:
    """Tell a lost rank from a lost connection of something else, such as a tracker's, which is an ``OSError``."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in PEER_IS_GONE)


def _end_without_worker(worker: LostWorker) -> NoReturn:
    code = OUT_OF_MEMORY if worker.had_no_memory else LOST
    publish_exit_code(code)
    _say_and_exit(f"error: {worker.words}; {GO_ON_FROM_LAST}", code)


def _end_without_memory(error: Exception, task: Callable[[], Task] | None) -> NoReturn:
    what_happened = str(error) or "no memory is left on the host"
    publish_exit_code(OUT_OF_MEMORY)
    if not _is_rank_0():
        time.sleep(REPORT_DELAY_S)  # it speaks only if rank 0, and with it the launcher, has not ended by then
    if task is not None:
        print(what_happened, file=sys.stderr, flush=True)  # at once: the planner takes a moment
        _say_and_exit(_advice(task), OUT_OF_MEMORY)
    _say_and_exit(what_happened, OUT_OF_MEMORY)


def _advice(task: Callable[[], Task]) -> str:
    try:
        return planned_advice(task)
    except Exception as error:  # the page has been printed, and the exit code matters more than advice
        return f"memsave plan could not say what would fit: {' '.join(str(error).split())}"


def planned_advice(task: Callable[[], Task]) -> str:
    """Return a line with the flags of the fastest configuration that is predicted to fit, and in less than the failed.

    Args:
        task: the recipe's, under the flags of the run that failed.

    Raises:
        InputError: the recipe cannot be estimated with these flags.
    """
    launch = Launch.here(int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    memory_bytes = launch.target.memory_bytes - read_device_use(device).others_bytes
    return advice(task(), launch, memory_bytes, less_than_now=True)


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say_and_exit(message: str, code: int, *, on_all_ranks: bool = False) -> NoReturn:
    """Exit with a message; what is so on all ranks rank 0 says alone, before the launcher ends it with the others."""
    silence_c10()
    if on_all_ranks and not _is_rank_0():
        time.sleep(REPORT_DELAY_S)
        sys.exit(code)
    print(message, file=sys.stderr, flush=True)
    sys.exit(code)
