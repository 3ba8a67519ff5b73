"""From a command line to checked dataclasses of flags.

``--config FILE.yaml`` is read first, as if its entries stood at the front of the command line; flags override it.
"""

import sys
from argparse import Action, ArgumentDefaultsHelpFormatter, ArgumentParser
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import Field, asdict, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NoReturn, get_type_hints

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from memsave_recipes.core.errors import InputError, check_file, check_words
from memsave_recipes.models.flags import RULES, rules_of
from memsave_recipes.training.arguments import MAX_INT

YAML = "tag:yaml.org,2002:"
SCALARS = {f"{YAML}{kind}" for kind in ("str", "int", "float", "bool", "timestamp")}
"""YAML tags of the values of a preset. Each is read as text: ``no`` is a word, and ``1:30`` is not 90."""
MAX_LETTERS, MAX_LEVELS = 65_536, 10
"""Of a preset: more than anyone writes by hand, and read in a second."""
PRECISION = "the precision is set before the script: accelerate launch --mixed_precision {} recipes/..."
ENTRY = "it is an entry of the file of --lora_config"
ELSEWHERE = {
    "bf16": PRECISION.format("bf16"),
    "fp16": PRECISION.format("fp16"),
    "torch_compile": "--compile compiles its layers",
    "push_to_hub": "upload final/ at the end: hf upload NAME OUTPUT_DIR/final",
    "hub_model_id": "upload final/ at the end: hf upload NAME OUTPUT_DIR/final",
    **dict.fromkeys(("lora_alpha", "lora_dropout", "use_rslora", "use_dora"), ENTRY),
    **dict.fromkeys(("lora_target_modules", "lora_modules_to_save"), ENTRY + ", without its lora_"),
    "bf16_stochastic_round": "take --optimizer adamw_bf16",
    "lora_merge": "merge afterwards by peft: docs/recipes.md",
    "dropout": "give the model's own entries to --config_overrides, such as attn_pdrop=0.1",
    "vocab_size": "it is an entry of --config_overrides",
    "max_eval_samples": "all held-out rows are evaluated: give fewer as --validation_file",
    "text_pair_column": "--text_column takes both columns",
    "gradient_checkpointing": "take --activation_checkpointing full",
    "gradient_accumulation_steps": "they follow from --global_batch_size and --micro_batch_size",
}
"""Flags that people know from other programs, and their counterpart here."""
USAGE = "%(prog)s --output_dir DIR [--config FILE.yaml] [--flag [VALUE] ...]"
SHOWN = ("first", None, "seldom")
METAVARS = {string_to_bool: "yes|no", int: "N", float: "X"}
"""Of the values of a flag in ``--help``, by its type; the others are named after the flag."""


