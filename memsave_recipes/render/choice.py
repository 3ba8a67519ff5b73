"""The planner's choice in the terminal: its candidates, the blocks of the chosen plan, and the rows of ``memsave fit``.

The baseline, in tables and texts, is the same micro-batch without checkpointing (``none``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from memsave_recipes.planner.budget import WORKSPACES, Forecast
from memsave_recipes.planner.search import Candidate, Choice, host_line, reduction_line
from memsave_recipes.plans.plan import Plan, Span
from memsave_recipes.plans.simulate import SpanCosts, keep_all, span_costs
from memsave_recipes.render import new_table, show_all
from memsave_recipes.step.batch_layout import BatchLayout
from memsave_recipes.text import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from memsave_recipes.planner.ladder import Rung  # needs an extra

BAR_COLUMNS = 24  # of the longest bar
BLOCK_BAR_COLUMNS = 16
MAX_ROWS = 12  # of a table that shows every candidate unasked
OVERHEADS = "overheads"
PARTS = {  # letter and color in a bar
    "parameters": ("P", "blue"),
    "gradients": ("G", "cyan"),
    "optimizer state": ("S", "magenta"),
    "communication": ("C", "green"),
    "activations": ("A", "yellow"),
    "temporaries": ("T", "red"),
    OVERHEADS: ("O", "bright_black"),
}
OVERHEAD_SOURCES = {
    "CUDA context": "assumed: the driver and torch's kernels take 300 to 700 MiB",
    "device context": "reported by the driver as in use outside torch, other processes included",
    WORKSPACES: "kept by the libraries of matrix products; two of cuBLAS are assumed where nothing is measured",
    "reserve": "1 % of the activations that the baseline saves for backward, for errors of the prediction",
}


def show_choice(choice: Choice, *, all_rows: bool = False, remarks: Sequence[str] = ()) -> None:
    """Print the candidates, their overheads and ``remarks``, then the blocks of the chosen one.

    Args:
        all_rows: print every candidate, not only the best of each micro-batch size.
        remarks: sentences about the sources of the figures.
    """
    rows = list(choice.candidates) if all_rows else best_rows(choice)
    if len(choice.candidates) > 1:
        show_all(render(choice, rows), legend(rows))
    show_all(*omitted(choice, rows), *overhead_lines(choice.chosen or choice.smallest), *remarks, *rival_lines(choice))
    if choice.chosen is not None:
        show_forecast(choice.chosen.forecast, choice.chosen.budget_bytes)


def best_rows(choice: Choice) -> list[Candidate]:
    """Of each layout and loss the fastest that fits, or the one that needs least; all of the chosen layout."""
    if len(choice.candidates) <= MAX_ROWS:
        return list(choice.candidates)
    groups: dict[tuple[BatchLayout, str | None], list[Candidate]] = {}
    for candidate in choice.candidates:
        groups.setdefault((candidate.layout, candidate.loss), []).append(candidate)
    shown = []
    for group in groups.values():
        is_chosen = any(candidate is choice.chosen for candidate in group)
        shown += group if is_chosen else [_best(group)]
    return shown


def render(choice: Choice, rows: Sequence[Candidate]) -> Table:
    """The table: one row for each candidate, the chosen one marked."""
    has_losses = len({candidate.loss for candidate in choice.candidates}) > 1
    reduces_once = any(candidate.reduces_once for candidate in choice.candidates)
    table = new_table()
    for heading in ("", "micro x acc.", *(["loss"] if has_losses else []), "plan", *(["reduced"] * reduces_once)):
        table.add_column(heading, no_wrap=True)
    offloads = any(candidate.host_bytes for candidate in rows)
    for heading in ("peak", "needed", *(["host"] if offloads else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(f"of {format_bytes(choice.candidates[0].budget_bytes)}", no_wrap=True)
    for heading in ("step", "samples/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    scale_bytes = scale_of(rows)
    for candidate in rows:
        is_chosen = candidate is choice.chosen
        style = "bold" if is_chosen else "" if candidate.fits else "dim"
        table.add_row(
            "→" if is_chosen else "",
            layout_text(candidate.layout),
            *([candidate.loss or ""] if has_losses else []),
            candidate.strategy,
            *([reduction_text(candidate)] * reduces_once),
            format_bytes(candidate.peak_bytes),
            format_bytes(candidate.needed_bytes),
            *([format_bytes(candidate.host_bytes) if candidate.host_bytes else ""] if offloads else []),
            bar(candidate, scale_bytes),
            format_seconds(candidate.step_s),
            format_rate(candidate.samples_per_s),
            fits_text(candidate),
            style=style,
        )
    return table


def legend(rows: Sequence[Candidate]) -> Text:
    """The meaning of the letters that occur in the bars."""
    text = Text()
    for name in used_parts(rows):
        letter, color = PARTS[name]
        text.append(f" {letter} ", style=f"black on {color}").append(f" {name}  ")
    return text


def used_parts(rows: Sequence[Candidate]) -> list[str]:
    """The kinds of memory that a candidate has."""
    used = {name for candidate in rows for name, num_bytes in grouped_parts(candidate).items() if num_bytes}
    return [name for name in PARTS if name in used]


def bar(candidate: Candidate, scale_bytes: int) -> Text:
    """The letter of each part as often as its share of ``scale_bytes``; ``>`` where the bar is cut off there."""
    text, end_bytes = Text(), 0
    for name, num_bytes in grouped_parts(candidate).items():
        letter, color = PARTS[name]
        begin, end_bytes = end_bytes, end_bytes + num_bytes
        columns = _columns(end_bytes / scale_bytes) - _columns(begin / scale_bytes)
        text.append(letter * columns, style=f"black on {color}")
    return text.append(">") if end_bytes > scale_bytes else text


def _columns(share: float) -> int:
    return min(BAR_COLUMNS, round(BAR_COLUMNS * share))


def grouped_parts(candidate: Candidate) -> dict[str, int]:
    """``candidate.parts`` with the overheads and the reserve as one part."""
    parts = {name: num_bytes for name, num_bytes in candidate.parts.items() if name in PARTS}
    return parts | {OVERHEADS: candidate.needed_bytes - sum(parts.values())}


def overhead_lines(candidate: Candidate) -> list[str]:
    """The parts of ``needed`` that are not in ``peak``, each with its source; traffic in shards; the host's memory."""
    overheads = {**candidate.overheads, "reserve": candidate.forecast.reserve_bytes}
    lines = [f"+ {name} {format_bytes(size)}: {OVERHEAD_SOURCES.get(name, '')}" for name, size in overheads.items()]
    sent_s, exposed_s = candidate.communication_s
    if sent_s:
        lines.append(f"traffic of a step: {format_seconds(sent_s)}, {format_seconds(exposed_s)} of them in its time")
    if candidate.reduces_once:
        lines.append(reduction_line(once=True))
    return [*lines, host_line(candidate)] if candidate.host_bytes else lines


