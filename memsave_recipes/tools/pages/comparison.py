"""A comparison as a table for a terminal and as Markdown.

Figures that no run recorded have no column.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

from memsave_recipes.core.text import HUGE, format_bytes, format_rate, format_seconds
from memsave_recipes.tools.compare import (
    METRICS,
    OF_EVALUATION,
    PEAK,
    SPEED,
    ComparisonRow,
    ComparisonTable,
    Figure,
    trait_differences,
)
from memsave_recipes.tools.pages import new_table, show_all

NO_FIGURE = Figure(value=None)
LOSS_DIFFERENCE = "largest\nloss\ndifference"
MAX_NAMES = 4
MARKUP = "\\|*_`<>[]&~$"


def show(table: ComparisonTable) -> None:
    """Print the table."""
    show_all(render(table))


def render(table: ComparisonTable) -> Table:
    """Return the table for a terminal: below each figure its relation to the baseline's."""
    figures, last = columns(table.rows), loss_difference_headings(table.rows)
    caption = Text("\n").join(Text(line, "yellow" if line.startswith("!") else "") for line in notes(table))
    drawn = new_table(padding=0, caption=caption, caption_justify="left")
    drawn.add_column("run", overflow="fold", min_width=12)
    drawn.add_column("plan,\nbatch layout", overflow="fold", min_width=10)
    for heading in (*(column.heading for column in figures), *last):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for rows in table.sections:
        drawn.add_section()
        drawn.add_row(Text(rows[0].model or "unknown model", style="bold"))
        for row in rows:
            cells = [_two_lines(*column.texts(row)) for column in figures]
            cells += [Text(loss_difference(row)) for _ in last]
            drawn.add_row(_name_and_marks(row), Text(f"{row.plan or '-'}\n{row.layout or '-'}"), *cells)
    return drawn


def to_markdown(table: ComparisonTable) -> str:
    """Return a Markdown table, with the notes below it."""
    figures, last = all_columns(table.rows), loss_difference_headings(table.rows)
    titles = [*(column.title for column in figures), *(heading.replace("\n", " ") for heading in last)]
    headings = ["run", "plan", "batch layout", *map(in_markdown, titles)]
    lines = [headings, ["---"] * 3 + ["---:"] * len(titles)]
    for rows in table.sections:
        lines.append([f"**{in_markdown(rows[0].model or 'unknown model')}**", *[""] * (len(headings) - 1)])
        for row in rows:
            texts = (column.texts(row) for column in figures)
            cells = [f"{absolute} ({relative})" if relative else absolute for absolute, relative in texts]
            name = " ".join((row.name, *(f"({mark})" for mark in marks(row))))
            first = (name, row.plan or "-", row.layout or "-")
            lines.append([*map(in_markdown, first), *cells, *(loss_difference(row) for _ in last)])
    items = [f"* {in_markdown(line)}" for line in notes(table)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *items]) + "\n"


