"""Predictions as a table for a terminal: a line a class, or the text that a model generated."""

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from memsave_recipes.render import new_console, new_table
from memsave_recipes.text import printable, printable_lines


def show(rows: Sequence[dict[str, Any]]) -> None:
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
