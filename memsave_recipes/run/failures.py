"""Exit codes and last messages of a recipe: expected failures end in one line, or on one page, with their own code.

The codes are those of ``docs/failures.md``; an unexpected error keeps its traceback and ends with 1. Out of memory ends
with 3 and the page of ``out_of_memory.py``.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from memsave_recipes.checkpoints import StoppedBySignal
from memsave_recipes.errors import InputError
from memsave_recipes.planner.task import Task
from memsave_recipes.processes import (
    LOST,
    REPORT_DELAY_S,
    LostWorker,
    exit_code_of_another_rank,
    lost_worker,
    publish_exit_code,
)
from memsave_recipes.profiling.memory import is_out_of_memory
from memsave_recipes.run.log import recorded
from memsave_recipes.run.out_of_memory import planned_advice
from memsave_recipes.text import first_line, say
from memsave_recipes.training.optimizers import NotFinite
from memsave_recipes.training.parsing import wants_traceback

USER_INPUT = 2
OUT_OF_MEMORY = 3
NOT_FINITE = 4
FAILED_VERIFICATION = 5
GO_ON_FROM_LAST = "the last checkpoint is as it was, go on with --resume"
PEER_IS_GONE = ("closed by peer", "reset by peer", "remote process exited")
"""In the errors of gloo's and NCCL's collectives."""


class VerificationFailed(Exception):
    """``--verify`` found that the plan changes the step, or no proof; all ranks know it."""


@recorded()
def run_recipe(main: Callable[[], Any], task: Callable[[], Task] | None = None) -> None:
    """Call ``main()`` and turn its exception into a message on stderr and an exit code. ``--debug`` adds the traceback.

    What all ranks know is told once: a user's mistake, a failed ``--verify``, numbers that are not finite, a stop by a
    signal. What one rank finds is told by that rank: a data worker that died, another rank that is gone, or no memory
    left, on the page that ``RunReport.run`` makes or, for an error outside the training steps, in torch's own words.
    """
    try:
        main()
    except InputError as error:
        if not error.found_by_one_rank:
            _exit_unless_main(USER_INPUT)
        _say_and_exit(f"error: {error.one_line}", USER_INPUT)
    except NotFinite as error:
        _exit_unless_main(NOT_FINITE)
        _say_and_exit(f"error: {error}", NOT_FINITE)
    except VerificationFailed as error:
        _exit_unless_main(FAILED_VERIFICATION)
        _say_and_exit(str(error), FAILED_VERIFICATION)
    except StoppedBySignal as stop:
        _exit_unless_main(stop.exit_code)
        _say_and_exit(stop.message, stop.exit_code)
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


def _is_of_a_lost_rank(error: Exception) -> bool:
    """Connections of other things, such as a tracker's, end in an ``OSError``."""
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
        say(what_happened, file=sys.stderr)  # at once: the planner takes a moment
        _say_and_exit(_advice(task), OUT_OF_MEMORY)
    _say_and_exit(what_happened, OUT_OF_MEMORY)


def _advice(task: Callable[[], Task]) -> str:
    try:
        return planned_advice(task)
    except Exception as error:  # the page has been printed, and the exit code matters more than advice
        return f"memsave plan could not say what would fit: {' '.join(str(error).split())}"


def _is_rank_0() -> bool:
    # Rank 0 reports the errors that all ranks find; those of one rank alone, such as a broken image in its share, are
    # told by that rank. The launcher ends all ranks when one exits, so the silent ones let rank 0 finish.
    return os.environ.get("RANK", "0") == "0"


def _exit_unless_main(code: int) -> None:
    if not _is_rank_0():
        time.sleep(REPORT_DELAY_S)
        sys.exit(code)


def _say_and_exit(message: str, code: int) -> NoReturn:
    if wants_traceback(sys.argv[1:]):
        say(traceback.format_exc(), file=sys.stderr)
    say(message, file=sys.stderr)
    sys.exit(code)
