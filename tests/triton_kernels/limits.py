"""Limits: the figures of the page. Kernels of a class, bytes, registers and spilled bytes may be fewer."""

import json
from functools import cache
from importlib.metadata import version
from math import inf

from triton_kernels.layers import Row
from triton_kernels.page import RESULTS

ROOM = 1.02
"""What bytes and registers may be above those of the page: another version of torch cuts sums elsewhere."""


def check_layers(rows: list[Row], limits: list[Row]) -> None:
    """Layers as those of the page, with no more graphs, kernels, bytes and registers.

    Raises:
        AssertionError: one has more.
    """
    assert [row["layer"] for row in rows] == [row["layer"] for row in limits]
    for row, limit in zip(rows, limits, strict=True):
        assert row["graphs"] == limit["graphs"], f"graphs: {row['graphs']}, {limit['graphs']} on the page"
        for name in row["graphs"]:
            check_kernels(row[name], limit[name], f"{name} of {row['layer']}")
        assert row["saved"] <= ROOM * limit["saved"], f"saved: {row['saved']} bytes, {limit['saved']} on the page"
        check_code(row["machine_code"], limit["machine_code"])


def check_kernels(found: Row, limit: Row, name: str) -> None:
    """As ``check_layers``, of one graph."""
    moved, most = (one["read"] + one["written"] for one in (found, limit))
    assert moved <= ROOM * most, f"{name}: {moved} bytes an element, {most} on the page"
    for kind, one in found["classes"].items():
        number, most = one["kernels"], limit["classes"].get(kind, {"kernels": 0})["kernels"]
        assert number <= most, f"{name}: {number} kernels are {kind}, {most} on the page"
    assert found["library_calls"] <= limit["library_calls"], f"{name}: {found['library_calls']} calls of libraries"


@cache
def is_triton_of_page() -> bool:
    """Whether registers can be compared: another version of Triton allots them by other rules."""
    of_page = json.loads(RESULTS.read_text(encoding="utf-8"))["versions"]["triton"]
    return version("triton").partition("+")[0] == of_page


def check_code(found: Row, limit: Row) -> None:
    """As ``check_layers``, of machine code."""
    for architecture, classes in found.items():
        for kind, code in classes.items():
            of_limit = limit[architecture][kind]
            most = ROOM * of_limit["registers"] if is_triton_of_page() else inf
            assert code["spilled_bytes"] <= of_limit["spilled_bytes"], f"{kind} spills on {architecture}: {code}"
            assert code["registers"] <= most, f"{kind} on {architecture}: {code}, {of_limit}"
