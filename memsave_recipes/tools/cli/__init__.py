"""The ``memsave`` command: plans runs, compares them and predicts with their models."""

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import NoReturn

from memsave_recipes.core.errors import InputError, check_words
from memsave_recipes.tools.cli.flags import add_fit, add_frontier, add_plan, add_recipes
from memsave_recipes.tools.cli.runs import add_compare, add_predict, add_workspace


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 2 for an ``InputError``, 4 if not finite, 1 where nobody reads on (``| head``)."""
    parser, words = _parser(), list(sys.argv[1:] if argv is None else argv)
    try:
        check_words(words)
        _check_stdout()
        if words and words[0] in MOVED:
            raise InputError(f"memsave {words[0]} is no command: {MOVED[words[0]]}")
        arguments, others = parser.parse_known_args(argv)
        if others and not hasattr(arguments, "flags"):
            parser.error(f"unrecognized arguments: {' '.join(others)}")
        arguments.flags = others
        arguments.command(arguments)
        sys.stdout.flush()
    except InputError as error:
        print(f"error: {error.one_line}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails again as it ends
        return 1
    except OSError as error:
        if _takes_text():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: stdout takes no text ({error.strerror}): send it to a file on another disk", file=sys.stderr)
        return 2
    return 0


def _check_stdout() -> None:
    """Refuse a stdout that is closed; let one of few letters, such as latin-1, take escapes for all others."""
    if sys.stdout is None:
        raise InputError("stdout is closed: send it to a file, or to /dev/null")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _takes_text() -> bool:
    try:
        print(flush=True)
    except OSError:
        return False
    return True


MOVED = {
    "dashboard": "`trackio show` opens the dashboard of runs with --report_to trackio",
    "launch": "write `accelerate launch`, which restarts lost ranks with --max_restarts N",
    "results": "in a clone of the project, write `python benchmarks/results_table.py` with add, check or page",
}
"""What does the work of commands that are gone."""


class _OneLineParser(argparse.ArgumentParser):
    """Report errors without the usage page; the parsers of the commands are of this class, too."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} ({self.prog} --help lists the flags)")


def _parser() -> argparse.ArgumentParser:
    words = "Plan runs of the recipes, compare them, and use their models."
    groups = "\n\n".join(map(_describe, COMMANDS))
    parser = _OneLineParser(
        prog="memsave",
        usage="memsave COMMAND ...",
        description=f"{words}\n\n{groups}",
        epilog=MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(prog="memsave", required=True, metavar="COMMAND", help=argparse.SUPPRESS)
    for group in COMMANDS.values():
        for name, add_flags, summary in group:
            add_flags(commands.add_parser(name, description=f"{summary}.", allow_abbrev=False))
    return parser


def _describe(title: str) -> str:
    """A group of commands, a line for each."""
    return "\n".join([f"{title}:", *(f"  {name:16}{summary}" for name, _, summary in COMMANDS[title])])


COMMANDS = {
    "Find what fits, before you launch": (
        ("plan", add_plan, "Find the fastest run of a recipe that fits in memory"),
        ("fit", add_fit, "List the ways to train a model on a card"),
        ("frontier", add_frontier, "Compare memory and throughput of all strategies"),
    ),
    "Train": (("recipes", add_recipes, "Print the folder of the recipes and presets, or copy them"),),
    "Look at runs": (
        ("compare", add_compare, "Compare memory, throughput, accuracy, loss curves"),
        ("wandb-workspace", add_workspace, "Save a view that compares the runs of a W&B project"),
    ),
    "Use a trained model": (("predict", add_predict, "Classify images and texts, or continue prompts"),),
}
MORE = "memsave COMMAND --help lists the flags of a command."
