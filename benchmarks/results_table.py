"""The results table: runs of the recipes as rows that can be checked and sent, and the pages that show them.

    python benchmarks/results_table.py run gpt2           # measure a small matrix of plans here, and add its rows
    python benchmarks/results_table.py add out/run        # rows of runs of your own, which the recipes have written
    python benchmarks/results_table.py check              # refuse rows that no run can have
    python benchmarks/results_table.py page               # README.md and index.html of the rows

Rows are in docs/results/rows and pages in docs/results, unless a flag names other folders. `make results-run` and
`make results` are the first and the last of these.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from result_rows.checks import problems_of, read_rows
from result_rows.page import results_markdown, results_page
from result_rows.rows import WAYS_OUT, ResultRow, rows_of
from result_rows.works import WORKS, measure

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.text import GIB
from memsave_recipes.tools.cli.flags import memory_gib, writing
from memsave_recipes.tools.cli.runs import add_folders, read_all

ROWS, PAGES = Path("docs/results/rows"), Path("docs/results")
ROWS_HELP = f"folder of the rows; default: {ROWS}"


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code, 2 for an ``InputError``."""
    flags = _parser().parse_args(args)
    try:
        flags.command(flags)
    except InputError as error:
        print(f"error: {error.one_line}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run, add = commands.add_parser("run", help="train, and add the rows"), commands.add_parser("add", help="add rows")
    run.add_argument("works", nargs="+", choices=WORKS, metavar="WORK", help=f"of {', '.join(WORKS)}")
    add_folders(add)
    add.add_argument("--device_memory", type=memory_gib, metavar="GIB", help="of the device, such as 80GiB")
    for adding, command in ((run, _run), (add, _add)):
        adding.add_argument("--to", type=Path, default=ROWS, metavar="DIR", help=ROWS_HELP)
        adding.add_argument("--without_times", action="store_true", help="leave times out: the machine had other work")
        adding.set_defaults(command=command)
    check, page = (
        commands.add_parser("check", help="check the rows"),
        commands.add_parser("page", help="make the pages"),
    )
    page.add_argument("--to", type=Path, default=PAGES, metavar="DIR", help=f"folder of the pages; default: {PAGES}")
    for reading, command in ((check, _check), (page, _page)):
        reading.add_argument("rows", nargs="?", type=Path, default=ROWS, metavar="DIR", help=ROWS_HELP)
        reading.set_defaults(command=command)
    return parser


def _run(flags: argparse.Namespace) -> None:
    for work in flags.works:
        _add(argparse.Namespace(**vars(flags), folders=[measure(work)], device_memory=None))


def _add(flags: argparse.Namespace) -> None:
    memory = flags.device_memory
    rows = rows_of(read_all(flags.folders), device_memory_bytes=None if memory is None else round(memory * GIB))
    for row in rows:
        problems = list(problems_of(row))
        if problems:
            raise InputError(f"the row {row.name} cannot be: {'; '.join(problems)}")
    for row in rows:
        kept = row.without_times() if flags.without_times else row
        path = flags.to / f"{row.name}.json"
        if path.is_symlink():
            raise InputError(f"--to {flags.to}: {path.name} there is a link, which is not followed: remove it")
        verb = "replaced" if path.exists() else "wrote"
        with writing(f"--to {flags.to}"):
            flags.to.mkdir(parents=True, exist_ok=True)
            path.write_text(kept.to_json(), encoding="utf-8")
        print(f"{verb} {path}")
        for name in row.missing:
            print(f"  {name} is missing: {WAYS_OUT.get(name, 'it is not recorded')}")


def _check(flags: argparse.Namespace) -> None:
    print(f"rows without a problem: {len(_checked_rows(flags.rows))}")


def _page(flags: argparse.Namespace) -> None:
    rows = _checked_rows(flags.rows)
    with writing(f"--to {flags.to}"):
        (flags.to / "README.md").write_text(results_markdown(rows), encoding="utf-8")
        (flags.to / "index.html").write_text(results_page(rows), encoding="utf-8")
    print(f"wrote {flags.to / 'README.md'} and {flags.to / 'index.html'} with rows: {len(rows)}")


def _checked_rows(folder: Path) -> list[ResultRow]:
    """The rows; each problem is printed.

    Raises:
        InputError: there is a problem.
    """
    rows, problems = read_rows(folder)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        raise InputError(f"{folder} has {len(problems)} problems, each named above: correct or remove those rows")
    return rows


if __name__ == "__main__":
    sys.exit(main())
