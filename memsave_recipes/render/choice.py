"""A plan as a small picture of the model: a row a block, or a run of blocks alike, and plain beside it below.

The candidates of a choice as a table, what stands beside their peaks, and the chosen one as a picture.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.table import Table
from rich.text import Text

from memsave_recipes.planner.budget import WORKSPACES, Forecast, keep_all
from memsave_recipes.planner.search import Candidate, Choice, host_line
from memsave_recipes.plans.plan import Action, Plan, Span
from memsave_recipes.plans.simulate import SpanCosts, span_costs
from memsave_recipes.render.console import new_console, new_table, print_lines
from memsave_recipes.text import format_bytes, format_rate, format_seconds
from memsave_recipes.training.batch_layout import BatchLayout

BLOCK_BAR = 16  # characters of the longest bar
WORDS = {
    Action.KEEP: "keep",
    Action.RECOMPUTE: "recompute",
    Action.SELECT_OPS: "recompute cheap operators",
    Action.OFFLOAD: "offload to the host",
    Action.COMPILE: "compiled",
}


def show_forecast(forecast: Forecast, budget_bytes: int) -> None:
    """Print ``draw`` and ``summarize``."""
    console = new_console()
    console.print(draw(forecast))
    print_lines(console, [summarize(forecast, budget_bytes)])


def draw(forecast: Forecast) -> Table:
    """The blocks with their actions, what they hold for the backward, and the time that this adds."""
    table = new_table()
    table.add_column("blocks", overflow="fold")
    table.add_column("what happens")
    table.add_column("held", justify="right", no_wrap=True)
    table.add_column("plain holds", justify="right", no_wrap=True)
    table.add_column("added ms", justify="right", no_wrap=True)
    table.add_column("held of plain's", no_wrap=True)
    rows = list(_rows(forecast))
    largest = max((row.plain_bytes for row in rows), default=0) or 1
    for row in rows:
        cells = (row.blocks, row.words, format_bytes(row.held_bytes), format_bytes(row.plain_bytes))
        added = f"{1000 * row.added_s:+.1f}" if row.added_s else ""
        table.add_row(*cells, added, _bar(row.held_bytes / largest, row.plain_bytes / largest))
    return table


def summarize(forecast: Forecast, budget_bytes: int) -> str:
    """The predicted peak and the time of a forward and backward, beside plain's."""
    peak, plain_s = forecast.peak, forecast.plain_s
    where = "the optimizer's update" if peak.phase == "optimizer" else f"the {peak.phase} of {peak.block}"
    return (
        f"predicted peak {format_bytes(peak.total_bytes)} of {format_bytes(budget_bytes)}, in {where} "
        f"(plain: {format_bytes(forecast.plain_peak_bytes)}); forward and backward of a micro-batch "
        f"{1000 * (plain_s + forecast.added_s):.1f} ms (plain: {1000 * plain_s:.1f} ms, "
        f"x{1 + forecast.added_s / plain_s:.2f})"
    )


@dataclass(frozen=True)
class _Row:
    blocks: str
    words: str
    held_bytes: int
    plain_bytes: int
    added_s: float


def _rows(forecast: Forecast) -> Iterator[_Row]:
    """A row for each run of spans of one action and one size whose blocks cost the same."""
    chain, plan = forecast.chain, forecast.plan
    plain = [costs.held_bytes for costs in span_costs(chain, keep_all(chain))]
    spans = [
        _Priced(span, costs, sum(plain[span.start : span.stop]))
        for span, costs in zip(plan.spans, span_costs(chain, plan), strict=True)
    ]
    for _, alike in groupby(spans, key=_likeness):
        run = list(alike)
        yield _Row(
            blocks=_blocks(plan, run[0].span.start, run[-1].span.stop),
            words=_words(run[0].span, len(run)),
            held_bytes=sum(priced.costs.held_bytes for priced in run),
            plain_bytes=sum(priced.plain_bytes for priced in run),
            added_s=sum(priced.costs.added_s for priced in run),
        )


@dataclass(frozen=True)
class _Priced:
    span: Span
    costs: SpanCosts
    plain_bytes: int


def _likeness(priced: _Priced) -> tuple[object, ...]:
    return priced.span.action, priced.span.stop - priced.span.start, priced.plain_bytes, priced.costs.held_bytes


def _blocks(plan: Plan, start: int, stop: int) -> str:
    first, last = plan.blocks[start], plan.blocks[stop - 1]
    return first if stop - start == 1 else f"{first} - {last} ({stop - start})"


def _words(span: Span, count: int) -> str:
    words, together = WORDS[span.action], span.stop - span.start
    if span.action is Action.RECOMPUTE and together > 1:
        words += f" {together} together" if count == 1 else f", {together} together"
    return words


