"""CUDA devices for processes that a test starts, on a machine that has none: ``standin/README.md``."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SITE = ROOT / "tests" / "standin" / "site"
sys.path.append(str(SITE))

from cuda_standin.build import build, why_not  # noqa: E402


@pytest.fixture(scope="session")
def on_devices() -> Callable[..., dict[str, str]]:
    """``on_devices(2, POISON=1)``: the environment of a process that sees so many devices, of 8 GiB each.

    Skips where the stand-in cannot be had, and says why.
    """
    if reason := why_not():
        pytest.skip(reason)
    build()

    def environment(num_devices: int = 1, **settings: object) -> dict[str, str]:
        named = {f"STANDIN_{name}": str(value) for name, value in settings.items()}
        path = {"PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}", "STANDIN": "1", "STANDIN_DEVICES": str(num_devices)}
        return {**os.environ, **path, **named}

    return environment
