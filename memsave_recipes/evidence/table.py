"""The table: a comparison as text, for a terminal, as Markdown and as CSV."""

import csv
import io
import shutil

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memsave_recipes.evidence.columns import (
    all_columns,
    columns,
    loss_difference,
    loss_difference_headings,
    marks,
    notes,
)
from memsave_recipes.evidence.compare import ComparisonRow, ComparisonTable

MARKUP = "\\|*_`<>[]&~$"
FORMULA = tuple("=+-@＝＋－＠")  # the wide ones too: some spreadsheets read them as the others


def show(table: ComparisonTable) -> None:
    """Prints the table, 120 columns wide where there is no terminal to say how wide."""
    Console(width=shutil.get_terminal_size(fallback=(120, 24)).columns).print(render(table))


def render(table: ComparisonTable) -> Table:
    """The table as the terminal shows it: under each figure, how it compares to the baseline's."""
    figures, last = columns(table.rows), loss_difference_headings(table.rows)
    caption = Text("\n").join(_as_caption(line) for line in notes(table))
    drawn = Table(box=box.SIMPLE_HEAD, padding=0, caption=caption, caption_justify="left")
    drawn.add_column("run", overflow="fold", min_width=12)
    drawn.add_column("plan\ngeometry", overflow="fold", min_width=10)
    for heading in (*(column.heading for column in figures), *last):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for rows in table.sections:
        drawn.add_section()
        drawn.add_row(Text(rows[0].model or "unknown model", style="bold"))
        for row in rows:
            cells = [_two_lines(*column.texts(row)) for column in figures]
            cells += [Text(loss_difference(row)) for _ in last]
            drawn.add_row(_name_and_marks(row), _plan_and_geometry(row), *cells)
    return drawn


def to_markdown(table: ComparisonTable) -> str:
    """A table that GitHub shows, and the notes below it."""
    figures, last = all_columns(table.rows), loss_difference_headings(table.rows)
    titles = [*(column.title for column in figures), *(heading.replace("\n", " ") for heading in last)]
    headings = ["run", "plan", "geometry", *map(_in_markdown, titles)]
    lines = [headings, ["---"] * 3 + ["---:"] * len(titles)]
    for rows in table.sections:
        lines.append([f"**{_in_markdown(rows[0].model or 'unknown model')}**", *[""] * (len(headings) - 1)])
        for row in rows:
            texts = (column.texts(row) for column in figures)
            cells = [f"{absolute} ({relative})" if relative else absolute for absolute, relative in texts]
            name = " ".join((row.name, *(f"({mark})" for mark in marks(row))))
            first = (name, row.plan or "-", row.geometry or "-")
            lines.append([*map(_in_markdown, first), *cells, *(loss_difference(row) for _ in last)])
    listed = [f"* {_in_markdown(line)}" for line in notes(table)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *listed]) + "\n"


def to_csv(table: ComparisonTable) -> str:
    """A line a run, every figure as a plain number, ``*_ratio`` to the baseline's; empty where it is unknown."""
    text = io.StringIO()
    records = [_record(row) for row in table.rows]
    writer = csv.DictWriter(text, fieldnames=list(dict.fromkeys(key for record in records for key in record)))
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _name_and_marks(row: ComparisonRow) -> Text:
    name = Text(row.name)
    for mark in marks(row):
        name.append(f"\n{mark}", style="yellow" if mark.startswith("!") else "green")
    return name


def _plan_and_geometry(row: ComparisonRow) -> Text:
    return Text(f"{row.plan or '-'}\n{row.geometry or '-'}")


def _as_caption(line: str) -> Text:
    return Text(line, style="yellow" if line.startswith("!") else "")


def _two_lines(absolute: str, relative: str | None) -> Text:
    cell = Text(absolute)
    return cell if relative is None else cell.append(f"\n{relative}", style="cyan")


def _in_markdown(text: str) -> str:
    """``text`` without what would end the cell or mark it up."""
    return "".join(f"\\{letter}" if letter in MARKUP else letter for letter in text)


def _in_csv(text: str | None) -> str | None:
    """``text`` as what a spreadsheet takes for text: one that begins like a formula has an apostrophe before it."""
    return f"'{text}" if text and text.lstrip().startswith(FORMULA) else text


def _record(row: ComparisonRow) -> dict[str, object]:
    figures = {
        "peak_memory_bytes": row.peak_memory,
        "saved_for_backward_bytes": row.saved_for_backward,
        "samples_per_s": row.samples_per_s,
        "tokens_per_s": row.tokens_per_s,
        "mfu_pct": row.mfu_pct,
        "train_time_s": row.train_time,
        "train_loss": row.train_loss,
        **{f"eval_{name}": figure for name, figure in row.evaluation.items()},
    }
    return {
        "run": _in_csv(row.name),
        "model": _in_csv(row.model),
        "plan": _in_csv(row.plan),
        "geometry": _in_csv(row.geometry),
        "is_baseline": row.is_baseline,
        "is_pareto_optimal": row.is_pareto_optimal,
        "not_comparable_in": "; ".join(row.differs),
        **{key: figure.value for key, figure in figures.items()},
        **{f"{key}_ratio": figure.ratio for key, figure in figures.items()},
        "largest_loss_difference": row.loss_difference,
    }
