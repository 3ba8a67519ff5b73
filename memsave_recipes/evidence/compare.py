"""Comparison: runs side by side, each figure beside the one of its baseline.

``compare`` decides and returns plain values; ``render`` only lays them out. What a run did not record is ``None`` in
the one and ``-`` in the other.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memsave_recipes.evidence.runs import Run, loss_curve
from memsave_recipes.units import GIB, format_bytes

T = TypeVar("T")
HEADINGS = ("peak\nmemory", "kept for\nbackward", "samples\n/s", "train\ntime")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number of a run and the same number of its baseline; ``None`` where it was not recorded.

    The baseline's own figures have no ``baseline``.
    """

    value: float | None
    baseline: float | None = None

    @property
    def ratio(self) -> float | None:
        """``value`` divided by ``baseline``."""
        return self.value / self.baseline if self.value is not None and self.baseline else None

    @property
    def difference(self) -> float | None:
        """``value`` minus ``baseline``."""
        return self.value - self.baseline if self.value is not None and self.baseline is not None else None


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One run: memory in bytes, time in seconds, ``metric`` the name of what ``evaluation`` is a figure of.

    ``loss_difference`` is the largest one at any step to the baseline's curve; ``None`` where the steps
    are not the same ones.
    """

    run: str
    model: str | None
    plan: str | None
    geometry: str | None
    is_baseline: bool
    peak_memory: Figure
    saved_for_backward: Figure
    samples_per_s: Figure
    train_time: Figure
    metric: str | None
    evaluation: Figure
    loss_difference: float | None


@dataclass(frozen=True, kw_only=True)
class ComparisonTable:
    """The rows, those of a model together and each baseline first, and how their peak memory was measured.

    The peaks of two runs are compared only where they were measured in the same way.
    """

    rows: tuple[ComparisonRow, ...]
    memory_sources: tuple[str, ...]


def compare(runs: Sequence[Run], baseline: Run | None = None) -> ComparisonTable:
    """Sets each run beside its baseline.

    That is ``baseline`` for the runs of its model. For others it is the first run of the same model and global batch
    whose plan is ``none``, else the first of them.
    """
    if baseline is not None and baseline.folder not in [run.folder for run in runs]:
        runs = [baseline, *runs]
    labels = _labels(runs)
    models, works = _distinct(run.text("model") for run in runs), _distinct(_work(run) for run in runs)
    pairs = [(run, _baseline_of(run, runs, baseline)) for run in runs]
    pairs.sort(key=lambda pair: (models.index(pair[0].text("model")), works.index(_work(pair[0])), not _is_same(*pair)))
    return ComparisonTable(
        rows=tuple(_row(labels[run.folder], run, other) for run, other in pairs),
        memory_sources=tuple(_distinct(source for run in runs if (source := run.text("memory", "source")))),
    )


def render(table: ComparisonTable) -> Table:
    """The table as the terminal shows it: under each figure, how it compares to the baseline's."""
    metrics = _distinct(row.metric for row in table.rows if row.metric)
    drawn = Table(box=box.SIMPLE_HEAD, padding=0, caption=_caption(table), caption_justify="left")
    drawn.add_column("run", overflow="fold", min_width=12)
    drawn.add_column("plan\ngeometry", overflow="fold", min_width=10)
    for heading in (*HEADINGS, *metrics, "largest\nloss\ndifference"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for index, row in enumerate(table.rows):
        if index == 0 or row.model != table.rows[index - 1].model:
            drawn.add_section()
            drawn.add_row(Text(row.model or "unknown model", style="bold"))
        drawn.add_row(*_cells(row, metrics))
    return drawn


def show(table: ComparisonTable) -> None:
    """Prints the table, 120 columns wide where there is no terminal to say how wide."""
    Console(width=shutil.get_terminal_size(fallback=(120, 24)).columns).print(render(table))


def _distinct(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))


def _labels(runs: Sequence[Run]) -> dict[Path, str]:
    """The folders' names, or their paths below the folder that holds them all where a name comes twice."""
    if len({run.name for run in runs}) == len(runs):
        return {run.folder: run.name for run in runs}
    root = os.path.commonpath([run.folder.parent for run in runs])
    return {run.folder: os.path.relpath(run.folder, root) for run in runs}


def _baseline_of(run: Run, runs: Sequence[Run], chosen: Run | None) -> Run:
    if chosen is not None and chosen.text("model") == run.text("model"):
        return chosen
    peers = [peer for peer in runs if _work(peer) == _work(run)]
    return next((peer for peer in peers if peer.text("plan") == "none"), peers[0])


