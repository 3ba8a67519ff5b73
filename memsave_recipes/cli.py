"""The ``memsave`` command: looks at runs, never trains."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from memsave_recipes.errors import InputError
from memsave_recipes.evidence.compare import compare, show
from memsave_recipes.evidence.runs import Run, find_runs, read_run

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 2 the user's input."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.command(arguments)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="memsave", description="Look at the runs that the recipes left behind.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    comparing = commands.add_parser("compare", help="runs side by side: memory, throughput, accuracy, loss curves")
    comparing.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="a run's --output_dir, or a folder of runs"
    )
    comparing.add_argument("--baseline", type=Path, metavar="DIR", help="the run to compare with (default: plan none)")
    comparing.set_defaults(command=_compare)
    return parser


def _compare(arguments: argparse.Namespace) -> None:
    baseline = read_run(arguments.baseline) if arguments.baseline else None
    runs, problems = _read_all(arguments.folders)
    if not runs:
        raise InputError("; ".join(problems))
    for problem in problems:
        print(f"skipped: {problem}", file=sys.stderr)
    show(compare(runs, baseline))


def _read_all(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Every run at or below the folders, once, and a line for each that cannot be read."""
    problems: list[str] = []

    def attempt(read: Callable[[Path], T], folder: Path) -> T | None:
        try:
            return read(folder)
        except InputError as error:
            problems.append(str(error))
            return None

    found = [run_folder for folder in folders for run_folder in attempt(find_runs, folder) or []]
    runs = {run.folder: run for run_folder in found if (run := attempt(read_run, run_folder))}
    return list(runs.values()), list(dict.fromkeys(problems))


if __name__ == "__main__":
    sys.exit(main())
