"""``run.log``: what a run has said on the terminal, kept by the standard library's logging.

NOTE [ the log of a run ]

1. The main process writes it: what it says by ``text.say``, ``accelerator.print`` and tables, what others log and warn
   of, and the traceback of an error that nobody expected. Progress bars, and lines that other code prints, are on the
   terminal alone.
2. Before the run has its folder, lines are kept in memory. A run that is refused until then leaves no file behind.
3. Each line is handed to the system as it is said, so that a kill costs none. A run that goes on appends.
4. An error of the log never ends the run: a line that the disk does not take is not in it.
"""

import logging
import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import MemoryHandler
from pathlib import Path

from memsave_recipes.text import SAID

LOG = "run.log"
_kept: MemoryHandler | None = None


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing: rule 4."""


def write_log(folder: Path) -> None:
    """Have the lines of the run that is recorded, if one is, written to ``run.log`` in its folder from now on."""
    if _kept is None:
        return
    with suppress(OSError):
        file = _LogFile(folder / LOG, encoding="utf-8", errors="backslashreplace")
        began = datetime.now(UTC).isoformat(" ", "seconds")
        file.handle(logging.makeLogRecord({"msg": f"# {began} {shlex.join(sys.argv)}"}))
        _kept.setTarget(file)
        _kept.flush()


@contextmanager
def recorded() -> Iterator[None]:
    """Inside, the main process keeps what it says, for ``write_log``. Where that is so already, it goes on."""
    global _kept
    if _kept is not None or os.environ.get("RANK", "0") != "0":
        yield
        return
    _kept, root = MemoryHandler(capacity=1, flushOnClose=False), logging.getLogger()  # it waits for a file alone
    handlers: list[tuple[logging.Logger, logging.Handler]] = [(SAID, _kept), (root, _kept)]
    if not root.handlers and logging.lastResort is not None:
        handlers.append((root, logging.lastResort))  # which shows warnings where there is no handler
    logging.captureWarnings(True)
    for logger, handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    except Exception:
        SAID.info(traceback.format_exc().rstrip())
        raise
    finally:
        logging.captureWarnings(False)
        for logger, handler in handlers:
            logger.removeHandler(handler)
        with suppress(OSError):
            if _kept.target is not None:
                _kept.target.close()
        _kept = None