def _work(run: Run) -> tuple[str | None, float | None]:
    return run.text("model"), run.figure("global_batch_size")


def _is_same(run: Run, other: Run) -> bool:
    return run.folder == other.folder


def _row(label: str, run: Run, baseline: Run) -> ComparisonRow:
    is_baseline = _is_same(run, baseline)

    def figure(*keys: str, unit: int = 1) -> Figure:
        value, other = run.figure(*keys), baseline.figure(*keys)
        return Figure(
            value=None if value is None else value * unit,
            baseline=None if other is None or is_baseline else other * unit,
        )

    metric = _metric(run)
    peak = figure("memory", "peak_allocated_gib", unit=GIB)
    same_source = run.text("memory", "source") == baseline.text("memory", "source")
    return ComparisonRow(
        run=label,
        model=run.text("model"),
        plan=run.text("plan"),
        geometry=_geometry(run),
        is_baseline=is_baseline,
        peak_memory=peak if same_source else Figure(value=peak.value),
        saved_for_backward=figure("memory", "saved_for_backward_gib", unit=GIB),
        samples_per_s=figure("perf", "samples_per_sec"),
        train_time=figure("perf", "train_time_s"),
        metric=metric,
        evaluation=figure("eval", metric or ""),
        loss_difference=None if is_baseline else _loss_difference(loss_curve(run), loss_curve(baseline)),
    )


def _geometry(run: Run) -> str | None:
    """``8 x 2 ranks x 4``: micro-batch, ranks, accumulation steps."""
    micro, ranks, accumulation = (
        run.figure(name) for name in ("micro_batch_size", "num_processes", "accumulation_steps")
    )
    if micro is None or ranks is None or accumulation is None:
        return None
    return f"{micro} x {ranks} {'rank' if ranks == 1 else 'ranks'} x {accumulation}"


def _metric(run: Run) -> str | None:
    """The accuracy if there is one, else the first number of the final evaluation."""
    evaluation = run.results.get("eval")
    names = ["accuracy", *evaluation] if isinstance(evaluation, dict) else []
    return next((name for name in names if run.figure("eval", name) is not None), None)


def _loss_difference(curve: dict[int, float], other: dict[int, float]) -> float | None:
    """The largest absolute difference at any step; ``None`` unless both have logged the same steps."""
    if not curve or curve.keys() != other.keys():
        return None
    differences = [abs(curve[step] - other[step]) for step in curve]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def _caption(table: ComparisonTable) -> str | None:
    return f"peak memory: {'; '.join(table.memory_sources)}" if table.memory_sources else None


def _cells(row: ComparisonRow, metrics: list[str]) -> list[Text]:
    return [
        Text(row.run),
        Text(f"{row.plan or '-'}\n{row.geometry or '-'}"),
        _cell(row.peak_memory, _memory, _percent),
        _cell(row.saved_for_backward, _memory, _percent),
        _cell(row.samples_per_s, _rate, _factor),
        _cell(row.train_time, _duration, _factor),
        *(_metric_cell(row.evaluation if row.metric == name else Figure(value=None)) for name in metrics),
        Text("baseline" if row.is_baseline else _loss_text(row.loss_difference)),
    ]


def _cell(figure: Figure, absolute: Callable[[float], str], relative: Callable[[float], str]) -> Text:
    return _two_lines(
        "-" if figure.value is None else absolute(figure.value),
        None if figure.ratio is None else relative(figure.ratio),
    )


def _metric_cell(figure: Figure) -> Text:
    return _two_lines(
        "-" if figure.value is None else f"{figure.value:.4f}",
        None if figure.difference is None else _change(figure.difference),
    )


def _two_lines(absolute: str, relative: str | None) -> Text:
    cell = Text(absolute)
    return cell if relative is None else cell.append(f"\n{relative}", style="cyan")


def _memory(num_bytes: float) -> str:
    return format_bytes(round(num_bytes))


def _percent(ratio: float) -> str:
    return f"{round(100 * ratio) - 100:+d} %"


def _factor(ratio: float) -> str:
    return f"x{ratio:.2f}"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _duration(seconds: float) -> str:
    """``12.3 s``, and from 100 s on ``0:01:40``."""
    return f"{seconds:.1f} s" if seconds < 100 else str(timedelta(seconds=round(seconds)))


def _change(difference: float) -> str:
    return "same" if difference == 0 else f"{difference:+.2g}"


def _loss_text(difference: float | None) -> str:
    return "-" if difference is None else f"{difference:.3g}"