def rival_lines(choice: Choice) -> list[str]:
    """A line on the candidate that is nearest to the chosen one, where their times are within the noise."""
    chosen, rivals = choice.chosen, choice.rivals
    if chosen is None or not rivals:
        return []
    nearest, noise = min(rivals, key=lambda rival: abs(rival[0].step_s - chosen.step_s))
    return [
        f"{_name(chosen)} is as fast as {_name(nearest)} within the noise of the measurement (±{100 * noise:.1f} %)"
    ]


def _name(candidate: Candidate) -> str:
    return " ".join(filter(None, (candidate.strategy, "at", layout_text(candidate.layout), candidate.loss)))


def omitted(choice: Choice, rows: Sequence[Candidate]) -> list[str]:
    """A line that says how many candidates are not in the table, if any are."""
    if len(rows) == len(choice.candidates):
        return []
    return [f"the best of each micro-batch: {len(rows)} of {len(choice.candidates)} candidates"]


def layout_text(layout: BatchLayout) -> str:
    """Micro-batch and accumulation steps: ``8 x 4``."""
    return f"{layout.micro_batch_size} x {layout.accumulation_steps}"


def reduction_text(candidate: Candidate) -> str:
    """``once``, where gradients in shards are reduced once a step, or ``each``, where every micro-batch's are."""
    return "once" if candidate.reduces_once else "each"


def fits_text(candidate: Candidate) -> str:
    """``yes``, or by how much it is too large."""
    over_bytes = candidate.needed_bytes - candidate.budget_bytes
    if not candidate.fits and over_bytes <= 0:
        return f"no, host +{format_bytes(candidate.host_bytes - (candidate.host_budget_bytes or 0))}"
    return "yes" if candidate.fits else f"no, +{format_bytes(over_bytes)}"


def _best(group: Sequence[Candidate]) -> Candidate:
    fitting = [candidate for candidate in group if candidate.fits]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.step_s)
    return min(group, key=lambda candidate: candidate.needed_bytes)


def scale_of(rows: Sequence[Candidate]) -> int:
    """The bytes of a whole bar: the budget, or the need of the largest row if that is less."""
    return min(rows[0].budget_bytes, max(candidate.needed_bytes for candidate in rows))


def show_forecast(forecast: Forecast, budget_bytes: int) -> None:
    """Print ``draw`` and ``summarize``."""
    show_all(draw(forecast), summarize(forecast, budget_bytes))


