"""A plan as a small picture of the model: a row a block, or a run of blocks alike, and plain beside it below."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from memsave_recipes.planner.budget import Forecast, keep_all
from memsave_recipes.plans.plan import Action, Plan, Span
from memsave_recipes.plans.simulate import SpanCosts, span_costs
from memsave_recipes.units import format_bytes

BAR = 16  # characters of the longest bar
WORDS = {
    Action.KEEP: "keep",
    Action.RECOMPUTE: "recompute",
    Action.SELECT_OPS: "recompute cheap operators",
    Action.OFFLOAD: "offload to the host",
    Action.COMPILE: "compiled",
}


def show_forecast(forecast: Forecast, budget_bytes: int) -> None:
    """Print ``draw`` and ``summarize``."""
    console = Console(width=shutil.get_terminal_size(fallback=(120, 24)).columns)
    console.print(draw(forecast))
    console.print(summarize(forecast, budget_bytes), highlight=False, soft_wrap=True)


def draw(forecast: Forecast) -> Table:
    """The blocks with their actions, what they hold for the backward, and the time that this adds."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
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
    filled, dotted = round(BAR * held), round(BAR * plain)
    return "█" * filled + "·" * max(0, dotted - filled)
