"""How a recipe ends: the user's mistakes in one line and exit code 2, no memory left on one page and exit code 3.

Exit codes: 0 done, 2 the user's input, 3 out of memory, 5 ``--verify`` found no proof, 1 anything unforeseen (with its
traceback).
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from memsave_recipes.errors import InputError
from memsave_recipes.reporting.out_of_memory import is_out_of_memory
from memsave_recipes.reporting.verification import VerificationFailed

USER_INPUT = 2
OUT_OF_MEMORY = 3
FAILED_VERIFICATION = 5
GRACE_S = 2.0


def run_recipe(main: Callable[[], Any]) -> None:
    """Call ``main()``; an ``InputError`` becomes ``error: ...`` on stderr, once for all ranks, and exit code 2.

    An out-of-memory error's message is printed by the rank that had it: the page that ``RunReport.run`` makes, or, for
    an error outside the training steps, torch's own words. Exit code 3.

    A failed ``--verify`` is known to all ranks and told once. Exit code 5.
    """
    try:
        main()
    except InputError as error:
        if not error.found_by_one_rank:
            _let_rank_0_speak(USER_INPUT)
        _say_and_exit(f"error: {error.one_line}", USER_INPUT)
    except VerificationFailed as error:
        _let_rank_0_speak(FAILED_VERIFICATION)
        _say_and_exit(str(error), FAILED_VERIFICATION)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if not _is_rank_0():
            time.sleep(GRACE_S)  # it speaks only if rank 0, and with it the launcher, has not ended by then
        _say_and_exit(str(error), OUT_OF_MEMORY)


def _is_rank_0() -> bool:
    # Rank 0 speaks for what all ranks find; what only another rank can find, such as a broken image in its share, is
    # told by that rank. The launcher ends all ranks when one exits, so the silent ones let rank 0 finish.
    return os.environ.get("RANK", "0") == "0"


def _let_rank_0_speak(code: int) -> None:
    if not _is_rank_0():
        time.sleep(GRACE_S)
        sys.exit(code)


def _say_and_exit(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    sys.exit(code)
