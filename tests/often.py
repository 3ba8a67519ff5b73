"""Matrices of tests, of which `make test` runs a few cells."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def often(few: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """The cases of ``every`` as parameters of a test; those not in ``few`` are slow."""
    cases = list(every)
    assert set(few) <= set(cases), "a case that runs often is none of them"
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [() if case in few else pytest.mark.slow for case in cases]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]
