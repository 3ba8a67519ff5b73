"""``run.log``: the lines that a run has written to the terminal.

NOTE [ the log of a run ]

1. The main process writes it, from its own stdout and stderr. Only their ``write`` is replaced while a run lasts: the
   streams stay, with their encoding, their descriptor, and their answer whether they are a terminal. Lines that C++
   writes past them, and lines of other processes, are on the terminal alone.
2. Before the run has its folder, lines are kept in memory. A run that is refused until then leaves no file behind.
3. Each line is handed to the system when it ends, in one call, so that a kill costs none. A run that goes on appends.
4. Progress bars, colours and blanks at the end of a line are left out.
5. An error of the log never ends the run: where a line cannot be written, the log ends.
"""

import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, TextIO

LOG = "run.log"
CONTROLS = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))")
"""ANSI's sequences for colours and the cursor, and those for titles and links (ECMA-48, xterm)."""
_recording: "RunLog | None" = None


class RunLog:
    """Takes in the text of both streams by the line; ``write_to`` gives it a file."""

    def __init__(self) -> None:
        self._lines: list[bytes] | None = []  # until there is a file
        self._file: BinaryIO | None = None
        self._process = os.getpid()

    def write_to(self, path: Path) -> None:
        """Append the lines so far, and from now on each line, to the file."""
        lines, self._lines = self._lines or [], None
        with suppress(OSError):
            self._file = path.open("ab", buffering=0)
        began = datetime.now(UTC).isoformat(" ", "seconds")
        self.add(f"# {began} {shlex.join(sys.argv)}")
        for line in lines:
            self._write(line)

    def add(self, line: str) -> None:
        """Take in a line."""
        if os.getpid() != self._process:  # a fork, such as a data worker
            return
        written = f"{line.rstrip()}\n".encode(errors="backslashreplace")
        if self._lines is not None:
            self._lines.append(written)
        else:
            self._write(written)

    def close(self) -> None:
        """Lines from now on are not kept."""
        self._lines = None
        if self._file is not None:
            self._file.close()
        self._file = None

    def _write(self, line: bytes) -> None:
        try:
            if self._file is not None:
                self._file.write(line)
        except OSError:
            self.close()


class _Lines:
    """Cuts the text of a stream into lines for ``add``, without progress bars and colours."""

    def __init__(self, add: Callable[[str], None]) -> None:
        self._add = add
        self._begun = ""
        self._is_drawn = False

    def take(self, text: str) -> None:
        """The next text of the stream, as it was written in one call."""
        text = CONTROLS.sub("", text)
        if text.startswith("\r") and "\n" not in text:
            self._is_drawn = True
            return
        if text == "\n" and self._is_drawn and not self._begun:  # the end of a bar, or the way to the one below
            return
        *ended, self._begun = (self._begun + text).split("\n")
        for line in ended:
            self._is_drawn = False
            self._add(line.rstrip("\r").rpartition("\r")[2])


def write_log(folder: Path) -> None:
    """Have the lines of the run that is recorded, if one is, written to ``run.log`` in its folder from now on."""
    if _recording is not None:
        _recording.write_to(folder / LOG)


@contextmanager
def recorded() -> Iterator[None]:
    """Inside, the main process keeps the lines that it writes to the terminal, for ``write_log``.

    Where that is so already, it goes on. An error that leaves the block, and will be printed as a traceback, is added.
    """
    global _recording
    if _recording is not None or os.environ.get("RANK", "0") != "0":
        yield
        return
    log = _recording = RunLog()
    streams = dict.fromkeys((sys.stdout, sys.stderr))  # once where both are the same
    restore = [_copy_lines(stream, log.add) for stream in streams if stream is not None]
    try:
        yield
    except Exception:
        for line in traceback.format_exc().splitlines():
            log.add(line)
        raise
    finally:
        _recording = None
        log.close()
        for undo in restore:
            undo()


def _copy_lines(stream: TextIO, add: Callable[[str], None]) -> Callable[[], None]:
    """Let ``add`` have each line that is written to the stream; returns a function that ends this."""
    write, lines = stream.write, _Lines(add)

    def write_and_take(text: str) -> int:
        written = write(text)
        lines.take(text)
        return written

    def undo() -> None:
        if stream.write is write_and_take:  # else another one, such as wandb's, stands around it
            stream.write = write  # type: ignore[method-assign]

    stream.write = write_and_take  # type: ignore[method-assign]
    return undo
