"""Finished runs: read from their folders as plain data, and set side by side.

A figure that a run did not record is ``None``, and a trait that it did not record counts as equal.

NOTE [ foreign runs ]: a folder may come from anyone, so its content is sanitized here, once for the terminal and for
every format: names and texts are ``printable``, and figures beyond ``LARGEST`` are not finite, so that no ratio and no
axis leaves the range of a float. A file that cannot be read so is an ``InputError``; the other runs are shown.

NOTE [ Pareto ]: a run is Pareto-optimal if no other run of the same workload on the same hardware has both a peak as
low and a throughput as high, one of them better. A run without others to compare is not marked.
"""

import math
import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeGuard, TypeVar

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.text import GIB, MIB, flat, printable, read_json, sanitized

OF_A_RUN = ("results.json", "config.json", "metrics.jsonl")
FIGURES = ("model", "memory", "perf", "eval")  # a results.json without any of them is from another program
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
CURVES = TRAIN_LOSS, EVAL_LOSS, SAMPLES_SEEN, WINDOW_SPEED = (
    "train/loss",
    "eval/loss",
    "progress/samples_seen",
    "perf/samples_per_sec",
)
LARGEST = 1e100
LAST_STEP = 2**53
MAX_LETTERS = 16 * MIB  # of a file of one object, or a row of the history; they take a few KiB

# By trait, the keys of results.json or config.json that record it.
TRAITS: dict[str, tuple[str, ...]] = {
    "model": ("model", "model_type", "model_name_or_path", "config_overrides"),
    "data": ("dataset", "dataset_config_name", "data_dir", "train_file", "augmentation"),
    "input size": ("image_size", "block_size", "max_length"),
    "global batch": ("global_batch_size",),
    "dtype": ("dtype",),
    "mixed precision": ("mixed_precision",),
    "device": ("device",),
    "torch": ("torch",),
    "memory source": ("memory_source",),
    "steps": ("steps",),
    "seed": ("seed",),
}
# By its key in a ComparisonRow: where results.json has the figure, and its unit there in bytes.
PEAK, SPEED = "peak_memory_bytes", "samples_per_s"
FIGURES_OF_A_ROW: dict[str, tuple[tuple[str, ...], int]] = {
    PEAK: (("memory", "peak_allocated_gib"), GIB),
    "saved_for_backward_bytes": (("memory", "saved_for_backward_gib"), GIB),
    SPEED: (("perf", "samples_per_sec"), 1),
    "tokens_per_s": (("perf", "tokens_per_sec"), 1),
    "mfu_pct": (("perf", "mfu_pct"), 1),
    "train_time_s": (("perf", "train_time_s"), 1),
    "train_loss": (("train_loss",), 1),
}
OF_EVALUATION = "eval_"  # begins the key of a figure of the evaluation
# These two change the loss alone: the memory and speed of runs that differ in them are comparable.
OF_THE_LOSS_ALONE = {"steps", "seed"}
# Flags without an influence on training, which no list of differences names.
INCIDENTAL_FLAGS = {
    *("output_dir", "overwrite", "report_to", "project", "run_name", "resume", "verify"),
}
DERIVED_FROM_FLAGS = ("plan.", "geometry.")  # and shown in the table
# Metrics of an evaluation; a terminal shows the first of them that was recorded.
METRICS = ("accuracy", "f1", "f1_micro", "pearson", "bits_per_byte", "loss")

T = TypeVar("T")


class History:
    """The curves of a run, from its logged rows in the order of writing."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self._curves = {key: (array("q"), array("d")) for key in CURVES}
        for row in rows:
            step = _step_of(row)
            for key, (steps, values) in self._curves.items():
                value = _number(row.get(key))
                if step is not None and value is not None:
                    steps.append(step)
                    values.append(value)

    def curve(self, key: str) -> dict[int, float]:
        """Return a figure by step; a step that was logged twice has its last value."""
        return dict(zip(*self._curves[key], strict=True))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run. ``name`` is its ``--run_name``, else that of its folder.

    ``path`` is its folder.
    """

    name: str
    path: Path
    results: dict[str, Any]
    config: dict[str, Any]
    history: History

    def figure(self, *keys: str) -> float | None:
        """Return a result, as ``figure("memory", "peak_allocated_gib")``; ``None`` if absent or not finite."""
        value = _at(self.results, keys)
        return value if _is_number(value) and abs(value) <= LARGEST else None

    def names(self, key: str) -> list[str]:
        """Return the names of the numbers of a section, as ``names("eval")``."""
        section = self.results.get(key)
        return [name for name in section if self.figure(key, name) is not None] if isinstance(section, dict) else []

    def text(self, *keys: str) -> str | None:
        """Return a text of the results, as ``text("plan")``; ``None`` where it is absent."""
        value = _at(self.results, keys)
        return value if isinstance(value, str) else None


