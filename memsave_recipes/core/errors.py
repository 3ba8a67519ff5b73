"""The exception for a user's mistake: one line on the terminal and exit code 2.

The message names the input, the rule it broke and what to change, for example
``--global_batch_size 4 is smaller than the 8 ranks: raise it to at least 8 or launch fewer processes``.
Any other exception is a defect of this package and keeps its traceback. A function that users' scripts call as well
names the parameter: ``strategy segments:99: K in ...``; recipes and commands print the flag in its place.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from memsave_recipes.core.text import printable

PARAMETERS: dict[str, str] = {}
"""The parameters that messages name, and their flags: where there are flags, ``training/arguments.py`` says them."""


class InputError(ValueError):
    """A request that cannot be carried out; the message says what to change."""

    @property
    def one_line(self) -> str:
        """The message in one ``printable`` line, with flags for arguments, without the traceback of a data worker."""
        message = str(self)
        if self.found_by_one_rank:
            message = message.rpartition(f"{type(self).__module__}.{type(self).__name__}: ")[2]
        line = " ".join(message.strip().splitlines())
        return printable(with_flags(line))

    @property
    def found_by_one_rank(self) -> bool:
        """Whether it comes from a data worker of one rank, so that the other ranks know nothing of it."""
        return str(self).startswith("Caught ")


def with_flags(line: str) -> str:
    """Put flags for parameters: for any at the beginning of a line, and for those with a ``_`` in their names.

    A line that begins with a flag knows the flags already.
    """
    if line.startswith("--") or not PARAMETERS:
        return line
    names = [name for name in PARAMETERS if "_" in name]
    pattern = rf"\A(?:{'|'.join(PARAMETERS)})(?=[ :,])|(?<![-\w])(?:{'|'.join(names)})(?!\w)"
    return re.sub(pattern, lambda found: PARAMETERS[found[0]], line)


def require(holds: bool, flag: str, value: Any, rule: str) -> None:
    """Raise ``InputError`` for a flag's value unless its rule ``holds``."""
    if not holds:
        raise InputError(f"{flag} {value}: must be {rule}")


def check_words(words: Sequence[str]) -> None:
    """Raise ``InputError`` for an empty word of a command line, such as an unset variable, and for one not in UTF-8."""
    for before, word in zip(["", *words], words, strict=False):
        flag, is_joined, value = word.partition("=") if word.startswith("--") else (before, True, word)
        if is_joined and value.strip() in ("", "--"):  # argparse drops the latter, and gives the flag no value at all
            named = flag if flag.startswith("--") else "a word"
            raise InputError(f"{named} has an empty value: give one, or leave it out")
        if not is_text(word):
            raise InputError(f"{word!r} is not UTF-8 text: rename it, or leave it out")


def check_file(flag: str, path: str | Path) -> None:
    """Raise ``InputError`` for a path that is not a regular file: reading a pipe or a device may never end."""
    if not os.path.isfile(path):  # unlike pathlib, without an error for a text that cannot be a path
        raise InputError(f"{flag} {path} is not a file: check the path")


@contextmanager
def packages_of(extra: str, needed_by: str) -> Iterator[None]:
    """Import packages of an extra inside.

    A recipe imports its modules where nothing catches an error: from a missing package on, an ``InputError`` that
    nobody catches is one line, too, and exit code 2.

    Args:
        extra: such as ``vision``.
        needed_by: the subject of the message: ``images``.

    Raises:
        InputError: one is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        sys.excepthook = _end_in_one_line
        package, hint = str(error.name).partition(".")[0], f"pip install 'memsave-recipes[{extra}]'"
        raise InputError(f"{needed_by} need {package}, which is not installed: {hint}") from error


def _end_in_one_line(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not isinstance(error, InputError):
        sys.__excepthook__(kind, error, traceback)
        return
    print(f"error: {error.one_line}", file=sys.stderr)
    sys.exit(2)


def is_text(word: str) -> bool:
    """Return whether it is UTF-8; a file name or a word of a command line may be other bytes."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