def parse_arguments(*dataclasses: type, args: Sequence[str] | None = None) -> tuple[Any, ...]:
    """One instance of each dataclass from the command line (``args``, by default that of the process).

    Raises:
        InputError: an unknown flag or preset key, a value of the wrong type, or one that a dataclass refuses.
    """
    form = {"usage": USAGE, "allow_abbrev": False, "formatter_class": _HelpFormatter}
    parser = _RecipeParser(list(dataclasses), **form)  # type: ignore[arg-type]
    parser.add_argument("--config", metavar="FILE.yaml", help="file with flags; the command line overrides them")
    command_line = list(sys.argv[1:] if args is None else args)
    check_words(command_line)
    preset = _preset_path(command_line)
    flags = [*_read_preset(preset, parser), *command_line] if preset is not None else command_line
    check_words(flags)
    *parsed, _config, unknown = parser.parse_args_into_dataclasses(
        flags, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        _refuse_launcher_flag(unknown)
        raise InputError(
            f"{unknown[0]} is not a flag of this recipe{parser.suggestion(unknown[0])} (--help lists the flags)"
        )
    _refuse_huge_numbers(flag_values(tuple(parsed)))
    return tuple(parsed)


def flag_values(parsed: tuple[Any, ...]) -> dict[str, Any]:
    """The flags of all dataclasses by their names."""
    return {name: value for part in parsed for name, value in asdict(part).items()}


def underscored(words: Sequence[str]) -> tuple[str, ...]:
    """``--max_steps=3`` for ``--max-steps=3``: the parser of flags takes both."""
    return tuple(map(_underscored, words))


def named_flags(args: Sequence[str]) -> dict[str, str]:
    """The flags that a preset and a command line give, without their dashes, each with the first word of its value.

    The command line overrides the preset.

    Raises:
        InputError: the preset cannot be read.
    """
    preset = _preset_path(args)
    entries = _preset_entries(preset) if preset is not None else {}
    named = {name: words[0] for name, words in entries.items()}
    for word, following in zip(args, [*args[1:], "--"], strict=False):
        if word.startswith("--"):
            name, is_joined, value = word.removeprefix("--").partition("=")
            named[name] = value if is_joined or following.startswith("--") else following
    return named


def _underscored(word: str) -> str:
    name, is_joined, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{is_joined}{value}" if name.startswith("--") else word


class _HelpFormatter(ArgumentDefaultsHelpFormatter):
    """Shows each flag once, and its default where there is one that the text does not tell."""

    def _get_help_string(self, action: Action) -> str | None:
        is_told = action.default is None or action.default is False or "default: " in str(action.help)
        if isinstance(action.default, list) and action.default and not is_told:
            return f"{action.help} (default: {' '.join(action.default)})"
        return action.help if is_told or action.default == [] else super()._get_help_string(action)

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        return METAVARS.get(action.type) or super()._get_default_metavar_for_optional(action)

    def _format_action_invocation(self, action: Action) -> str:
        shown = copy(action)
        shown.option_strings = list(dict.fromkeys(map(_underscored, action.option_strings)))
        return super()._format_action_invocation(shown)


class _RecipeParser(HfArgumentParser):
    """An argument parser whose ``--help`` is ordered by the ``Rules`` of the flags; complaints are one line.

    Between the first and the last group is one for each dataclass. A flag belongs to the class that first declares it,
    whichever subclass changes its default. A field without help is none.
    """

    def _add_dataclass_arguments(self, dtype: type) -> None:
        groups: dict[str, Any] = {}
        hints, by_name = (
            get_type_hints(dtype),
            {one.name: one for one in fields(dtype) if one.init and "help" in one.metadata},
        )
        self.set_defaults(**{one.name: one.default for one in fields(dtype) if one.init and "help" not in one.metadata})
        rules, titles = rules_of(dtype), {"first": "What to set first", "seldom": "Seldom used"}
        for name in sorted(by_name, key=lambda name: SHOWN.index(rules[name].shown)):
            title = titles.get(rules[name].shown or "") or _title(dtype, name)
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            by_name[name].type = hints[name]
            self._parse_dataclass_field(groups[title], by_name[name])

    @staticmethod
    def _parse_dataclass_field(parser: ArgumentParser, field: Field[Any]) -> None:
        bare = copy(field)
        bare.metadata = MappingProxyType({name: one for name, one in field.metadata.items() if name != RULES})
        HfArgumentParser._parse_dataclass_field(parser, bare)
        if field.default is True:
            parser._option_string_actions[f"--no_{field.name}"].help = f"switch --{field.name} off"

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists the flags)")

    def suggestion(self, flag: str) -> str:
        """``; did you mean --seed?``, or nothing."""
        near = get_close_matches(flag.partition("=")[0], self._option_string_actions, n=1)
        return f"; did you mean {near[0]}?" if near else ""


def _title(dtype: type, name: str) -> str:
    """Of the class that first declares the flag."""
    owner = next(part for part in reversed(dtype.__mro__) if name in vars(part).get("__dataclass_fields__", ()))
    return str(owner.__doc__).partition("\n")[0].rstrip(".")


