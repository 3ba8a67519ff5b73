"""HTML pages that need no other file and no server: tables that a click on a heading sorts, and charts as SVG.

``page.html`` has markup, style and script; its content security policy forbids every request. All text is escaped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources

from jinja2 import Template

from memsave_recipes.tools.compare import ComparisonRow, ComparisonTable, RunDifference, config_differences, traits
from memsave_recipes.tools.pages.comparison import (
    Column,
    all_columns,
    loss_difference,
    loss_difference_headings,
    marks,
    notes,
    warnings,
)

IN_THE_TITLE = ("device", "mixed precision", "torch")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a table.

    Args:
        text, detail: its two lines; the second one may be empty.
        sort_by: its place in the order of its column; an unknown one comes last.
        kind: ``number``, which is aligned to the right, or nothing.
        verdict: of the detail: ``good``, ``bad`` or nothing.
        link: a file beside the page.
        parts: a bar in place of the text, by kind of memory in per cent.
    """

    text: str = ""
    detail: str = ""
    sort_by: float | str | None = None
    kind: str = "number"
    verdict: str = ""
    link: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: number, name and marks, then its cells.

    Args:
        color: index of the color of its number, as in the charts.
        is_chosen, is_over: whether it is the one to take, or does not fit.
        filters: by name, the values by which the page's filters find it.
    """

    number: int
    color: int
    name: str
    cells: Sequence[Cell]
    marks: Sequence[str] = ()
    is_chosen: bool = False
    is_over: bool = False
    filters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table with what belongs to it.

    Args:
        command: a command line above it.
        parts: the kinds of memory of its bars.
        charts: SVG, as ``plot.to_svg`` returns it.
        differences: of configurations, by the positions of the rows.
    """

    headings: Sequence[str]
    rows: Sequence[Row]
    title: str = ""
    warnings: Sequence[str] = ()
    command: str = ""
    parts: Sequence[str] = ()
    charts: Sequence[str] = ()
    differences: Sequence[RunDifference] = ()


def render_page(
    title: str,
    subtitle: str,
    notes: Sequence[str],
    sections: Sequence[Section],
    filters: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return the page; ``filters`` are the values to choose from, by the names of rows' filters."""
    page: str = _template().render(title=title, subtitle=subtitle, notes=notes, sections=sections, filters=filters)
    return page


def confusion_table(confusion: Mapping[str, Sequence[int]]) -> str:
    """Return the samples of each class by prediction as HTML; deeper colors for more, other ones for mistakes."""
    return str(_template().module.confusion_table(confusion))  # type: ignore[attr-defined]  # a macro


def _template() -> Template:
    text = resources.files("memsave_recipes.tools.pages").joinpath("page.html").read_text(encoding="utf-8")
    template: Template = Template(
        text, autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return template


def counted(number: int, noun: str) -> str:
    """Return ``1 run``, ``2 runs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def to_html(table: ComparisonTable) -> str:
    """Return the page of a comparison: for each model a table, its charts and the differences of the configurations."""
    return render_page(
        f"{counted(len(table.rows), 'run')} compared",
        " · ".join(_common(table)),
        [note for note in notes(table) if not note.startswith("!")],
        list(map(_section, table.sections)),
    )


def _common(table: ComparisonTable) -> list[str]:
    """Return the device, precision and version of torch, where all runs share them."""
    known = [traits(row.run) for row in table.rows]
    shared = {trait: {traits.get(trait) for traits in known} for trait in IN_THE_TITLE}
    return [
        f"{trait}: {value}" if trait != "device" else value
        for trait, values in shared.items()
        if len(values) == 1 and (value := next(iter(values)))
    ]


def _section(rows: Sequence[ComparisonRow]) -> Section:
    from memsave_recipes.tools.pages.charts import svg_charts

    figures, last = all_columns(rows), loss_difference_headings(rows)
    return Section(
        title=rows[0].model or "unknown model",
        warnings=warnings(rows),
        headings=["run", "plan, batch layout", *(column.title for column in figures), *last],
        rows=[
            Row(
                number=number,
                color=number - 1,
                name=row.name,
                marks=marks(row),
                cells=[
                    Cell(text=row.plan or "-", detail=row.layout or "-", sort_by=f"{row.plan} {row.layout}", kind=""),
                    *(_figure_cell(row, column) for column in figures),
                    *(Cell(text=loss_difference(row), sort_by=row.loss_difference) for _ in last),
                ],
            )
            for number, row in enumerate(rows, start=1)
        ],
        charts=svg_charts(rows),
        differences=config_differences([row.run for row in rows]),
    )


def _figure_cell(row: ComparisonRow, column: Column) -> Cell:
    absolute, relative = column.texts(row)
    value = column.figure(row).value
    return Cell(text=absolute, detail=relative or "", sort_by=value, verdict=_verdict(row, column))


def _verdict(row: ComparisonRow, column: Column) -> str:
    """Return ``good`` or ``bad`` for a change of at least half a per cent, where one way is better."""
    ratio = column.figure(row).ratio
    if ratio is None or column.good is None or abs(ratio - 1) < 0.005:
        return ""
    return "good" if (ratio < 1) == (column.good == "low") else "bad"
