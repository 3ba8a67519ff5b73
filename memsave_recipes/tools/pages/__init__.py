"""Tables, HTML pages and plots of plans and of compared runs; here what all tables share."""

import re
import shutil
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memsave_recipes.core.text import printable, printable_lines

ANY_COLUMNS = 10_000  # where no terminal says how wide it is: no cell is cut
HEADINGS = {"generated_text": ("generated text",), "value": ("value",)}
ON_THE_RIGHT = {"probability", "value"}
BLANKS = re.compile(" +$", re.MULTILINE)
"""They fill the last column of a table."""


def show_all(*parts: Table | Text | str) -> None:
    """Print tables and sentences, as wide as the terminal; long sentences are left to it, to be copied whole."""
    console = Console(width=shutil.get_terminal_size(fallback=(ANY_COLUMNS, 24)).columns)
    with console.capture() as captured:
        for part in parts:
            console.print(part, highlight=False, soft_wrap=isinstance(part, str))
    print(BLANKS.sub("", captured.get().removesuffix("\n")), flush=True)


def new_table(**options: Any) -> Table:
    """Return a table with a line below its headings; ``options`` are those of ``rich.table.Table``."""
    return Table(**{"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), **options})


def show_predictions(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of ``inference.predict``."""
    table = new_table()
    table.add_column("input", overflow="fold")
    keys = set().union(*rows)
    headings = next((one for key, one in HEADINGS.items() if key in keys), ("class", "probability"))
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading in ON_THE_RIGHT else "left")
    for row in rows:
        name = Text(printable(row["input"]))
        if "generated_text" in row:
            table.add_row(name, Text(printable_lines(row["generated_text"])))
        if "value" in row:
            table.add_row(name, f"{row['value']:.4f}")
        for prediction in row.get("predictions", ()):
            table.add_row(name, Text(printable(prediction["label"])), f"{prediction['probability']:.4f}")
            name = Text()
    show_all(table)
