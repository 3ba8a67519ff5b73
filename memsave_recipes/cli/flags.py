"""Flags that commands share, and the files that flags name."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memsave_recipes.errors import InputError

STDOUT = "-"


def add_recipe_flags(parser: argparse.ArgumentParser) -> None:
    """A recipe and a device to plan it for; all flags that are not named here are the recipe's."""
    parser.usage = "%(prog)s RECIPE [flags of the recipe] [options]"
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="recipes/language_modeling.py, say")
    parser.add_argument(
        "--memory_budget_gib",
        type=float,
        metavar="F",
        help="memory of a device, in GiB; default: 95 %% of what a GPU has, all of a CPU's",
    )
    parser.add_argument(
        "--target", metavar="DEVICE", help="cpu, cuda, or a device such as h100; default: the one that is here"
    )
    parser.add_argument("--num_processes", type=int, default=1, metavar="N", help="devices; default: 1")
    parser.add_argument(
        "--mixed_precision", choices=["no", "bf16", "fp16"], default="no", help="of accelerate launch; default: no"
    )
    parser.set_defaults(flags=[])


def write_text(flag: str, path: Path, text: str) -> None:
    """``text`` into the file that ``flag`` names; ``-`` prints it.

    Raises:
        InputError: that was not possible.
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
        InputError: that was not possible.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{flag} cannot be written ({error.strerror}): name a file in a folder that exists") from error
