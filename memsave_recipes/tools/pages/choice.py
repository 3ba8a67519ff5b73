"""The planner's choice in the terminal: its candidates, the blocks of the chosen plan, and the rows of ``memsave fit``.

The baseline, in tables and texts, is the same micro-batch without checkpointing (``none``).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

from memsave_recipes.core.planner.budget import WORKSPACES, Forecast
from memsave_recipes.core.planner.search import Candidate, Choice
from memsave_recipes.core.plans.plan import Action, Plan, Span
from memsave_recipes.core.plans.prediction import SpanPrediction
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.core.text import format_bytes, format_rate, format_seconds
from memsave_recipes.tools.fit.advice import HostUse, reduction_line
from memsave_recipes.tools.pages import new_table, show_all

if TYPE_CHECKING:
    from memsave_recipes.tools.fit.frontier import Speed
    from memsave_recipes.tools.fit.ladder import Rung  # needs an extra

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
    "device context": "reported by the driver as in use by this process outside torch",
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
    if len(rows) < len(choice.candidates):
        show_all(f"the best of each micro-batch: {len(rows)} of {len(choice.candidates)} candidates")
    show_all(*overhead_lines(choice.chosen or choice.smallest), *remarks, *rival_lines(choice))
    if choice.chosen is not None:
        forecast = choice.chosen.forecast
        show_all(draw(forecast), summarize(forecast, choice.chosen.budget_bytes))


def best_rows(choice: Choice) -> list[Candidate]:
    """Keep the fastest that fits of each layout and loss, or the one that needs least; and all of the chosen layout."""
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


@dataclass(frozen=True)
class CandidateColumn:
    """A column of a table of candidates."""

    heading: str
    cell: Callable[[Candidate], str | Text]
    justify: Literal["left", "right"] = "left"


def plan_columns(candidates: Sequence[Candidate]) -> list[CandidateColumn]:
    """Return the columns of layout, loss, plan and reduction; those in which no candidates differ are left out."""
    columns = [CandidateColumn("micro x acc.", lambda one: layout_text(one.layout))]
    if len({one.loss for one in candidates}) > 1:
        columns.append(CandidateColumn("loss", lambda one: one.loss or ""))
    columns.append(CandidateColumn("plan", lambda one: one.strategy))
    if any(one.reduces_once for one in candidates):
        columns.append(CandidateColumn("reduced", reduction_text))
    return columns


def _candidate_columns(choice: Choice, rows: Sequence[Candidate]) -> Iterator[CandidateColumn]:
    scale_bytes = scale_of(rows)
    yield CandidateColumn("", lambda one: "→" if one is choice.chosen else "")
    yield from plan_columns(choice.candidates)
    yield CandidateColumn("peak", lambda one: format_bytes(one.peak_bytes), "right")
    yield CandidateColumn("needed", lambda one: format_bytes(one.needed_bytes), "right")
    if any(candidate.host_bytes for candidate in rows):
        yield CandidateColumn("host", lambda one: format_bytes(one.host_bytes) if one.host_bytes else "", "right")
    yield CandidateColumn(f"of {format_bytes(rows[0].budget_bytes)}", lambda one: bar(one, scale_bytes))
    yield CandidateColumn("step", lambda one: format_seconds(one.step_s), "right")
    yield CandidateColumn("samples/s", lambda one: format_rate(one.samples_per_s), "right")
    yield CandidateColumn("fits", fits_text)


def render(choice: Choice, rows: Sequence[Candidate]) -> Table:
    """Return the table: one row for each candidate, the chosen one marked."""
    table, columns = new_table(), list(_candidate_columns(choice, rows))
    for column in columns:
        table.add_column(column.heading, justify=column.justify, no_wrap=True)
    for candidate in rows:
        style = "bold" if candidate is choice.chosen else "" if candidate.fits else "dim"
        table.add_row(*(column.cell(candidate) for column in columns), style=style)
    return table


def legend(rows: Sequence[Candidate]) -> Text:
    """Explain the letters that occur in the bars."""
    text = Text()
    for name in used_parts(rows):
        letter, color = PARTS[name]
        text.append(f" {letter} ", style=f"black on {color}").append(f" {name}  ")
    return text


def used_parts(rows: Sequence[Candidate]) -> list[str]:
    """List the kinds of memory that a candidate has."""
    used = {name for candidate in rows for name, num_bytes in grouped_parts(candidate).items() if num_bytes}
    return [name for name in PARTS if name in used]


def bar(candidate: Candidate, scale_bytes: int) -> Text:
    """Repeat the letter of each kind by its share of ``scale_bytes``; ``>`` where the bar is cut off there."""
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
    """Return ``candidate.parts`` with the overheads and the reserve as one."""
    parts = {name: num_bytes for name, num_bytes in candidate.parts.items() if name in PARTS}
    return parts | {OVERHEADS: candidate.needed_bytes - sum(parts.values())}


def overhead_lines(candidate: Candidate) -> list[str]:
    """Return a line on each overhead, with its source, on traffic in shards, and on the host's memory."""
    overheads = {**candidate.overheads, "reserve": candidate.forecast.reserve_bytes}
    lines = [f"+ {name} {format_bytes(size)}: {OVERHEAD_SOURCES.get(name, '')}" for name, size in overheads.items()]
    sent_s, exposed_s = candidate.communication_s
    if sent_s:
        lines.append(f"traffic of a step: {format_seconds(sent_s)}, {format_seconds(exposed_s)} of them in its time")
    if candidate.reduces_once:
        lines.append(reduction_line(once=True))
    if candidate.static.updated_bytes:
        takes, waits = format_seconds(candidate.update_s), format_seconds(candidate.awaited_s)
        lines.append(f"optimizer step: the host takes {takes}, of which the device waits {waits} (estimated)")
    elif candidate.awaited_s:
        moved = format_bytes(candidate.static.awaited_bytes)
        seconds = format_seconds(candidate.awaited_s)
        lines.append(f"optimizer state: the device waits {seconds} of a step for {moved} of copies (estimated)")
    return [*lines, HostUse.of(candidate).line] if candidate.host_bytes else lines


