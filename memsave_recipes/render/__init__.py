"""Tables, HTML pages and plots of plans and of compared runs; here the terminal's width and the form of its tables."""

import shutil
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

FALLBACK_COLUMNS = 120


def new_console() -> Console:
    """As wide as the terminal; ``FALLBACK_COLUMNS`` where there is none."""
    return Console(width=shutil.get_terminal_size(fallback=(FALLBACK_COLUMNS, 24)).columns)


def new_table(**options: Any) -> Table:
    """A table with a line below its headings; ``options`` are those of ``rich.table.Table``."""
    return Table(**{"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), **options})


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Sentences, wrapped by the terminal alone, so that a long one can be copied whole."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
