"""What others wrote: names, texts and JSON that may be anything, made harmless where they come in.

Bytes and their text: the only conversion. Bytes are ``int``; only what people read is in GiB (1024^3) or MiB.
"""

import json
from collections.abc import Iterable
from math import ceil
from typing import Any

MAX_LEVELS = 50
MAX_DIGITS = 300  # of a whole number; a float holds 308


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
        raise ValueError(f"nested deeper than {MAX_LEVELS} levels") from error


def plain(value: Any, levels: int = MAX_LEVELS) -> Any:
    """A value of JSON with every text ``printable``.

    Raises:
        ValueError: it is nested deeper than ``levels``.
    """
    if isinstance(value, str):
        return printable(value)
    if not isinstance(value, dict | list):
        return value
    if levels == 0:
        raise ValueError(f"nested deeper than {MAX_LEVELS} levels")
    if isinstance(value, list):
        return [plain(item, levels - 1) for item in value]
    return {printable(key): plain(item, levels - 1) for key, item in value.items()}


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_whole)


MIB = 1024**2
GIB = 1024**3


def to_gib(num_bytes: int) -> float:
    """Bytes in GiB, as the ``*_gib`` figures of ``results.json`` and ``metrics.jsonl`` hold them."""
    return num_bytes / GIB


def to_mib(num_bytes: int) -> float:
    """Bytes in MiB."""
    return num_bytes / MIB


def gib_that_suffice(num_bytes: int) -> str:
    """Bytes in GiB and never rounded down, so that the figure works as a budget when it is typed in."""
    return f"{ceil(to_gib(num_bytes) * 10_000) / 10_000:.4f}"


def format_bytes(num_bytes: int) -> str:
    """Bytes as a person reads them: ``1.23 GiB``, ``45.6 MiB``, ``789 B``."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if abs(num_bytes) >= size:
            digits = ".0f" if 1000 <= abs(num_bytes) / size < 1_000_000 else ".3g"
            return f"{num_bytes / size:{digits}} {unit}"
    return f"{num_bytes} B"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class where it has none."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def join_names(names: Iterable[object], at_most: int | None = None) -> str:
    """``a, b, c``, sorted, with ``...`` after the first ``at_most``; ``none`` where there are none."""
    found = sorted(map(str, names))
    return ", ".join(found[:at_most] + ["..."] * (at_most is not None and len(found) > at_most)) or "none"