def speed_line(candidate: Candidate, speed: "Speed") -> str:
    """Return the expected seconds of a step, their bound by the data sheet, and what they mean."""
    bound = f" (by the data sheet at least {format_seconds(speed.bound_s)})" if speed.bound_s < candidate.step_s else ""
    rate, what = (candidate.samples_per_s, "samples") if speed.tokens_per_s is None else (speed.tokens_per_s, "tokens")
    share = "" if speed.mfu_pct is None else f", {speed.mfu_pct:.1f} % of the device's peak rate"
    return f"expected: {format_seconds(candidate.step_s)} a step{bound}, {format_rate(rate)} {what}/s{share}"


def rival_lines(choice: Choice) -> list[str]:
    """Return a line on the candidate nearest to the chosen one, where their times are within the noise."""
    chosen, rivals = choice.chosen, choice.rivals
    if chosen is None or not rivals:
        return []
    nearest, noise = min(rivals, key=lambda rival: abs(rival[0].step_s - chosen.step_s))
    return [
        f"{_name(chosen)} is as fast as {_name(nearest)} within the noise of the measurement (±{100 * noise:.1f} %)"
    ]


def _name(candidate: Candidate) -> str:
    return " ".join(filter(None, (candidate.strategy, "at", layout_text(candidate.layout), candidate.loss)))


def layout_text(layout: BatchLayout) -> str:
    """Return micro-batch and accumulation steps: ``8 x 4``."""
    return f"{layout.micro_batch_size} x {layout.accumulation_steps}"


def reduction_text(candidate: Candidate) -> str:
    """Return ``once``, where gradients in shards are reduced once a step, or ``each``: for every micro-batch."""
    return "once" if candidate.reduces_once else "each"


def fits_text(candidate: Candidate) -> str:
    """Return ``yes``, or by how much the candidate is too large."""
    over_bytes = candidate.needed_bytes - candidate.budget_bytes
    if not candidate.fits and over_bytes <= 0:
        return f"no, host +{format_bytes(candidate.host_bytes - (candidate.host.budget_bytes or 0))}"
    return "yes" if candidate.fits else f"no, +{format_bytes(over_bytes)}"