def read_run(folder: Path | str) -> Run:
    """Read a run folder: NOTE [ foreign runs ].

    Raises:
        InputError: a file is missing, cannot be read, or is from another program.
    """
    folder = Path(folder).resolve()
    missing = [name for name in OF_A_RUN if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder} is not a finished run (no {', no '.join(missing)}): finish it or leave it out")
    results = _read_object("results.json", folder)
    if not any(key in results for key in FIGURES):
        raise InputError(f"{folder} has a results.json without figures of these recipes: leave it out")
    config = _read_object("config.json", folder)
    run_name = config.get("run_name")
    return Run(
        name=printable(run_name if isinstance(run_name, str) and run_name else folder.name),
        path=folder,
        results=results,
        config=config,
        history=History(_logged_rows(folder)),
    )


def find_runs(path: Path | str) -> list[Path]:
    """Find the folders of the runs at or below ``path``, finished or not, sorted.

    Raises:
        InputError: there is no such path, or no run in it.
    """
    path = Path(path)
    if not os.path.isdir(path):  # unlike pathlib, without an error for a text that cannot be a path
        raise InputError(f"{path} is not a folder: name one that holds runs")
    walked = os.walk(path)
    found = [Path(folder) for folder, _, files in walked if "results.json" in files or "metrics.jsonl" in files]
    if not found:
        raise InputError(f"{path} holds no run: name an --output_dir, or a folder of them")
    return sorted(found)


def loss_curve(run: Run) -> dict[int, float]:
    """Return the training loss by step."""
    return run.history.curve(TRAIN_LOSS)


def _step_of(row: dict[str, Any]) -> int | None:
    """Return the step of a logged row; ``None`` where it is not a valid step number."""
    step = row.get("step")
    return step if _is_number(step) and isinstance(step, int) and abs(step) <= LAST_STEP else None


def _logged_rows(folder: Path) -> Iterator[dict[str, Any]]:
    with _reading(folder, "metrics.jsonl") as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LETTERS), ""), start=1):
            yield _parse(line, f"metrics.jsonl line {number}", folder)


