"""Matrices of tests, of which ``make test`` runs a few cells and ``make test-all`` every one."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sample(few: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """The cases of ``every``, tuples or single values, as parameters of a test; those not in ``few`` are slow."""
    cases = list(every)
    assert all(case in cases for case in few), "a case to run in make test is none of them"
    marks = [() if case in few else pytest.mark.slow for case in cases]
    return [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=mark)
        for case, mark in zip(cases, marks, strict=True)
    ]


def every_third(cases: Iterable[Any]) -> list[Any]:
    """The same where no case says more than another."""
    cases = list(cases)
    return sample(cases[::3], cases)
