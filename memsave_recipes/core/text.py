"""Text from others made printable, numbers made text for people, and progress bars.

Names, texts and JSON of foreign files can hold anything; they pass through ``printable``, ``read_json`` and
``sanitized`` where they come in. Bytes are ``int``; only texts for people and ``*_gib`` figures are in GiB (1024^3).
"""

import json
from collections.abc import Iterable
from datetime import timedelta
from math import ceil
from typing import Any

MAX_LEVELS = 50
MAX_DIGITS = 300  # of a whole number; a float holds 308
HUGE = 1e9  # figures of this size, which no run reaches, are written with a power of ten so that their column is narrow
MIB = 1024**2
GIB = 1024**3


class Progress:
    """Count what is done, and show it nowhere: what takes a ``ProgressBar`` takes this, too."""

    total: float | None = None

    def update(self, done: float = 1) -> None:
        """Count ``done`` more."""


def printable(text: str) -> str:
    """``text`` with an escape, such as ``\\x1b`` or ``\\n``, for each character that cannot be printed.

    Those are control characters, line ends, invisible characters, changes of the writing direction and lone surrogates:
    they could control the terminal, forge a second line or fail to be encoded.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def printable_lines(text: str) -> str:
    """``text`` that may have several lines, each of them ``printable``; tabs become spaces."""
    return "\n".join(map(printable, text.expandtabs().split("\n")))


def spaced(name: str) -> str:
    """``optimizer state``, of the key ``optimizer_state``."""
    return name.replace("_", " ")


def read_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, is nested too deep for Python, or has a whole number that no float holds.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError(f"nested deeper than {MAX_LEVELS} levels") from error


def sanitized(value: Any, levels: int = MAX_LEVELS) -> Any:
    """A JSON value with every text ``printable``.

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
        return [sanitized(item, levels - 1) for item in value]
    return {printable(key): sanitized(item, levels - 1) for key, item in value.items()}


def flat(nested: Any, separator: str, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries, keyed ``outer/inner`` with the separator ``/``; none of another value."""
    leaves: dict[str, Any] = {}
    for key, value in nested.items() if isinstance(nested, dict) else ():
        name = f"{prefix}{key}"
        leaves |= flat(value, separator, f"{name}{separator}") if isinstance(value, dict) else {name: value}
    return leaves


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_whole)


def to_gib(num_bytes: int) -> float:
    """Bytes in GiB, as the ``*_gib`` figures of ``results.json`` and ``metrics.jsonl`` hold them."""
    return num_bytes / GIB


def gib_that_suffice(num_bytes: int) -> str:
    """Bytes in GiB, rounded up, so that the figure works as a budget."""
    return f"{ceil(to_gib(num_bytes) * 10_000) / 10_000:.4f}"


def format_bytes(num_bytes: float) -> str:
    """``1.23 GiB``, ``45.6 MiB``, ``789 B``."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if abs(num_bytes) >= size:
            digits = ".0f" if 1000 <= abs(num_bytes) / size < 1_000_000 else ".3g"
            return f"{num_bytes / size:{digits}} {unit}"
    return f"{round(num_bytes)} B"


def format_seconds(seconds: float) -> str:
    """``45.6 ms``, ``1.23 s``, and from 100 s on ``0:01:40``."""
    if abs(seconds) < 1:
        return f"{1000 * seconds:.3g} ms"
    return str(timedelta(seconds=round(seconds))) if 100 <= seconds < HUGE else f"{seconds:.3g} s"


def format_rate(per_s: float) -> str:
    """``1,058``, and below 100 three digits."""
    return f"{per_s:,.0f}" if 100 <= per_s < HUGE else f"{per_s:.3g}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class where it has none."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def join_names(names: Iterable[object], at_most: int | None = None) -> str:
    """``a, b, c``, sorted, with ``...`` after the first ``at_most``; ``none`` where there are none."""
    found = sorted(map(str, names))
    return ", ".join(found[:at_most] + ["..."] * (at_most is not None and len(found) > at_most)) or "none"


def first_of(names: Iterable[str], at_most: int) -> str:
    """The first names, ``a, b and 7 more``."""
    named = list(names)
    others = f" and {len(named) - at_most:,} more" if len(named) > at_most else ""
    return ", ".join(named[:at_most]) + others
