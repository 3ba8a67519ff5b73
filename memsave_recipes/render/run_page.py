"""A comparison as one HTML file that needs no server, for screens of any size.

``page.html`` has the style and a script that only adds tooltips, highlights and sorting; the content is written here.
Its content security policy forbids every request. All text of runs is escaped.
"""

from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template

from memsave_recipes.compare.compare import ComparisonRow, ComparisonTable, RunDifference, config_differences, traits
from memsave_recipes.render.charts import Entry, badge, loss_curves, memory_bars, scatter
from memsave_recipes.render.run_table import (
    Column,
    all_columns,
    loss_difference,
    loss_difference_headings,
    marks,
    notes,
    warnings,
)

IN_THE_TITLE = ("device", "mixed precision", "torch")


def to_html(table: ComparisonTable) -> str:
    """The whole page: for each model a table, three charts and the differences of the configurations."""
    numbers = iter(range(1, len(table.rows) + 1))
    sections = [[(next(numbers), row) for row in rows] for rows in table.sections]
    return fill_page(
        f"{_counted(len(table.rows), 'run')} compared",
        " · ".join(_common(table)),
        [note for note in notes(table) if not note.startswith("!")],
        "".join(map(_section, sections)),
    )


def fill_page(title: str, subtitle: str, lines: Sequence[str], sections: str) -> str:
    """``page.html`` with these texts, which are escaped, and ``sections``, which is HTML."""
    template = Template(resources.files("memsave_recipes.render").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        subtitle=escape(subtitle),
        notes="".join(f"<li>{escape(line)}</li>" for line in lines),
        sections=sections,
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _common(table: ComparisonTable) -> list[str]:
    """The device, precision and version of torch, where all runs share them."""
    known = [traits(row.run) for row in table.rows]
    shared = {trait: {traits.get(trait) for traits in known} for trait in IN_THE_TITLE}
    return [
        f"{trait}: {value}" if trait != "device" else value
        for trait, values in shared.items()
        if len(values) == 1 and (value := next(iter(values)))
    ]


def _section(entries: Sequence[Entry]) -> str:
    rows = [row for _, row in entries]
    charts = [
        scatter(entries),
        memory_bars(entries),
        loss_curves(entries, "train/loss", "Training loss"),
        loss_curves(entries, "eval/loss", "Evaluation loss"),
    ]
    return (
        f"<section><h2>{escape(rows[0].model or 'unknown model')}</h2>"
        + "".join(f'<p class="warning">{escape(line)}</p>' for line in warnings(rows))
        + _table(entries)
        + f'<div class="charts">{"".join(charts)}</div>'
        + _differences(entries)
        + "</section>"
    )


def _table(entries: Sequence[Entry]) -> str:
    rows = [row for _, row in entries]
    figures, last = all_columns(rows), loss_difference_headings(rows)
    titles = ["run", "plan, batch layout", *(column.title for column in figures), *last]
    headings = "".join(f'<th><button type="button">{escape(title)}</button></th>' for title in titles)
    body = "".join(_table_row(number, row, figures, has_loss_difference=bool(last)) for number, row in entries)
    return f'<div class="card scroll"><table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table></div>'


def _table_row(number: int, row: ComparisonRow, figures: Sequence[Column], *, has_loss_difference: bool) -> str:
    tags = "".join(f"<em{' class=warn' if mark.startswith('!') else ''}>{escape(mark)}</em>" for mark in marks(row))
    cells = "".join(_figure_cell(row, column) for column in figures)
    if has_loss_difference:
        cells += f'<td class="number" data-value="{_sortable(row.loss_difference)}">{loss_difference(row)}</td>'
    return (
        f'<tr data-run="{number}"><th data-value="{number}"><div>{badge(number)}<span>{escape(row.name)}{tags}</span>'
        f"</div></th>{_method_cell(row)}{cells}</tr>"
    )


def _method_cell(row: ComparisonRow) -> str:
    plan, layout = escape(row.plan or "-"), escape(row.layout or "-")
    return f'<td data-value="{plan} {layout}">{plan}<small>{layout}</small></td>'


def _figure_cell(row: ComparisonRow, column: Column) -> str:
    absolute, relative = column.texts(row)
    change = f'<small class="{_verdict(row, column)}">{relative}</small>' if relative else ""
    return f'<td class="number" data-value="{_sortable(column.figure(row).value)}">{absolute}{change}</td>'


def _sortable(value: float | None) -> str:
    return "" if value is None else str(value)


def _verdict(row: ComparisonRow, column: Column) -> str:
    """``good`` or ``bad`` for a change of at least half a per cent, where one way is better."""
    ratio = column.figure(row).ratio
    if ratio is None or column.good is None or abs(ratio - 1) < 0.005:
        return "even"
    return "good" if (ratio < 1) == (column.good == "low") else "bad"


def _differences(entries: Sequence[Entry]) -> str:
    """The configuration values that differ within the section, each with the runs that have it."""
    found = config_differences([row.run for _, row in entries])
    if not found:
        return ""
    rows = "".join(_difference(difference, entries) for difference in found)
    return f'<details class="card" open><summary>Differences of the configurations</summary><dl>{rows}</dl></details>'


def _difference(difference: RunDifference, entries: Sequence[Entry]) -> str:
    values = "".join(
        f"<span><code>{escape(value)}</code>{''.join(badge(entries[holder][0]) for holder in holders)}</span>"
        for value, holders in difference.values.items()
    )
    return f"<dt>{escape(difference.name)}</dt><dd>{values}</dd>"
