"""Parameters of which ``make test`` tries some and ``make test-all`` all."""

import pytest


def sample(cases, fast):
    """All ``cases``, tuples or single values; those that are not among ``fast`` are slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=() if case in fast else pytest.mark.slow)
        for case in cases
    ]
