"""Bytes and their text: the only conversion. Bytes are ``int``; only what people read is in GiB (1024^3) or MiB."""

from math import ceil

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
