"""Flags that commands share, the writing of files that flags name, and where the recipes are."""

import argparse
import re
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memsave_recipes.errors import BUDGET_FLAG, InputError
from memsave_recipes.text import GIB, MIB

STDOUT = "-"
UNITS = {"": GIB, "gib": GIB, "gb": 10**9, "mib": MIB}


def recipes_folder() -> Path:
    """The recipes, with their presets in ``configs``; beside it is ``accelerate_configs``.

    A tree that Python imports this package from has them at its root, an installed wheel below ``sys.prefix``.
    """
    tree = Path(__file__).parents[2]
    if (tree / "setup.cfg").is_file():
        return tree / "recipes"
    return Path(sysconfig.get_path("data")) / "share" / "memsave_recipes" / "recipes"


def recipe_path(word: str) -> Path:
    """The file of a recipe: a path, or the name of one of ours, such as ``language_modeling``."""
    path, ours = Path(word), recipes_folder() / f"{word}.py"
    return ours if path.name == word and not path.exists() and ours.is_file() else path


def add_recipe_flags(parser: argparse.ArgumentParser) -> None:
    """Declares a recipe and a target device; all other flags are the recipe's."""
    parser.usage = "%(prog)s RECIPE [flags of the recipe] [options]"
    parser.add_argument(
        "recipe",
        type=recipe_path,
        metavar="RECIPE",
        help="a file, or the name of one that `memsave recipes` lists, such as language_modeling",
    )
    parser.add_argument(
        BUDGET_FLAG,
        type=float,
        metavar="F",
        help="memory of a device, in GiB; default: 95 %% of a GPU's, all of a CPU's",
    )
    parser.add_argument(
        "--target", metavar="DEVICE", help="device to plan for: cpu, cuda, h100, rtx3060, ...; default: this machine's"
    )
    parser.add_argument(
        "--target_memory",
        type=memory_gib,
        metavar="GIB",
        help="memory of that device, such as 12GiB; without --target: of any GPU, at the rates of an A100",
    )
    parser.add_argument("--num_processes", type=int, default=1, metavar="N", help="number of devices; default: 1")
    parser.add_argument(
        "--interconnect",
        type=float,
        metavar="GB",
        help="GB/s that a device sends to others, for --shard; default: as much as to its host",
    )
    parser.add_argument(
        "--mixed_precision",
        choices=["no", "bf16", "fp16"],
        default="no",
        help="precision of autocast; default: no",
    )
    parser.set_defaults(flags=[])


def memory_gib(word: str) -> float:
    """GiB of ``12``, ``12GiB``, ``12GB`` (10^9 bytes each) or ``512MiB``.

    Raises:
        ArgumentTypeError: none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GiB|GB|MiB|)", word, re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{word}: write a size such as 12GiB")
    return float(found[1]) * UNITS[found[2].lower()] / GIB


def write_text(flag: str, path: Path, text: str) -> None:
    """Writes ``text`` into the file that ``flag`` names; ``-`` prints it.

    Raises:
        InputError: the file cannot be written.
    """
    if str(path) == STDOUT:
        print(text, end="")
        return
    with writing(f"{flag} {path}"):
        path.write_text(text, encoding="utf-8")


@contextmanager
def writing(flag: str) -> Iterator[None]:
    """Inside, a file is written that ``flag`` names.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{flag} cannot be written ({error.strerror}): name a file in a folder that exists") from error
