"""Every preset is read by its recipe, says what it needs and reaches, and gives the command that its comment shows."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from lives import loaded

from memsave_recipes.training.parsing import parse_arguments

ROOT = Path(__file__).parents[2]
PRESETS = sorted(path for path in (ROOT / "recipes/configs").glob("*.yaml") if path.stem != "sweep")  # run/test_sweep
COMMAND = re.compile(r"accelerate launch .*?(recipes/\w+\.py)(.*)$")


def comment_of(preset):
    lines = preset.read_text().splitlines()
    return " ".join(line.lstrip("# ").rstrip("\\ ") for line in lines if line.startswith("#"))


def command_of(preset):
    recipe, flags = COMMAND.search(comment_of(preset)).groups()
    return ROOT / recipe, shlex.split(flags)


def arguments_of(recipe):
    """The dataclass of the flags that the recipe's ``main`` parses, without running it."""
    with loaded(recipe.stem) as module:
        return module.Arguments


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_its_comment_gives_a_command_that_its_recipe_takes(preset, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe, flags = command_of(preset)
    assert "--config" in flags
    values = vars(parse_arguments(arguments_of(recipe), args=flags)[0])
    for key, value in yaml.safe_load(preset.read_text()).items():
        assert values[key] in (value, [value]), key


@pytest.mark.parametrize("preset", [path for path in PRESETS if path.stem != "demo"], ids=lambda path: path.stem)
def test_its_comment_says_what_it_needs_and_reaches(preset):
    comment = comment_of(preset)
    assert "Needs:" in comment
    assert "Should reach:" in comment
    assert re.search("measured", comment)
