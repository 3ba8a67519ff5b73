"""How a recipe ends: the user's mistakes in one line and exit code 2, everything else as it is.

Exit codes: 0 done, 2 the user's input, 1 anything unforeseen (with its traceback).
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from memsave_recipes.errors import InputError

USER_INPUT = 2
GRACE_S = 2.0


def run_recipe(main: Callable[[], Any]) -> None:
    """Call ``main()``; an ``InputError`` becomes ``error: ...`` on stderr, once for all ranks, and exit code 2."""
    try:
        main()
    except InputError as error:
        _exit_with(error)


def _exit_with(error: InputError) -> NoReturn:
    # Rank 0 speaks for what all ranks find; a mistake that only another rank can find, such as a broken image in its
    # share, is told by that rank. The launcher ends all ranks when one exits, so the silent ones let rank 0 finish.
    if os.environ.get("RANK", "0") == "0" or error.found_by_one_rank:
        print(f"error: {error.one_line}", file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE_S)
    sys.exit(USER_INPUT)
