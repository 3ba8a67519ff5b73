"""The end of a process that cannot come to one by itself."""

import os
import sys
from typing import NoReturn

LOST = 6
"""The exit code where a rank or a data worker is lost, or a step has no end."""
WAY_ON = "in the middle of a step; the last checkpoint is as it was, go on with --resume"


def end_now(message: str, code: int) -> NoReturn:
    """End from any thread, in the middle of whatever the others do: no handler runs, and no file is flushed."""
    os.write(sys.stderr.fileno(), f"\n{message}\n".encode())  # a progress bar may be in the line
    os._exit(code)