def loss_difference_headings(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return ``LOSS_DIFFERENCE``, if a run is compared with another one."""
    return [] if all(row.is_baseline for row in rows) else [LOSS_DIFFERENCE]


def loss_difference(row: ComparisonRow) -> str:
    """Return the largest difference to the baseline's loss curve."""
    if row.is_baseline:
        return "baseline"
    return "-" if row.loss_difference is None else f"{row.loss_difference:.3g}"


def _fixed(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}" if abs(value) < HUGE else f"{value:.3g}"


def _decimals(value: float) -> str:
    return _fixed(value, 4)


def _percent_more(figure: Figure) -> str | None:
    if figure.ratio is None or abs(figure.ratio) >= HUGE:
        return _factor(figure)
    return f"{round(100 * figure.ratio) - 100:+d} %"


def _factor(figure: Figure) -> str | None:
    return None if figure.ratio is None else f"x{_fixed(figure.ratio, 2)}"


def _change(figure: Figure) -> str | None:
    if figure.difference is None:
        return None
    return "same" if figure.difference == 0 else f"{figure.difference:+.2g}"


@dataclass(frozen=True)
class Column:
    """A figure of every row: its text, its text relative to the baseline, and whether low or high is good."""

    key: str
    heading: str
    absolute: Callable[[float], str]
    relative: Callable[[Figure], str | None]
    good: Literal["low", "high"] | None = None

    @property
    def title(self) -> str:
        """The heading in one line."""
        return self.heading.replace("\n/", "/").replace("\n", " ")

    def figure(self, row: ComparisonRow) -> Figure:
        """Return the figure; one without a value where the run has none."""
        return row.figures.get(self.key, NO_FIGURE)

    def texts(self, row: ComparisonRow) -> tuple[str, str | None]:
        """Return the figure, and its relation to the baseline's."""
        figure = self.figure(row)
        return ("-" if figure.value is None else self.absolute(figure.value)), self.relative(figure)


COST = (
    Column(PEAK, "peak\nmemory", format_bytes, _percent_more, "low"),
    Column("saved_for_backward_bytes", "saved for\nbackward", format_bytes, _percent_more, "low"),
    Column(SPEED, "samples\n/s", format_rate, _factor, "high"),
    Column("tokens_per_s", "tokens\n/s", format_rate, _factor, "high"),
    Column("mfu_pct", "MFU", lambda value: f"{_fixed(value, 1)} %", _factor, "high"),
    Column("train_time_s", "train\ntime", format_seconds, _factor, "low"),
)
TRAIN_LOSS = Column("train_loss", "train\nloss", _decimals, _change)


def columns(rows: Sequence[ComparisonRow]) -> list[Column]:
    """Return the columns that fit a terminal, with one metric of each evaluation."""
    metrics = list(dict.fromkeys(row.metric for row in rows if row.metric))
    without = [TRAIN_LOSS] if any(row.metric is None for row in rows) else []
    return _filled([*COST, *map(_metric_column, metrics), *without], rows)


def all_columns(rows: Sequence[ComparisonRow]) -> list[Column]:
    """Return every column that ``rows`` have a figure for."""
    found = dict.fromkeys(name for row in rows for name in row.evaluation)
    metrics = sorted(found, key=lambda name: METRICS.index(name) if name in METRICS else len(METRICS))
    return _filled([*COST, *map(_metric_column, metrics), TRAIN_LOSS], rows)


def notes(table: ComparisonTable) -> list[str]:
    """Return notes on the figures; ``!`` begins a warning."""
    lines = [f"peak memory: {'; '.join(table.memory_sources)}"] if table.memory_sources else []
    if any(row.value("saved_for_backward_bytes") is not None for row in table.rows):
        lines.append("saved for backward: activations that the forward keeps for the backward")
    if any(row.is_pareto_optimal for row in table.rows):
        lines.append("pareto: no run of the same workload has both less memory and more speed")
    if len(table.sections) > 1:
        lines.append("each model is compared within itself alone")
    return lines + [f"! {line}" for rows in table.sections for line in warnings(rows)]


def warnings(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return a line for each trait in which the runs of a section are not comparable."""
    model = rows[0].model or "unknown model"
    return [
        f"not comparable: runs of {model} differ in {difference.name}: "
        + ", ".join(f"{value} ({_names(rows, holders)})" for value, holders in difference.values.items())
        for difference in trait_differences([row.run for row in rows])
    ]


def marks(row: ComparisonRow) -> list[str]:
    """Return ``pareto``, and ``!`` with the traits that differ from the baseline's."""
    optimal = ["pareto"] if row.is_pareto_optimal else []
    return [*optimal, f"! other {', '.join(row.differs)}"] if row.differs else optimal


def _metric_column(name: str) -> Column:
    return Column(f"{OF_EVALUATION}{name}", name.replace("_", "\n"), _decimals, _change)


def _filled(candidates: Sequence[Column], rows: Sequence[ComparisonRow]) -> list[Column]:
    return [column for column in candidates if any(column.figure(row).value is not None for row in rows)]


def _names(rows: Sequence[ComparisonRow], positions: Sequence[int]) -> str:
    names = [rows[position].name for position in positions[:MAX_NAMES]]
    more = len(positions) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _name_and_marks(row: ComparisonRow) -> Text:
    name = Text(row.name)
    for mark in marks(row):
        name.append(f"\n{mark}", style="yellow" if mark.startswith("!") else "green")
    return name


def _two_lines(absolute: str, relative: str | None) -> Text:
    cell = Text(absolute)
    return cell if relative is None else cell.append(f"\n{relative}", style="cyan")


def in_markdown(text: str) -> str:
    """Escape the characters that end a cell or are markup."""
    return "".join(f"\\{letter}" if letter in MARKUP else letter for letter in text)
