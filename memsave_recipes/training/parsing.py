"""From a command line to checked dataclasses of flags.

``--config FILE.yaml`` is read first, as if its entries stood at the front of the command line; flags override it.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from memsave_recipes.errors import InputError


def parse_arguments(*dataclasses: type, args: Sequence[str] | None = None) -> tuple[Any, ...]:
    """One instance of each dataclass from the command line (``args``, by default that of the process).

    Raises:
        InputError: an unknown flag or preset key, a value of the wrong type, or one that a dataclass refuses.
    """
    parser = _RecipeParser(list(dataclasses), allow_abbrev=False)  # type: ignore[arg-type]
    parser.add_argument("--config", help="a YAML file of flags, read before those of the command line")
    command_line = list(sys.argv[1:] if args is None else args)
    preset, _ = _preset_parser().parse_known_args(command_line)
    flags = [*_read_preset(preset.config, parser), *command_line] if preset.config else command_line
    *parsed, _config, unknown = parser.parse_args_into_dataclasses(
        flags, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        raise InputError(
            f"{unknown[0]} is no flag of this recipe{parser.suggestion(unknown[0])} (--help lists the flags)"
        )
    return tuple(parsed)


def flag_values(parsed: tuple[Any, ...]) -> dict[str, Any]:
    """The flags of all dataclasses by their names."""
    return {name: value for part in parsed for name, value in asdict(part).items()}


def named_flags(args: Sequence[str]) -> dict[str, str]:
    """The flags that a preset and a command line give, without their dashes, each with the first word of its value.

    What the command line says holds; a switch has no word.

    Raises:
        InputError: the preset cannot be read.
    """
    preset, _ = _preset_parser().parse_known_args(list(args))
    named = {name: str(value) for name, value in (_preset_entries(preset.config) if preset.config else {}).items()}
    for word, following in zip(args, [*args[1:], "--"], strict=False):
        if word.startswith("--"):
            name, is_joined, value = word.removeprefix("--").partition("=")
            named[name] = value if is_joined or following.startswith("--") else following
    return named


class _RecipeParser(HfArgumentParser):
    """An argument parser whose complaints are one line, with the nearest known flag."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists the flags)")

    def suggestion(self, flag: str) -> str:
        """``; did you mean --seed?``, or nothing."""
        near = get_close_matches(flag.partition("=")[0], self._option_string_actions, n=1)
        return f"; did you mean {near[0]}?" if near else ""


def _preset_parser() -> _RecipeParser:
    parser = _RecipeParser([], add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    return parser


def _preset_entries(path: str) -> dict[str, Any]:
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(entries, dict):
        raise InputError(f"--config {path} must hold lines like `global_batch_size: 64`")
    return entries


def _read_preset(path: str, parser: _RecipeParser) -> list[str]:
    """The entries of a YAML preset as command-line words."""
    words: list[str] = []
    for key, value in _preset_entries(path).items():
        flag = f"--{key}"
        if flag not in parser._option_string_actions or flag == "--config":
            raise InputError(f"--config {path}: {key} is no flag of this recipe{parser.suggestion(flag)}")
        values = value if isinstance(value, list) else [value]
        words += [flag, *(str(item) for item in values)]
    return words
