"""The whole zoo: every type of every family under every strategy, in a forked process each.

    PYTHONPATH=tests python -m zoo.matrix [--processes 2] [--out docs/results/zoo.json] [FAMILY | FAMILY:TYPE ...]

A type that crashes, or takes more than ``CPU_SECONDS``, costs its own row. Rows are kept in ``out/zoo.jsonl`` as they
come, so a run that was interrupted goes on where it ended; when the last row is there, they are written to ``--out``.
With names only those rows are found, and replaced in ``--out``. The exit code is 1 where a strategy is neither
identical to plain nor refused.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from zoo.architectures import Model
from zoo.families import families
from zoo.steps import IDENTICAL, PARTS_KEPT, STRATEGIES, differences, plain_steps, verdict

RESULTS = Path("docs/results/zoo.json")
PARTIAL = Path("out/zoo.jsonl")
CPU_SECONDS = 300
MAX_PARAMETERS = 150_000_000
LONGEST_REASON = 160
LIBRARIES = ("torch", "transformers", "timm", "diffusers")

Row = list[str] | str
"""A verdict for each of the strategies, or the reason why there is none."""
Name = tuple[str, str]
"""Of a family and of one of its types."""


def row_of(model: Model) -> Row:
    """The row of a model."""
    try:
        num_parameters = sum(parameter.numel() for parameter in model.build().parameters())
        if num_parameters > MAX_PARAMETERS:
            return f"{num_parameters} parameters in the smallest configuration so far"
        plain = plain_steps(model)
        if any(differences(one, other) for one, other in zip(plain, plain_steps(model), strict=True)):
            return "two steps from the same seeds differ without a plan"
    except (Exception, SystemExit) as error:
        return shortened(f"{type(error).__name__}: {error}")
    return [shortened(verdict(model, strategy, plain)) for strategy in STRATEGIES]


def shortened(reason: str) -> str:
    """In one line, and cut."""
    return " ".join(reason.split())[:LONGEST_REASON]


def rows_of(
    models: dict[Name, Any], num_processes: int, find: Callable[[Any], Row] | None = None
) -> Iterator[tuple[Name, Row]]:
    """The rows as they are found, by ``row_of`` or by another function of a model."""
    waiting, running = list(models), dict[Connection, tuple[Name, BaseProcess]]()
    while waiting or running:
        while waiting and len(running) < num_processes:
            name = waiting.pop(0)
            reader, writer = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.get_context("fork").Process(
                target=_send_row, args=(find or row_of, models[name], writer)
            )
            process.start()
            writer.close()
            running[reader] = (name, process)
        for reader in wait(list(running)):
            name, process = running.pop(reader)
            yield name, _received(reader, process)


def _send_row(find: Callable[[Any], Row], model: Any, writer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    writer.send(find(model))


def _received(reader: Connection, process: BaseProcess) -> Row:
    try:
        row: Row = reader.recv()
    except EOFError:
        process.join()
        return f"crash: exit code {process.exitcode}, or more than {CPU_SECONDS} CPU seconds"
    process.join()
    return row


def main(arguments: list[str]) -> int:
    """The rows that ``arguments`` name; the exit code."""
    options = _parsed(arguments)
    found = families()
    chosen = {
        (f, t): model for f, types in found.items() for t, model in types.items() if is_named(options.names, f, t)
    }
    if not chosen:
        raise SystemExit(f"no such family or type; families: {', '.join(found)}")
    rows = _rows_so_far()
    left = {name: model for name, model in chosen.items() if name not in rows}
    import_in_advance()
    PARTIAL.parent.mkdir(exist_ok=True)
    with PARTIAL.open("a", encoding="utf-8") as partial:
        for name, row in tqdm(rows_of(left, options.processes), total=len(left), delay=5, disable=None):
            rows[name] = row
            partial.write(json.dumps([*name, row]) + "\n")
            partial.flush()
    write_results(options.out, {name: rows[name] for name in chosen}, replaces_all=not options.names)
    PARTIAL.unlink()
    mistakes = {name: rows[name] for name in chosen if not is_right(rows[name])}
    for (family, kind), row in mistakes.items():
        print(f"{family}:{kind}: {row}")
    return 1 if mistakes else 0


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("zoo.matrix")
    parser.add_argument("names", nargs="*", help="families, or FAMILY:TYPE; all of them without one")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def is_named(names: list[str], family: str, kind: str) -> bool:
    """Whether a type is among ``names``, which name all where there are none."""
    return not names or family in names or f"{family}:{kind}" in names


def _rows_so_far() -> dict[Name, Row]:
    lines = PARTIAL.read_text(encoding="utf-8").splitlines() if PARTIAL.exists() else []
    return {(family, kind): row for family, kind, row in map(json.loads, lines)}


def import_in_advance() -> None:
    """So that the forked processes need not."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for library in LIBRARIES:
        if _version(library):
            __import__(library)
    with torch.no_grad():
        model = families()["AutoModelForCausalLM"]["llama"]
        model.build()(**model.batch())


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def is_right(row: Row) -> bool:
    """Whether every strategy is identical or refused, or names what it keeps; a model that did not run has none."""
    verdicts = [] if isinstance(row, str) else row
    crashed = isinstance(row, str) and row.startswith("crash")
    return not crashed and all(one == IDENTICAL or one.startswith(("refused: ", f"{PARTS_KEPT}: ")) for one in verdicts)


def write_results(path: Path, rows: dict[Name, Row], *, replaces_all: bool) -> None:
    """Add ``rows`` to those in a file, or replace all of them; a line a type, so that two versions compare well."""
    before = {} if replaces_all or not path.exists() else json.loads(path.read_text(encoding="utf-8"))
    kept: dict[str, Any] = before.get("families", {})
    for (family, kind), row in rows.items():
        kept.setdefault(family, {})[kind] = row
    installed = {library: found for library in LIBRARIES if (found := _version(library))}
    versions = before.get("versions", {}) | installed
    path.write_text(_text_of(versions, kept), encoding="utf-8")


def _text_of(versions: dict[str, str], found: dict[str, dict[str, Row]]) -> str:
    """As JSON, with a line for every type."""
    by_family = [
        f"{json.dumps(family)}: {{\n"
        + ",\n".join(f"{json.dumps(kind)}: {json.dumps(row)}" for kind, row in types.items())
        for family, types in found.items()
    ]
    head = f'"versions": {json.dumps(versions)},\n"strategies": {json.dumps(STRATEGIES)}'
    return f'{{\n{head},\n"families": {{\n' + "\n},\n".join(by_family) + "\n}\n}\n}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
