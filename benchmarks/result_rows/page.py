"""The results table as Markdown, and as a page that sorts and filters by model and device.

Both are made from the rows alone, so they are the same wherever they are made, and each row links to its file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from memsave_recipes.core.text import format_bytes, format_rate
from memsave_recipes.tools.compare import compare, layout_of
from memsave_recipes.tools.pages.comparison import in_markdown
from memsave_recipes.tools.pages.page import Cell, Row, Section, counted, render_page
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

Texts = tuple[str, str]
"""A text and its second line, which may be empty."""


@dataclass(frozen=True)
class ResultColumn:
    """A figure of every row, its text, and a second line of text that may be empty."""

    title: str
    value: Callable[[ResultRow], float | None]
    text: Callable[[float], str]
    detail: Callable[[ResultRow], str] = lambda row: ""

    def cell(self, row: ResultRow) -> Texts:
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
    optimal = {one.run.name for one in compare([row.to_run() for row in rows]).rows if one.is_pareto_optimal}
    shown = [
        Row(
            number=number,
            color=number - 1,
            name=row.model,
            marks=["pareto"] if row.name in optimal else [],
            cells=_cells(row, rows),
            filters={"model": row.model, "device": _device(row)},
        )
        for number, row in enumerate(_sorted(rows), start=1)
    ]
    filters = {name: sorted({row.filters[name] for row in shown}) for name in ("model", "device")}
    section = Section(headings=("model", *HEADINGS), rows=shown)
    return render_page(TITLE, counted(len(rows), "run"), NOTES, [section], filters)


def _cells(row: ResultRow, rows: Sequence[ResultRow]) -> list[Cell]:
    plan, method = _method(row, rows)
    figures = zip(COLUMNS, _figures(row), strict=True)
    return [
        Cell(text=plan, detail=method, sort_by=plan, link=_link(row), kind=""),
        *(_text_cell(texts) for texts in ((_layout(row), ""), _hardware(row))),
        *(Cell(text=text, detail=detail, sort_by=column.value(row)) for column, (text, detail) in figures),
        _text_cell(_made_with(row)),
    ]


def _text_cell(texts: Texts) -> Cell:
    text, detail = texts
    return Cell(text=text, detail=detail, sort_by=text, kind="")


def _sorted(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """By model and device, then by peak, the largest first."""
    return sorted(rows, key=lambda row: (_model(row), _device(row), -(row.peak_bytes or 0), row.name))


def _model(row: ResultRow) -> str:
    return row.model


def _device(row: ResultRow) -> str:
    return row.device or "unknown device"


def _link(row: ResultRow) -> str:
    return f"{FOLDER}/{row.name}.json"


def _method(row: ResultRow, rows: Sequence[ResultRow]) -> Texts:
    """The plan, and the flags and traits in which rows of the model differ."""
    described = [{**one.workload, **one.settings} for one in rows if one.model == row.model]
    own = {**row.workload, **row.settings}
    differing = [name for name in own if any(other.get(name, own[name]) != own[name] for other in described)]
    return row.plan, ", ".join(f"{name.replace('_', ' ')} {own[name]}" for name in differing)


def _layout(row: ResultRow) -> str:
    """As ``memsave compare`` has it: micro-batch, ranks, accumulation steps."""
    return layout_of(row.to_run()) or "-"


def _hardware(row: ResultRow) -> Texts:
    return _device(row), "" if row.num_threads is None else counted(row.num_threads, "CPU thread")


def _figures(row: ResultRow) -> list[Texts]:
    return [column.cell(row) for column in COLUMNS]


def _made_with(row: ResultRow) -> Texts:
    commit = f"commit {row.git_commit[:COMMIT_LETTERS]}" if row.git_commit else ""
    return f"torch {row.versions.get('torch', '-')}", commit
