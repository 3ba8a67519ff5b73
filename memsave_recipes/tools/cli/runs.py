"""The commands on finished runs: ``memsave compare``, ``wandb-workspace`` and ``predict``.

Commands import their dependencies when they run, so that comparing run folders starts in a tenth of a second.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from memsave_recipes.core.errors import InputError
from memsave_recipes.tools.cli.flags import STDOUT, write_text, writing
from memsave_recipes.tools.compare import Run, compare, find_runs, read_run

T = TypeVar("T")


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_folders(parser)
    parser.add_argument(
        "--baseline", metavar="RUN", help="folder or name of the baseline; default: plan none, the largest micro-batch"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="file for a page with table and charts")
    parser.add_argument("--png", type=Path, metavar="FILE", help="file for the charts")
    parser.add_argument(
        "--markdown", nargs="?", const=STDOUT, metavar="FILE", help="file for a Markdown table; printed without FILE"
    )
    parser.set_defaults(command=_compare)


def add_folders(parser: argparse.ArgumentParser) -> None:
    """Declare the folders of runs."""
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="run folder (--output_dir), or a folder of them"
    )


def add_workspace(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("project", metavar="ENTITY/PROJECT")
    parser.set_defaults(command=_workspace)


def _compare(arguments: argparse.Namespace) -> None:
    from memsave_recipes.tools.pages.comparison import show, to_markdown

    runs = read_all(arguments.folders)
    table = compare(runs, _baseline(arguments.baseline, runs))
    if arguments.markdown != STDOUT:
        show(table)
    if arguments.markdown:
        write_text("--markdown", Path(arguments.markdown), to_markdown(table))
    if arguments.html:
        from memsave_recipes.tools.pages.page import to_html

        write_text("--html", arguments.html, to_html(table))
    if arguments.png:
        from memsave_recipes.tools.pages.charts import write_png

        with writing(f"--png {arguments.png}"):
            write_png(table, arguments.png)


def _workspace(arguments: argparse.Namespace) -> None:
    from memsave_recipes.tools.wandb_workspace import save_workspace

    print(f"saved: {save_workspace(arguments.project)}")


def read_all(folders: Sequence[Path]) -> list[Run]:
    """Read every run at or below the folders, once; name those that cannot be read.

    Raises:
        InputError: no run is left.
    """
    found, problems = _attempt_all(find_runs, folders)
    paths = dict.fromkeys(path.resolve() for paths in found for path in paths)
    runs, unreadable = _attempt_all(read_run, list(paths))
    problems = list(dict.fromkeys(problems + unreadable))
    if not runs:
        raise InputError("; ".join(problems))
    for problem in problems:
        print(f"skipped: {problem}", file=sys.stderr)
    return runs


def _attempt_all(read: Callable[[Path], T], paths: Sequence[Path]) -> tuple[list[T], list[str]]:
    """Return the results of ``read``, and a line for each path that it refuses."""
    results, problems = [], []
    for path in paths:
        try:
            results.append(read(path))
        except InputError as error:
            problems.append(error.one_line)
    return results, problems


def _baseline(named: str | None, runs: Sequence[Run]) -> Run | None:
    """Return the run whose folder or name is given."""
    if named is None:
        return None
    if not os.path.exists(named):  # unlike pathlib, without an error for a text that cannot be a path
        namesakes = [run for run in runs if run.name == named]
        if len(namesakes) != 1:
            raise InputError(f"--baseline {named} is not a folder, and the name of {len(namesakes)} runs: name one run")
        return namesakes[0]
    found = find_runs(named)
    if len(found) > 1:
        raise InputError(f"--baseline {named} holds {len(found)} runs: name one of them")
    return read_run(found[0])


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("folder", metavar="FOLDER", help="a run's --output_dir, its final/, or a folder of a model")
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="image files or folders of them; or texts or prompts, and a .txt or .jsonl with one a line",
    )
    parser.add_argument("--top_k", type=int, default=5, metavar="K", help="most probable classes; default: 5")
    parser.add_argument("--max_new_tokens", type=int, default=60, metavar="N", help="of a continuation; default: 60")
    parser.add_argument("--text_column", metavar="NAME", help="in a .jsonl; default: text")
    parser.add_argument("--text_pair_column", metavar="NAME", help="of the second text, in a .jsonl of pairs")
    parser.add_argument("--no_chat", action="store_true", help="continue prompts as text, not as a user's messages")
    parser.add_argument("--batch_size", type=int, default=8, metavar="N", help="inputs of a forward; default: 8")
    parser.add_argument("--device", metavar="DEVICE", help="such as cpu or cuda:1; default: a GPU where there is one")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the code that comes with the model")
    parser.add_argument("--json", action="store_true", help="print a JSON object a line in place of the table")
    parser.set_defaults(command=_predict)


def _predict(arguments: argparse.Namespace) -> None:
    from memsave_recipes.tools.inference import PredictArguments, load_on, predict, read_inputs
    from memsave_recipes.tools.pages import show_predictions

    flags = PredictArguments(
        batch_size=arguments.batch_size,
        top_k=arguments.top_k,
        max_new_tokens=arguments.max_new_tokens,
        text_column=arguments.text_column,
        text_pair_column=arguments.text_pair_column,
        chat=False if arguments.no_chat else None,
    )
    saved = load_on(arguments.device, arguments.folder, trust_remote_code=arguments.trust_remote_code)
    rows = predict(saved, read_inputs(arguments.inputs, saved, flags), flags)
    if arguments.json:
        takes_all = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
        for row in rows:
            line = json.dumps(row, ensure_ascii=not takes_all)
            print("".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in line))
    else:
        show_predictions(rows)
