"""The candidates of a choice as a table, what stands beside their peaks, and the chosen one as a picture."""

import shutil
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memsave_recipes.planner.beside import WORKSPACES
from memsave_recipes.planner.picture import show_forecast
from memsave_recipes.planner.search import Candidate, Choice
from memsave_recipes.training.sample_order import Geometry
from memsave_recipes.units import format_bytes

BAR = 24  # characters of the longest bar
FEW = 12  # so many candidates are all shown
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
    console = Console(width=shutil.get_terminal_size(fallback=(120, 24)).columns)
    rows = list(choice.candidates) if all_rows else best_rows(choice)
    if len(choice.candidates) > 1:
        console.print(render(choice, rows))
        console.print(legend(rows))
    for line in [*left_out(choice, rows), *overhead_lines(choice.chosen or choice.smallest), *remarks]:
        console.print(line, highlight=False, soft_wrap=True)
    if choice.chosen is not None:
        show_forecast(choice.chosen.forecast, choice.chosen.budget_bytes)


def best_rows(choice: Choice) -> list[Candidate]:
    """Of each micro-batch and loss the fastest that fits, or what needs least; all of the chosen micro-batch's."""
    if len(choice.candidates) <= FEW:
        return list(choice.candidates)
    groups: dict[tuple[Geometry, str | None], list[Candidate]] = {}
    for candidate in choice.candidates:
        groups.setdefault((candidate.geometry, candidate.loss), []).append(candidate)
    shown = []
    for group in groups.values():
        is_chosen = any(candidate is choice.chosen for candidate in group)
        shown += group if is_chosen else [_best(group)]
    return shown


def render(choice: Choice, rows: Sequence[Candidate]) -> Table:
    """The table: a row a candidate, the chosen one marked."""
    has_losses = len({candidate.loss for candidate in choice.candidates}) > 1
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
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
            geometry_text(candidate.geometry),
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
    beside = {**candidate.overheads, "reserve": candidate.forecast.reserve_bytes}
    lines = [f"+ {name} {format_bytes(num_bytes)}: {ABOUT.get(name, '')}" for name, num_bytes in beside.items()]
    return [*lines, host_line(candidate)] if candidate.host_bytes else lines


def host_line(candidate: Candidate) -> str:
    """What is offloaded, beside what there is for it."""
    there = candidate.host_budget_bytes
    of = "" if there is None else f", of {format_bytes(there)} that are available to it"
    return f"{candidate.strategy}: at most {format_bytes(candidate.host_bytes)} of the host's memory for a rank{of}"


def left_out(choice: Choice, rows: Sequence[Candidate]) -> list[str]:
    """A line that says how many candidates are not in the table, if any are."""
    if len(rows) == len(choice.candidates):
        return []
    return [f"the best of each micro-batch: {len(rows)} of {len(choice.candidates)} candidates"]


def geometry_text(geometry: Geometry) -> str:
    """Micro-batch and accumulation steps: ``8 x 4``."""
    return f"{geometry.micro_batch_size} x {geometry.accumulation_steps}"


def fits_text(candidate: Candidate) -> str:
    """``yes``, or by how much it is too large."""
    over_bytes = candidate.needed_bytes - candidate.budget_bytes
    if not candidate.fits and over_bytes <= 0:
        return f"no, host +{format_bytes(candidate.host_bytes - (candidate.host_budget_bytes or 0))}"
    return "yes" if candidate.fits else f"no, +{format_bytes(over_bytes)}"


def format_seconds(seconds: float) -> str:
    """As a person reads them: ``1.23 s``, ``45.6 ms``, ``0.789 ms``."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def format_rate(per_s: float) -> str:
    """Three digits, with commas: ``37,900``, ``4.56``."""
    return f"{float(f'{per_s:.3g}'):,.10g}"


def _best(group: Sequence[Candidate]) -> Candidate:
    fitting = [candidate for candidate in group if candidate.fits]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.step_s)
    return min(group, key=lambda candidate: candidate.needed_bytes)


def scale_of(rows: Sequence[Candidate]) -> int:
    """The bytes of a whole bar: the budget, or what the largest row needs where that is less."""
    return min(rows[0].budget_bytes, max(candidate.needed_bytes for candidate in rows))
