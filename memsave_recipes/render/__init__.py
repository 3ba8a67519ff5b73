"""Tables, HTML pages and plots of plans and of compared runs; here what all tables share."""

import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any, cast

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memsave_recipes.text import printable, printable_lines

FALLBACK_COLUMNS = 120
BLANKS = re.compile(" +$", re.MULTILINE)
"""At the ends of lines."""


class _Trimmed:
    """A stream that is written to without ``BLANKS``, which fill the last column of a table; else the stream itself."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._stream.write(BLANKS.sub("", text))


def new_console() -> Console:
    """As wide as the terminal; ``FALLBACK_COLUMNS`` where there is none."""
    width = shutil.get_terminal_size(fallback=(FALLBACK_COLUMNS, 24)).columns
    return Console(width=width, file=cast(IO[str], _Trimmed(sys.stdout)))


def new_table(**options: Any) -> Table:
    """A table with a line below its headings; ``options`` are those of ``rich.table.Table``."""
    return Table(**{"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), **options})


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Sentences, wrapped by the terminal alone, so that a long one can be copied whole."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def show_predictions(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows of ``inference.predict``."""
    is_generated = any("generated_text" in row for row in rows)
    table = new_table()
    table.add_column("input", overflow="fold")
    for heading in ("generated text",) if is_generated else ("class", "probability"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "probability" else "left")
    for row in rows:
        name = Text(printable(row["input"]))
        if is_generated:
            table.add_row(name, Text(printable_lines(row["generated_text"])))
            continue
        for prediction in row["predictions"]:
            table.add_row(name, Text(printable(prediction["label"])), f"{prediction['probability']:.4f}")
            name = Text()
    new_console().print(table)
