"""What others wrote: names, texts and JSON that may be anything, made harmless where they come in."""

import json
from typing import Any

MOST_LEVELS = 50
MOST_DIGITS = 300  # of a whole number; a float holds 308


def printable(text: str) -> str:
    """``text`` with an escape, such as ``\\x1b`` or ``\\n``, for each character that is none to be read.

    Those are controls, line ends, invisible ones, those that turn the direction of writing, and halves of a pair: they
    could command the terminal, forge a second line or not be encoded.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def printable_lines(text: str) -> str:
    """``text`` that may have several lines, each of them ``printable``; tabs become spaces."""
    return "\n".join(map(printable, text.expandtabs().split("\n")))


def read_json(text: str) -> Any:
    """What ``text`` says in JSON.

    Raises:
        ValueError: it is no JSON, is nested too deep for Python, or has a whole number that no float holds.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError(f"nested deeper than {MOST_LEVELS} levels") from error


def plain(value: Any, levels: int = MOST_LEVELS) -> Any:
    """A value of JSON with every text ``printable``.

    Raises:
        ValueError: it is nested deeper than ``levels``.
    """
    if isinstance(value, str):
        return printable(value)
    if not isinstance(value, dict | list):
        return value
    if levels == 0:
        raise ValueError(f"nested deeper than {MOST_LEVELS} levels")
    if isinstance(value, list):
        return [plain(item, levels - 1) for item in value]
    return {printable(key): plain(item, levels - 1) for key, item in value.items()}


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_whole)
