"""The one exception for a user's mistake: it becomes one line on the terminal and exit code 2.

The message names the input, the rule it broke and the way out, for example
``--global_batch_size 4 is smaller than the 8 ranks: raise it to at least 8 or launch fewer processes``.
Anything else that is raised is a defect of ours and keeps its traceback.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from memsave_recipes.text import printable


class InputError(ValueError):
    """What the user asked for cannot be done; the message says what to change."""

    @property
    def one_line(self) -> str:
        """The message in one line, also of a data worker's error, which torch raises again with a traceback as text.

        It can quote what others wrote, so it is ``printable``.
        """
        message = str(self)
        if self.found_by_one_rank:
            message = message.rpartition(f"{type(self).__module__}.{type(self).__name__}: ")[2]
        return printable(" ".join(message.strip().splitlines()))

    @property
    def found_by_one_rank(self) -> bool:
        """Whether it comes from the data that one rank was reading, not from what all ranks were told."""
        return str(self).startswith("Caught ")


def check_words(words: Sequence[str]) -> None:
    """Refuse words of a command line that stand for nothing, or are no text.

    A variable of the shell that is not set must not become this directory, or the built-in data. What is no UTF-8 can
    neither be printed nor written down.

    Raises:
        InputError: such a word.
    """
    for before, word in zip(["", *words], words, strict=False):
        flag, is_joined, value = word.partition("=") if word.startswith("--") else (before, True, word)
        if is_joined and value.strip() in ("", "--"):  # argparse drops the latter, and gives the flag no value at all
            named = flag if flag.startswith("--") else "a word"
            raise InputError(f"{named} has an empty value: give one, or leave it out")
        if not is_text(word):
            raise InputError(f"{word!r} is not UTF-8 text: rename it, or leave it out")


def check_file(flag: str, path: str | Path) -> None:
    """Refuse what ``flag`` names unless it is a file, which ends: a pipe or a device may not.

    Raises:
        InputError: it is something else, or nothing.
    """
    if not os.path.isfile(path):  # unlike pathlib, without an error for what can be no path
        raise InputError(f"{flag} {path} is not a file: check the path")


def is_text(word: str) -> bool:
    """Whether it is UTF-8; the name of a file, or a word of a command line, may be other bytes."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