def _best(group: Sequence[Candidate]) -> Candidate:
    fitting = [candidate for candidate in group if candidate.fits]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.step_s)
    return min(group, key=lambda candidate: candidate.needed_bytes)


def scale_of(rows: Sequence[Candidate]) -> int:
    """Return the bytes of a whole bar: the budget, or the need of the largest row if that is less."""
    return min(rows[0].budget_bytes, max(candidate.needed_bytes for candidate in rows))


def draw(forecast: Forecast) -> Table:
    """Return the blocks with their actions, the bytes that they save for backward, and the time that the plan adds."""
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
    """Return the predicted peak and the time of a forward and backward, with its noise and the baseline's."""
    peak, baseline_s = forecast.peak, forecast.baseline_s
    where = "the optimizer's update" if peak.phase == "optimizer" else f"the {peak.phase} of {peak.block}"
    noise = f" ± {1000 * forecast.noise_s:.1f} ms" if forecast.noise_s else ""
    return (
        f"predicted peak {format_bytes(peak.total_bytes)} of {format_bytes(budget_bytes)}, in {where} "
        f"(baseline: {format_bytes(forecast.baseline_peak_bytes)}); one forward and backward "
        f"{1000 * (baseline_s + forecast.added_s):.1f} ms{noise} (baseline: {1000 * baseline_s:.1f} ms, "
        f"x{1 + forecast.added_s / baseline_s:.2f})"
    )


def _rows(forecast: Forecast) -> Iterator[SpanPrediction]:
    """Yield a row for consecutive spans of the same action, length and costs; one where all are kept."""
    plan = forecast.plan
    keeps_all = all(span.action is Action.KEEP for span in plan.spans)

    def shared(one: tuple[Span, SpanPrediction]) -> tuple[Action, int, int, int] | None:
        span, costs = one
        return None if keeps_all else (span.action, span.stop - span.start, costs.baseline_bytes, costs.saved_bytes)

    for _, group in groupby(zip(plan.spans, forecast.prediction.spans, strict=True), key=shared):
        alike = list(group)
        first, last = alike[0][0], alike[-1][0]
        yield SpanPrediction(
            blocks=_block_names(plan, first.start, last.stop),
            action=_action_name(first, len(alike)),
            saved_bytes=sum(costs.saved_bytes for _, costs in alike),
            baseline_bytes=sum(costs.baseline_bytes for _, costs in alike),
            added_s=sum(costs.added_s for _, costs in alike),
        )


def _block_names(plan: Plan, start: int, stop: int) -> str:
    first, last = plan.blocks[start], plan.blocks[stop - 1]
    return first if stop - start == 1 else f"{first} - {last} ({stop - start})"


def _action_name(span: Span, count: int) -> str:
    name, together = span.action.kind.label, span.stop - span.start
    if span.action.kind.is_joint and together > 1:
        name += f" {together} together" if count == 1 else f", {together} together"
    return name


def _block_bar(saved: float, baseline: float) -> str:
    """Draw full characters for saved bytes, dots for those that only the baseline saves."""
    filled, dotted = round(BLOCK_BAR_COLUMNS * saved), round(BLOCK_BAR_COLUMNS * baseline)
    return "█" * filled + "·" * max(0, dotted - filled)


LINE = " {:<25}  {:<12}  {:<8}  {:<10}  {:>9}  {:>9}  {:>6}  {:<15}  {}"
LINE_COLUMNS = 112


def heading() -> str:
    """Return the names of the columns of ``row``, above a line."""
    names = LINE.format("", "micro x acc.", "loss", "plan", "needed", "step", "time", "fits", "changes")
    return f"{names}\n {'─' * LINE_COLUMNS}"


def row(rung: "Rung", first: "Rung") -> str:
    """Return a rung as a line; its time is a multiple of the first one's."""
    candidate = rung.candidate
    on_host = f"{format_bytes(candidate.host_bytes)} on the host" if candidate.host_bytes else ""
    line = LINE.format(
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
    return line.rstrip()