def draw(forecast: Forecast) -> Table:
    """The blocks with their actions, the bytes that they save for backward, and the time that the plan adds."""
    table = new_table()
    table.add_column("blocks", overflow="fold")
    table.add_column("action")
    for heading in ("saved", "baseline", "added ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("saved of baseline", no_wrap=True)
    rows = list(_rows(forecast))
    largest = max((row.baseline_bytes for row in rows), default=0) or 1
    for row in rows:
        cells = (row.blocks, row.action, format_bytes(row.saved_bytes), format_bytes(row.baseline_bytes))
        added = f"{1000 * row.added_s:+.1f}" if row.added_s else ""
        table.add_row(*cells, added, _block_bar(row.saved_bytes / largest, row.baseline_bytes / largest))
    return table


def summarize(forecast: Forecast, budget_bytes: int) -> str:
    """The predicted peak and the time of a forward and backward, with its noise and the baseline's."""
    peak, baseline_s = forecast.peak, forecast.baseline_s
    where = "the optimizer's update" if peak.phase == "optimizer" else f"the {peak.phase} of {peak.block}"
    noise = f" ± {1000 * forecast.noise_s:.1f} ms" if forecast.noise_s else ""
    return (
        f"predicted peak {format_bytes(peak.total_bytes)} of {format_bytes(budget_bytes)}, in {where} "
        f"(baseline: {format_bytes(forecast.baseline_peak_bytes)}); one forward and backward "
        f"{1000 * (baseline_s + forecast.added_s):.1f} ms{noise} (baseline: {1000 * baseline_s:.1f} ms, "
        f"x{1 + forecast.added_s / baseline_s:.2f})"
    )


@dataclass(frozen=True)
class _Row:
    blocks: str
    action: str
    saved_bytes: int
    baseline_bytes: int
    added_s: float


def _rows(forecast: Forecast) -> Iterator[_Row]:
    """A row for consecutive spans of the same action, length and costs."""
    chain, plan = forecast.chain, forecast.plan
    baseline = [costs.held_bytes for costs in span_costs(chain, keep_all(chain))]
    spans = [
        _CostedSpan(span, costs, sum(baseline[span.start : span.stop]))
        for span, costs in zip(plan.spans, span_costs(chain, plan), strict=True)
    ]
    for _, group in groupby(spans, key=_equal_in_a_row):
        alike = list(group)
        yield _Row(
            blocks=_block_names(plan, alike[0].span.start, alike[-1].span.stop),
            action=_action_name(alike[0].span, len(alike)),
            saved_bytes=sum(costed.costs.held_bytes for costed in alike),
            baseline_bytes=sum(costed.baseline_bytes for costed in alike),
            added_s=sum(costed.costs.added_s for costed in alike),
        )


@dataclass(frozen=True)
class _CostedSpan:
    span: Span
    costs: SpanCosts
    baseline_bytes: int


def _equal_in_a_row(costed: _CostedSpan) -> tuple[object, ...]:
    span = costed.span
    return span.action, span.stop - span.start, costed.baseline_bytes, costed.costs.held_bytes


def _block_names(plan: Plan, start: int, stop: int) -> str:
    first, last = plan.blocks[start], plan.blocks[stop - 1]
    return first if stop - start == 1 else f"{first} - {last} ({stop - start})"


def _action_name(span: Span, count: int) -> str:
    name, together = span.action.kind.label, span.stop - span.start
    if span.action.kind.is_joint and together > 1:
        name += f" {together} together" if count == 1 else f", {together} together"
    return name


def _block_bar(saved: float, baseline: float) -> str:
    """Full characters for saved bytes, dots for those that only the baseline saves."""
    filled, dotted = round(BLOCK_BAR_COLUMNS * saved), round(BLOCK_BAR_COLUMNS * baseline)
    return "█" * filled + "·" * max(0, dotted - filled)


HEADINGS = ("", "micro x acc.", "loss", "plan", "needed", "step", "time", "fits", "changes")
WIDTHS = (25, 12, 8, 10, 9, 9, 6, 15, 0)
RIGHT = {"needed", "step", "time"}


def heading() -> str:
    """The names of the columns, above a line."""
    names = _line(HEADINGS)
    return f"{names}\n {'─' * (sum(WIDTHS) + 2 * len(WIDTHS))}"


def row(rung: "Rung", first: "Rung") -> str:
    """A rung; its time as a multiple of the first one's."""
    candidate = rung.candidate
    on_host = f"{format_bytes(candidate.host_bytes)} on the host" if candidate.host_bytes else ""
    cells = (
        rung.name,
        layout_text(candidate.layout),
        candidate.loss or "",
        candidate.strategy,
        format_bytes(candidate.needed_bytes),
        format_seconds(candidate.step_s),
        f"x{candidate.step_s / first.candidate.step_s:.2f}",
        fits_text(candidate),
        ", ".join(filter(None, (rung.changes, on_host))),
    )
    return _line(cells)


def _line(cells: Sequence[str]) -> str:
    return " " + "  ".join(_aligned(cells)).rstrip()


def _aligned(cells: Sequence[str]) -> Iterator[str]:
    for name, width, cell in zip(HEADINGS, WIDTHS, cells, strict=True):
        yield cell.rjust(width) if name in RIGHT else cell.ljust(width)
