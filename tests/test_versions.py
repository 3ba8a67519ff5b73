"""The lowest versions that setup.cfg allows are those that `make test-oldest` installs."""

import configparser
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lower_bounds():
    """By name, those of the package and of its extras."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = "\n".join([setup["options"]["install_requires"], *setup["options.extras_require"].values()])
    return dict(re.findall(r"^([\w-]+)>=([\d.]+)(?:,<[\d.]+)?$", lines, flags=re.MULTILINE))


NOT_IN_OLDEST = {"mypy", "ruff", "liger-kernel", "lightning", "torchao", "trl"}


@pytest.mark.parametrize("name", sorted(lower_bounds().keys() - NOT_IN_OLDEST))
def test_the_lowest_versions_are_installed(name):
    lowest = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE))
    assert f"{lowest[name]}.".startswith(f"{lower_bounds()[name]}.")