def _at(nested: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        nested = nested.get(key) if isinstance(nested, dict) else None
    return nested


def _number(value: Any) -> float | None:
    """Return ``value`` if it is a number; beyond ``LARGEST`` it is infinite."""
    if isinstance(value, str):
        return float(value) if value in NOT_FINITE else None
    if not _is_number(value):
        return None
    if abs(value) > LARGEST:
        return math.inf if value > 0 else -math.inf
    return value


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


@contextmanager
def _reading(folder: Path, name: str) -> Iterator[TextIO]:
    try:
        with open(folder / name, encoding="utf-8-sig") as file:
            yield file
    except OSError as error:
        raise InputError(
            f"{folder / name} cannot be read ({error.strerror}): mend that or leave the run out"
        ) from error
    except UnicodeDecodeError as error:
        raise _damaged(name, folder, error) from error


def _read_object(name: str, folder: Path) -> dict[str, Any]:
    with _reading(folder, name) as file:
        text = file.read(MAX_LETTERS)
    content = _parse(text, name, folder)
    try:
        printable_content: dict[str, Any] = sanitized(content)
    except ValueError as error:
        raise _damaged(name, folder, error) from error
    return printable_content


def _parse(text: str, name: str, folder: Path) -> dict[str, Any]:
    try:
        content = read_json(text)
    except ValueError as error:
        raise _damaged(name, folder, error) from error
    if not isinstance(content, dict):
        raise InputError(f"{folder} has a {name} that is not a JSON object, as a recipe writes it: leave it out")
    return content


def _damaged(name: str, folder: Path, error: Exception) -> InputError:
    return InputError(f"{folder} has a damaged {name} ({error}): run it again or leave it out")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number of a run and of its baseline, whose own figures have no ``baseline``."""

    value: float | None
    baseline: float | None = None

    @property
    def ratio(self) -> float | None:
        """``value`` divided by ``baseline``; ``None`` where that is beyond the range of a float."""
        ratio = self.value / self.baseline if self.value is not None and self.baseline else None
        return ratio if ratio is not None and math.isfinite(ratio) else None

    @property
    def difference(self) -> float | None:
        """``value`` minus ``baseline``."""
        return self.value - self.baseline if self.value is not None and self.baseline is not None else None


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One run.

    ``name`` has as much of the path as makes it unique. ``figures`` are by the keys of ``FIGURES_OF_A_ROW``, and those
    of the evaluation. ``metric`` is the first of ``METRICS`` that was evaluated.
    ``differs`` has the traits in which run and baseline differ. ``loss_difference`` is the largest difference at any
    step to the baseline's loss curve; ``None`` unless both logged the same steps.
    """

    run: Run
    name: str
    model: str | None
    plan: str | None
    layout: str | None
    is_baseline: bool
    is_pareto_optimal: bool
    differs: tuple[str, ...]
    figures: dict[str, Figure]
    metric: str | None
    loss_difference: float | None

    def value(self, key: str) -> float | None:
        """Return a figure of the run."""
        return self.figures[key].value

    @property
    def evaluation(self) -> dict[str, Figure]:
        """The figures of the evaluation, by metric."""
        of_evaluation = (key for key in self.figures if key.startswith(OF_EVALUATION))
        return {key.removeprefix(OF_EVALUATION): self.figures[key] for key in of_evaluation}

    @property
    def position(self) -> tuple[float, float] | None:
        """Peak memory and throughput, where both are known."""
        memory, speed = self.value(PEAK), self.value(SPEED)
        return None if memory is None or speed is None else (memory, speed)


@dataclass(frozen=True, kw_only=True)
class ComparisonTable:
    """The rows, by model; each baseline is before the runs that are compared with it."""

    rows: tuple[ComparisonRow, ...]

    @property
    def sections(self) -> tuple[tuple[ComparisonRow, ...], ...]:
        """The rows of each model; runs of different models are not compared."""
        models = _distinct(row.model for row in self.rows)
        return tuple(tuple(row for row in self.rows if row.model == model) for model in models)

    @property
    def memory_sources(self) -> tuple[str, ...]:
        """The ways in which the peaks were measured; only peaks of one source are compared."""
        return tuple(_distinct(source for row in self.rows if (source := _memory_source(row.run))))


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """A trait or a flag in which runs differ: each value, with the positions of the runs that have it."""

    name: str
    values: dict[str, tuple[int, ...]]


def compare(runs: Sequence[Run], baseline: Run | None = None) -> ComparisonTable:
    """Compare each run with its baseline.

    That is ``baseline`` for the runs of its model. For others it is of the runs of the same model and global batch size
    with the plan ``none``, or else of all of them, the first of those with the largest micro-batch.
    """
    if baseline is not None and baseline.path not in [run.path for run in runs]:
        runs = [baseline, *runs]
    names = dict(zip([run.path for run in runs], _unique_names(runs), strict=True))
    models, works = _distinct(run.text("model") for run in runs), _distinct(_work(run) for run in runs)
    pairs = [(run, _baseline_of(run, runs, baseline)) for run in runs]
    pairs.sort(key=lambda pair: (models.index(pair[0].text("model")), works.index(_work(pair[0])), not _is_same(*pair)))
    optimal = _pareto_optimal(runs)
    return ComparisonTable(
        rows=tuple(_row(names[run.path], run, other, is_optimal=run.path in optimal) for run, other in pairs)
    )


def traits(run: Run) -> dict[str, str]:
    """Return the ``TRAITS`` that the run recorded, as text."""
    known = flat(run.config, ".") | flat(run.config.get("environment"), ".") | flat(run.results, ".")
    known |= {"torch": known.get("versions.torch"), "memory_source": known.get("memory.source")}
    found = {trait: [known[key] for key in keys if known.get(key) is not None] for trait, keys in TRAITS.items()}
    return {trait: ", ".join(dict.fromkeys(map(str, values))) for trait, values in found.items() if values}


def workload_key(run: Run) -> tuple[tuple[str, str], ...]:
    """Return a key that is equal for runs whose memory and speed are comparable: same workload, as much hardware."""
    shared = {trait: value for trait, value in traits(run).items() if trait not in OF_THE_LOSS_ALONE}
    return (*sorted(shared.items()), ("ranks", str(run.figure("num_processes"))))


def differing_traits(run: Run, other: Run) -> tuple[str, ...]:
    """Return the traits that both runs recorded with different values."""
    one, two = traits(run), traits(other)
    return tuple(trait for trait in TRAITS if trait in one and trait in two and one[trait] != two[trait])


def trait_differences(runs: Sequence[Run]) -> tuple[RunDifference, ...]:
    """Return the traits in which ``runs`` differ, with the positions of the runs."""
    return _differences(TRAITS, [traits(run) for run in runs])


def config_differences(runs: Sequence[Run]) -> tuple[RunDifference, ...]:
    """Return the flags, versions and hardware in which ``runs`` differ, by their keys in ``config.json``."""
    configs = [{key: _text(value) for key, value in flat(run.config, ".").items()} for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if not key.startswith(DERIVED_FROM_FLAGS))
    return _differences((key for key in keys if key not in INCIDENTAL_FLAGS), configs)


def _differences(names: Iterable[str], records: Sequence[dict[str, str]]) -> tuple[RunDifference, ...]:
    found = []
    for name in names:
        values: dict[str, tuple[int, ...]] = {}
        for position, record in enumerate(records):
            if name in record:
                values[record[name]] = (*values.get(record[name], ()), position)
        if len(values) > 1:
            found.append(RunDifference(name=name, values=values))
    return tuple(found)


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _distinct(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))


