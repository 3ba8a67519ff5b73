"""The exception for a user's mistake: one line on the terminal and exit code 2.

The message names the input, the rule it broke and the way out, for example
``--global_batch_size 4 is smaller than the 8 ranks: raise it to at least 8 or launch fewer processes``.
Any other exception is a defect of this package and keeps its traceback.

Messages speak of the recipes' flags. The functions that a script of one's own calls raise the same errors and speak of
their parameters instead (``naming_parameters``).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from memsave_recipes.text import printable


class InputError(ValueError):
    """A request that cannot be carried out; the message says what to change."""

    @property
    def one_line(self) -> str:
        """The message in one ``printable`` line, as it can quote foreign text.

        Torch raises the error of a data worker again with its traceback as text; that is cut off.
        """
        message = str(self)
        if self.found_by_one_rank:
            message = message.rpartition(f"{type(self).__module__}.{type(self).__name__}: ")[2]
        return printable(" ".join(message.strip().splitlines()))

    @property
    def found_by_one_rank(self) -> bool:
        """Whether it comes from the data that one rank was reading; the other ranks then know nothing of it."""
        return str(self).startswith("Caught ")


@contextmanager
def naming_parameters(parameters: Mapping[str, str]) -> Iterator[None]:
    """Inside, or in a function that this decorates, messages name parameters where they would name flags.

    Args:
        parameters: by flag, as ``{"--memory_budget_gib": "budget_gib"}``.
    """
    try:
        yield
    except InputError as error:
        message = str(error)
        for flag, parameter in parameters.items():
            message = message.replace(flag, parameter)
        raise InputError(message) from error


def check_words(words: Sequence[str]) -> None:
    """Refuse empty words of a command line, and words that are not UTF-8.

    An unset shell variable must not become this directory, or the built-in data. What is not UTF-8 can neither be
    printed nor written down.

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
    """Refuse a path that is not a regular file: reading a pipe or a device may never end.

    Raises:
        InputError: it is something else, or does not exist.
    """
    if not os.path.isfile(path):  # unlike pathlib, without an error for a text that cannot be a path
        raise InputError(f"{flag} {path} is not a file: check the path")


def is_text(word: str) -> bool:
    """Whether it is UTF-8; a file name or a word of a command line may be other bytes."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