def _preset_path(args: Sequence[str]) -> str | None:
    parser = _RecipeParser([], add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    paths = parser.parse_known_args(list(args))[0].config
    if len(paths) > 1:
        raise InputError(f"--config is given {len(paths)} times: put all flags into one file")
    return paths[0] if paths else None


def _preset_entries(path: str) -> dict[str, list[str]]:
    """The keys of a YAML preset, as the parser of flags takes them, each with the words of its value."""
    return read_mapping("--config", path, example="global_batch_size: 64", name_of=lambda key: key.replace("-", "_"))


def read_mapping(
    flag: str, path: str, *, example: str = "name: 1.5", name_of: Callable[[str], str] = str
) -> dict[str, list[str]]:
    """The keys of a YAML or JSON file, each with the words of its value.

    Raises:
        InputError: it is none of both, or no such mapping; ``flag`` names the file, ``example`` is a line of one.
    """
    check_file(flag, path)
    try:
        root = _compose(_read_text(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{flag} {path} cannot be read: {' '.join(str(error).split())}") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode) or not all(isinstance(key, yaml.ScalarNode) for key, _ in root.value):
        raise InputError(f"{flag} {path} must hold lines like `{example}`")
    entries: dict[str, list[str]] = {}
    for key, value in root.value:
        name = name_of(key.value)
        if name in entries:
            raise InputError(f"{flag} {path}: {name} is there twice: remove one of them")
        entries[name] = _words_of(value, f"{flag} {path}: {name}")
    return entries


def _read_text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        text = file.read(MAX_LETTERS + 1)
    if len(text) > MAX_LETTERS:
        raise ValueError(f"it has more than {MAX_LETTERS:,} characters")
    return text


def _compose(text: str) -> yaml.Node | None:
    """The YAML in ``text``; deep nesting is refused before it costs seconds."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_LEVELS:
            raise ValueError(f"it is nested deeper than {MAX_LEVELS} levels")
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _words_of(value: yaml.Node, place: str) -> list[str]:
    items = value.value if value.tag == f"{YAML}seq" else [value]
    if not items or any(item.tag == f"{YAML}null" for item in items):
        raise InputError(f"{place} has no value: give one, or leave the line out")
    if any(item.tag not in SCALARS or "\0" in item.value for item in items):
        raise InputError(f"{place} must be a word, a number or a list of these")
    return [item.value for item in items]


def _read_preset(path: str, parser: _RecipeParser) -> list[str]:
    """The entries of a YAML preset as command-line words."""
    words: list[str] = []
    for key, values in _preset_entries(path).items():
        flag = f"--{key}"
        action = parser._option_string_actions.get(flag)
        if action is None or key in ("config", "help"):
            _refuse_launcher_flag([flag, *values])
            raise InputError(f"--config {path}: {key} is not a flag of this recipe{parser.suggestion(flag)}")
        if len(values) == 1:
            words.append(f"{flag}={values[0]}")  # in one word, so that no value is taken for a flag
            continue
        if action.nargs != "+" or any(value.startswith("-") for value in values):
            raise InputError(f"--config {path}: {key} does not take this list: {' '.join(values)}")
        words += [flag, *values]
    return words


def _refuse_huge_numbers(flags: dict[str, Any]) -> None:
    for name, value in flags.items():
        if isinstance(value, int) and value > MAX_INT:
            raise InputError(f"--{name} {value}: must be at most {MAX_INT}")


def _refuse_launcher_flag(words: Sequence[str]) -> None:
    """Say where a flag of the launcher or of another program belongs; ``words`` begin with the flag."""
    from accelerate.commands.launch import launch_command_parser  # slow to import

    flag, is_joined, _ = words[0].partition("=")
    name = flag.removeprefix("--").replace("-", "_")
    if name in ELSEWHERE:
        raise InputError(f"{flag} is not a flag of this recipe: {ELSEWHERE[name]}")
    if f"--{name}" in launch_command_parser()._option_string_actions:
        has_value = not is_joined and len(words) > 1 and not words[1].startswith("--")
        example = " ".join(words[: 1 + has_value])
        raise InputError(f"{flag} belongs before the script: accelerate launch {example} recipes/...")