def _unique_names(runs: Sequence[Run]) -> list[str]:
    times = Counter(run.name for run in runs)
    return [run.name if times[run.name] == 1 else _end_of_path(run, runs) for run in runs]


def _end_of_path(run: Run, runs: Sequence[Run]) -> str:
    """Return as much of the end of its path as no other run of the same name shares."""
    parts = run.path.parts
    others = [other.path.parts for other in runs if other.name == run.name and not _is_same(other, run)]
    depths = range(1, len(parts) + 1)
    depth = next(depth for depth in depths if all(other[-depth:] != parts[-depth:] for other in others))
    return printable("/".join(parts[-depth:]))


def _baseline_of(run: Run, runs: Sequence[Run], chosen: Run | None) -> Run:
    if chosen is not None and chosen.text("model") == run.text("model"):
        return chosen
    peers = [peer for peer in runs if _work(peer) == _work(run)]
    plain = [peer for peer in peers if peer.text("plan") == "none"]
    return max(plain or peers, key=lambda peer: peer.figure("micro_batch_size") or 0)


def _work(run: Run) -> tuple[str | None, float | None]:
    return run.text("model"), run.figure("global_batch_size")


def _is_same(run: Run, other: Run) -> bool:
    return run.path == other.path


def _memory_source(run: Run) -> str | None:
    return run.text("memory", "source")


def _pareto_optimal(runs: Sequence[Run]) -> set[Path]:
    """NOTE [ Pareto ]."""
    workloads = defaultdict(list)
    for run in runs:
        memory, speed = run.figure("memory", "peak_allocated_gib"), run.figure("perf", "samples_per_sec")
        if memory is not None and speed is not None:
            workloads[workload_key(run)].append((memory, speed, run.path))
    return {
        path
        for group in workloads.values()
        for memory, speed, path in group
        if len(group) > 1 and not any(m <= memory and s >= speed and (m, s) != (memory, speed) for m, s, _ in group)
    }


def _row(name: str, run: Run, baseline: Run, *, is_optimal: bool) -> ComparisonRow:
    is_baseline = _is_same(run, baseline)

    def figure(*keys: str, unit: int = 1) -> Figure:
        value, other = run.figure(*keys), baseline.figure(*keys)
        return Figure(
            value=None if value is None else value * unit,
            baseline=None if other is None or is_baseline else other * unit,
        )

    metrics = run.names("eval")
    figures = {key: figure(*keys, unit=unit) for key, (keys, unit) in FIGURES_OF_A_ROW.items()}
    if _memory_source(run) != _memory_source(baseline):
        figures[PEAK] = Figure(value=figures[PEAK].value)
    return ComparisonRow(
        run=run,
        name=name,
        model=run.text("model"),
        plan=run.text("plan"),
        layout=layout_of(run),
        is_baseline=is_baseline,
        is_pareto_optimal=is_optimal,
        differs=differing_traits(run, baseline),
        figures=figures | {f"{OF_EVALUATION}{name}": figure("eval", name) for name in metrics},
        metric=next((name for name in (*METRICS, *metrics) if name in metrics), None),
        loss_difference=None if is_baseline else _loss_difference(loss_curve(run), loss_curve(baseline)),
    )


def layout_of(run: Run) -> str | None:
    """Return ``8 x 2 ranks x 4``: micro-batch, ranks, accumulation steps."""
    micro, ranks, accumulation = (
        run.figure(name) for name in ("micro_batch_size", "num_processes", "accumulation_steps")
    )
    if micro is None or ranks is None or accumulation is None:
        return None
    return f"{micro} x {ranks} {'rank' if ranks == 1 else 'ranks'} x {accumulation}"


def _loss_difference(curve: dict[int, float], other: dict[int, float]) -> float | None:
    """Return the largest absolute difference at any step; ``None`` unless both have logged the same steps."""
    if not curve or curve.keys() != other.keys():
        return None
    differences = [abs(curve[step] - other[step]) for step in curve]
    return math.nan if any(map(math.isnan, differences)) else max(differences)