def _bar(held: float, plain: float) -> str:
    """Full blocks for what is held, dots for what plain holds beyond it."""
    filled, dotted = round(BLOCK_BAR * held), round(BLOCK_BAR * plain)
    return "█" * filled + "·" * max(0, dotted - filled)


BAR = 24  # characters of the longest bar
MAX_ROWS = 12  # so many candidates are all shown
OVERHEADS = "overheads"
# A letter and a color for each part of a bar.
PARTS = {
    "parameters": ("P", "blue"),
    "gradients": ("G", "cyan"),
    "optimizer state": ("S", "magenta"),
    "communication": ("C", "green"),
    "activations": ("A", "yellow"),
    "temporaries": ("T", "red"),
    OVERHEADS: ("O", "bright_black"),
}
ABOUT = {
    "CUDA context": "assumed: the driver and torch's kernels take 300 to 700 MiB",
    "device context": "what the driver says is taken here beside torch's memory, other processes included",
    WORKSPACES: "what the libraries of products keep for good; where nothing is measured, two of cuBLAS are assumed",
    "reserve": "1 % of what plain training keeps for its backward, for what the prediction does not know of",
}


def show_choice(choice: Choice, *, all_rows: bool = False, remarks: Sequence[str] = ()) -> None:
    """Print the candidates, the bytes beside their peaks and ``remarks``, then the blocks of the chosen one.

    Args:
        all_rows: print every candidate, not only the best of each micro-batch.
        remarks: lines about where the figures come from.
    """
    console = new_console()
    rows = list(choice.candidates) if all_rows else best_rows(choice)
    if len(choice.candidates) > 1:
        console.print(render(choice, rows))
        console.print(legend(rows))
    print_lines(console, [*omitted(choice, rows), *overhead_lines(choice.chosen or choice.smallest), *remarks])
    if choice.chosen is not None:
        show_forecast(choice.chosen.forecast, choice.chosen.budget_bytes)


def best_rows(choice: Choice) -> list[Candidate]:
    """Of each micro-batch and loss the fastest that fits, or what needs least; all of the chosen micro-batch's."""
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
    """The table: a row a candidate, the chosen one marked."""
    has_losses = len({candidate.loss for candidate in choice.candidates}) > 1
    table = new_table()
    for heading in ("", "micro x acc.", *(["loss"] if has_losses else []), "plan"):
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
    """What the letters of the bars mean, of those that occur."""
    used = {name for candidate in rows for name, num_bytes in grouped_parts(candidate).items() if num_bytes}
    text = Text()
    for name, (letter, color) in PARTS.items():
        if name in used:
            text.append(f" {letter} ", style=f"black on {color}").append(f" {name}  ")
    return text


def bar(candidate: Candidate, scale_bytes: int) -> Text:
    """A letter for each part's share of ``scale_bytes``; ``>`` where it goes on beyond them."""
    text, end_bytes = Text(), 0
    for name, num_bytes in grouped_parts(candidate).items():
        letter, color = PARTS[name]
        begin, end_bytes = end_bytes, end_bytes + num_bytes
        columns = min(BAR, round(BAR * end_bytes / scale_bytes)) - min(BAR, round(BAR * begin / scale_bytes))
        text.append(letter * columns, style=f"black on {color}")
    return text.append(">") if end_bytes > scale_bytes else text


def grouped_parts(candidate: Candidate) -> dict[str, int]:
    """``candidate.parts`` with all that torch does not count, and the reserve, as one."""
    parts = {name: num_bytes for name, num_bytes in candidate.parts.items() if name in PARTS}
    return parts | {OVERHEADS: candidate.needed_bytes - sum(parts.values())}


def overhead_lines(candidate: Candidate) -> list[str]:
    """What is in ``needed`` and not in ``peak``, each with how it is known."""
    static = {**candidate.overheads, "reserve": candidate.forecast.reserve_bytes}
    lines = [f"+ {name} {format_bytes(num_bytes)}: {ABOUT.get(name, '')}" for name, num_bytes in static.items()]
    return [*lines, host_line(candidate)] if candidate.host_bytes else lines


def omitted(choice: Choice, rows: Sequence[Candidate]) -> list[str]:
    """A line that says how many candidates are not in the table, if any are."""
    if len(rows) == len(choice.candidates):
        return []
    return [f"the best of each micro-batch: {len(rows)} of {len(choice.candidates)} candidates"]


def layout_text(layout: BatchLayout) -> str:
    """Micro-batch and accumulation steps: ``8 x 4``."""
    return f"{layout.micro_batch_size} x {layout.accumulation_steps}"


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
    """The bytes of a whole bar: the budget, or what the largest row needs where that is less."""
    return min(rows[0].budget_bytes, max(candidate.needed_bytes for candidate in rows))
