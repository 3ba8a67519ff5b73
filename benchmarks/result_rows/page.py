"""The results table as Markdown, and as a page that sorts and filters by model and device.

Both are made from the rows alone, so they are the same wherever they are made, and each row links to its file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from memsave_recipes.compare import ComparisonRow, compare, layout_of
from memsave_recipes.render.charts import badge, scatter
from memsave_recipes.render.comparison import counted, fill_page, in_markdown, sortable
from memsave_recipes.text import format_bytes, format_rate
from result_rows.rows import ResultRow

TITLE = "Results"
FOLDER = "rows"  # of the rows, beside the page
NOTES = (
    "peak memory: of a whole step on one device, the largest over ranks; beside it, how far the prediction is off",
    "saved for backward: activations that the forward of the first micro-batch keeps for its backward",
    "samples/s: over all ranks, with the middle half of the logging windows",
    "time: of a sample, beside the plain run of the same workload on the same hardware",
    "-: not measured, or measured on a machine that had other work",
    "pareto: no run of the same workload on the same hardware has both less memory and more speed",
)
COMMIT_LETTERS = 10

Entry = tuple[int, ResultRow]
"""A row with its number on the page."""
Cell = tuple[str, str]
"""A text and its second line, which may be empty."""


@dataclass(frozen=True)
class ResultColumn:
    """A figure of every row, its text, and a second line of text that may be empty."""

    title: str
    value: Callable[[ResultRow], float | None]
    text: Callable[[float], str]
    detail: Callable[[ResultRow], str] = lambda row: ""

    def cell(self, row: ResultRow) -> Cell:
        """The figure and its detail."""
        value = self.value(row)
        return ("-", "") if value is None else (self.text(value), self.detail(row))


def _error(row: ResultRow) -> str:
    if row.predicted_peak_bytes is None or row.peak_bytes is None:
        return ""
    return f"{100 * (row.predicted_peak_bytes / row.peak_bytes - 1):+.2f} %"


def _middle_half(row: ResultRow) -> str:
    if row.samples_per_s_quartiles is None:
        return ""
    return " to ".join(map(format_rate, row.samples_per_s_quartiles)) + f", {row.num_windows} windows"


COLUMNS = (
    ResultColumn("predicted peak", lambda row: row.predicted_peak_bytes, format_bytes),
    ResultColumn("peak memory", lambda row: row.peak_bytes, format_bytes, _error),
    ResultColumn("saved for backward", lambda row: row.saved_for_backward_bytes, format_bytes),
    ResultColumn("samples/s", lambda row: row.samples_per_s, format_rate, _middle_half),
    ResultColumn("time", lambda row: row.time_ratio, "x{:.2f}".format),
    ResultColumn("quality", lambda row: row.quality, "{:.4f}".format, lambda row: str(row.metric).replace("_", " ")),
)
TEXTS = ("plan", "batch layout", "device")
MADE_WITH = "made with"
HEADINGS = (*TEXTS, *(column.title for column in COLUMNS), MADE_WITH)


def results_markdown(rows: Sequence[ResultRow]) -> str:
    """The page as Markdown: a table for each model."""
    parts = [f"# {TITLE}", f"Made by `make results` from the files in `{FOLDER}`; do not edit."]
    for model, of_model in groupby(_sorted(rows), _model):
        lines = [HEADINGS, ["---"] * len(TEXTS) + ["---:"] * len(COLUMNS) + ["---"]]
        lines += [_markdown_cells(row, rows) for row in of_model]
        parts += [f"## {in_markdown(model)}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    parts.append("\n".join(f"* {line}" for line in NOTES if not line.startswith("pareto")))
    return "\n\n".join(parts) + "\n"


def _markdown_cells(row: ResultRow, rows: Sequence[ResultRow]) -> list[str]:
    cells = [_method(row, rows), (_layout(row), ""), _hardware(row), *_figures(row), _made_with(row)]
    (plan, method), *others = [tuple(map(in_markdown, cell)) for cell in cells]
    linked = (f"[{plan}]({_link(row)})", method)
    return [f"{text} ({detail})" if detail else text for text, detail in (linked, *others)]


def results_page(rows: Sequence[ResultRow]) -> str:
    """The page as HTML, in one file."""
    entries = list(enumerate(_sorted(rows), start=1))
    compared = {one.run.name: one for one in compare([row.to_run() for row in rows]).rows}
    body = "".join(_table_row(entry, rows, compared[entry[1].name]) for entry in entries)
    headings = "".join(map(_heading, ("model", *HEADINGS)))
    table = f'<div class="card scroll"><table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table></div>'
    charts = [
        _chart(model, device, [(number, compared[row.name]) for number, row in group])
        for (model, device), group in groupby(entries, lambda entry: (_model(entry[1]), _device(entry[1])))
    ]
    return fill_page(TITLE, counted(len(rows), "run"), NOTES, _filters(rows) + table + "".join(charts))


def _heading(title: str) -> str:
    kind = ' class="left"' if title in (*TEXTS, MADE_WITH) else ""
    return f'<th{kind}><button type="button">{title}</button></th>'


def _filters(rows: Sequence[ResultRow]) -> str:
    def select(name: str, values: set[str]) -> str:
        options = "".join(f'<option value="{escape(value)}">{escape(value)}</option>' for value in sorted(values))
        return f'<label>{name} <select data-filter="{name}"><option value="">all</option>{options}</select></label>'

    models, devices = select("model", set(map(_model, rows))), select("device", set(map(_device, rows)))
    return f'<div class="filters">{models}{devices}</div>'


def _table_row(entry: Entry, rows: Sequence[ResultRow], compared: ComparisonRow) -> str:
    number, row = entry
    mark = "<em>pareto</em>" if compared.is_pareto_optimal else ""
    plan, method = _method(row, rows)
    figures = (
        _cell(cell, sortable(column.value(row)), "number") for column, cell in zip(COLUMNS, _figures(row), strict=True)
    )
    return (
        f'<tr data-run="{number}" {_of(_model(row), _device(row))}><th data-value="{escape(row.model)}">'
        f"<div>{badge(number)}<span>{escape(row.model)}{mark}</span></div></th>"
        f'<td data-value="{escape(plan)}"><a href="{_link(row)}">{escape(plan)}</a><small>{escape(method)}</small></td>'
        + "".join(_cell(cell, cell[0]) for cell in ((_layout(row), ""), _hardware(row)))
        + "".join(figures)
        + _cell(made := _made_with(row), made[0])
        + "</tr>"
    )


def _cell(cell: Cell, value: str, kind: str = "") -> str:
    text, detail = map(escape, cell)
    return f'<td class="{kind}" data-value="{escape(value)}">{text}<small>{detail}</small></td>'


def _chart(model: str, device: str, entries: Sequence[tuple[int, ComparisonRow]]) -> str:
    """Memory against throughput of a model on a device; empty unless two runs have both."""
    chart = scatter(entries)
    if not chart:
        return ""
    heading = f"{escape(model)} <small>{escape(device)}</small>"
    return f'<section {_of(model, device)}><h2>{heading}</h2><div class="charts">{chart}</div></section>'


def _of(model: str, device: str) -> str:
    """What the filters read."""
    return f'data-model="{escape(model)}" data-device="{escape(device)}"'


def _sorted(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """By model and device, then by peak, the largest first."""
    return sorted(rows, key=lambda row: (_model(row), _device(row), -(row.peak_bytes or 0), row.name))


def _model(row: ResultRow) -> str:
    return row.model


def _device(row: ResultRow) -> str:
    return row.device or "unknown device"


def _link(row: ResultRow) -> str:
    return f"{FOLDER}/{row.name}.json"


def _method(row: ResultRow, rows: Sequence[ResultRow]) -> Cell:
    """The plan, and the flags and traits in which rows of the model differ."""
    described = [{**one.workload, **one.settings} for one in rows if one.model == row.model]
    own = {**row.workload, **row.settings}
    differing = [name for name in own if any(other.get(name, own[name]) != own[name] for other in described)]
    return row.plan, ", ".join(f"{name.replace('_', ' ')} {own[name]}" for name in differing)


def _layout(row: ResultRow) -> str:
    """As ``memsave compare`` has it: micro-batch, ranks, accumulation steps."""
    return layout_of(row.to_run()) or "-"


def _hardware(row: ResultRow) -> Cell:
    return _device(row), "" if row.num_threads is None else counted(row.num_threads, "CPU thread")


def _figures(row: ResultRow) -> list[Cell]:
    return [column.cell(row) for column in COLUMNS]


def _made_with(row: ResultRow) -> Cell:
    commit = f"commit {row.git_commit[:COMMIT_LETTERS]}" if row.git_commit else ""
    return f"torch {row.versions.get('torch', '-')}", commit
