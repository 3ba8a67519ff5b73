"""The rows of the results table: one run each, as a JSON file that can be checked and sent.

``rows_of`` makes rows of finished runs, ``read_row`` reads one back, ``problems_of`` finds figures that cannot be.
``ResultRow`` is the schema: a file has exactly its fields, with null for a figure that is not known.

NOTE [ the schema is a dataclass ]: jsonschema is no dependency of ours, and the rules that matter compare fields with
one another (a peak and the weights below it), which it cannot express. So types come from the annotations, and rules
from ``problems_of``.

NOTE [ time ratio ]: the seconds a sample of a run, divided by those of the first run without a plan (``none``) that has
the same workload on the same hardware and is added together with it.

NOTE [ shared rows ]: a row is made to be sent, so data and models that lie in local folders are named by the last part
of their path alone.
"""

import json
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from memsave_recipes.compare import (
    LARGEST,
    TRAITS,
    ComparisonRow,
    History,
    Run,
    compare,
    history_row,
    traits,
    workload_key,
)
from memsave_recipes.errors import InputError
from memsave_recipes.text import GIB, format_bytes, read_json, sanitized

SCHEMA_VERSION = 1
OF_THE_HARDWARE = {"device", "torch", "memory source"}  # traits that have fields of their own
SETTINGS = (
    *("optimizer", "optimizer_in_backward", "loss", "lora", "load_in_4bit", "attn_implementation"),
    *("batchnorm", "bitwise_topology", "channels_last", "matmul_precision"),
)
"""Flags that change memory or speed beside the plan and the batch layout."""
MEMORY_SLACK = 1.1  # of a device's memory: sheets and drivers differ by less
SHARES = ("accuracy", "f1", "f1_macro")
WINDOW_SPEED = "perf/samples_per_sec"
UNKNOWN = "unknown"

WAYS_OUT = {
    "predicted_peak_bytes": "train with --activation_checkpointing budget, which predicts the peak",
    "peak_bytes": "train two steps or more of the full global batch",
    "weights_bytes": "train two steps or more of the full global batch",
    "saved_for_backward_bytes": "train two steps or more of the full global batch",
    "samples_per_s": "train more steps than the warm-up, on a machine that does nothing else",
    "samples_per_s_quartiles": "log two windows or more after the warm-up (--logging_steps)",
    "num_windows": "log two windows or more after the warm-up (--logging_steps)",
    "time_ratio": "add the run together with one of the same workload with --activation_checkpointing none",
    "metric": "evaluate: leave --max_eval_samples above 0",
    "device_memory_bytes": "give --device_memory, such as 80GiB",
    "git_commit": "run the recipe in a clone, with git installed",
}
"""How to get a figure that a row does not have; the others come with every run of a recipe of this version."""


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One run: bytes, samples a second, ratios.

    Args:
        workload: the traits (``compare.TRAITS``) that runs share which are compared, as text.
        settings: the flags of ``SETTINGS`` that the run recorded.
        weights_bytes: of the parameters on the rank whose peak is measured.
        peak_source: how the peak was measured.
        samples_per_s_quartiles: the ends of the middle half of the logging windows; ``num_windows`` counts them.
        time_ratio: NOTE [ time ratio ].
        metric: the one of ``evaluation`` that a table shows.
        processor: with its instruction set, where the device is a CPU.
    """

    schema_version: int
    recipe: str | None
    model: str
    plan: str
    workload: dict[str, str]
    settings: dict[str, str]
    num_processes: int | None
    micro_batch_size: int | None
    accumulation_steps: int | None
    num_parameters: int | None
    weights_bytes: int | None
    predicted_peak_bytes: int | None
    peak_bytes: int | None
    peak_source: str | None
    saved_for_backward_bytes: int | None
    samples_per_s: float | None
    samples_per_s_quartiles: list[float] | None
    num_windows: int | None
    time_ratio: float | None
    metric: str | None
    evaluation: dict[str, float]
    device: str | None
    device_memory_bytes: int | None
    processor: str | None
    num_threads: int | None
    versions: dict[str, str]
    git_commit: str | None

    @property
    def name(self) -> str:
        """Of its file: model, plan and batch layout for people, and a digest of everything but the times."""
        layout = f"{self.micro_batch_size}x{self.num_processes}x{self.accumulation_steps}"
        digest = sha256(self.without_times().to_json().encode()).hexdigest()[:8]
        return re.sub(r"[^a-z0-9]+", "-", f"{self.model} {self.plan} {layout} {digest}".lower()).strip("-")

    @property
    def missing(self) -> list[str]:
        """The fields that are null or empty."""
        return [name for name, value in asdict(self).items() if value in (None, {})]

    @property
    def quality(self) -> float | None:
        """The final value of ``metric``."""
        return self.evaluation.get(self.metric) if self.metric else None

    def to_run(self) -> Run:
        """The row as a run without a history, for the functions that compare runs."""
        trait_values = {TRAITS[trait][-1]: value for trait, value in self.workload.items() if trait in TRAITS}
        memory = {"peak_allocated_gib": _gib(self.peak_bytes), "source": self.peak_source}
        results = {"model": self.model, "plan": self.plan, "device": self.device, "memory": memory}
        layout = ("num_processes", "micro_batch_size", "accumulation_steps")
        return Run(
            name=self.name,
            path=Path(self.name),
            results={
                **results,
                **{name: getattr(self, name) for name in layout},
                "perf": {"samples_per_sec": self.samples_per_s},
                "eval": self.evaluation,
            },
            config={**trait_values, "versions": self.versions},
            history=History([]),
        )

    def without_times(self) -> "ResultRow":
        """The row of a run whose machine had other work."""
        return replace(self, samples_per_s=None, samples_per_s_quartiles=None, num_windows=None, time_ratio=None)

    def to_json(self) -> str:
        """The content of its file."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


def rows_of(runs: Sequence[Run], *, device_memory_bytes: int | None = None) -> list[ResultRow]:
    """A row for each run.

    Raises:
        InputError: a run has neither a peak nor a speed, or no model or plan.
    """
    compared = compare([_without_paths(run) for run in runs]).rows
    plain: dict[tuple[tuple[str, str], ...], float] = {}
    for one in compared:
        if one.plan == "none" and one.samples_per_s.value:
            plain.setdefault(workload_key(one.run), one.samples_per_s.value)
    return [
        replace(_row(one, plain.get(workload_key(one.run))), device_memory_bytes=device_memory_bytes)
        for one in compared
    ]


def _row(one: ComparisonRow, plain_samples_per_s: float | None) -> ResultRow:
    run, environment = one.run, one.run.config.get("environment")
    environment = environment if isinstance(environment, dict) else {}
    speed, peak = one.samples_per_s.value, _whole(one.peak_memory.value)
    if one.model is None or one.plan is None or (peak is None and speed is None):
        raise InputError(f"{run.path} has no model, no plan or no figures of training: add a run that has trained")
    quartiles, num_windows = _spread(run)
    return ResultRow(
        schema_version=SCHEMA_VERSION,
        recipe=run.text("recipe"),
        model=one.model,
        plan=one.plan,
        workload={trait: text for trait, text in traits(run).items() if trait not in OF_THE_HARDWARE},
        settings={name: str(value) for name in SETTINGS if (value := run.config.get(name)) not in (None, False)},
        num_processes=_whole(run.figure("num_processes")),
        micro_batch_size=_whole(run.figure("micro_batch_size")),
        accumulation_steps=_whole(run.figure("accumulation_steps")),
        num_parameters=_whole(run.figure("num_parameters")),
        weights_bytes=_in_bytes(run.figure("memory", "breakdown", "parameters_gib")),
        predicted_peak_bytes=_in_bytes(run.figure("memory", "predicted_peak_gib")),
        peak_bytes=peak,
        peak_source=run.text("memory", "source"),
        saved_for_backward_bytes=_whole(one.saved_for_backward.value),
        samples_per_s=speed,
        samples_per_s_quartiles=quartiles,
        num_windows=num_windows,
        time_ratio=plain_samples_per_s / speed if plain_samples_per_s and speed else None,
        metric=one.metric,
        evaluation={name: figure.value for name, figure in one.evaluation.items() if figure.value is not None},
        device=run.text("device"),
        device_memory_bytes=None,
        processor=_text(environment, "processor"),
        num_threads=threads if isinstance(threads := environment.get("num_threads"), int) else None,
        versions={name: value for name, value in _part(environment, "versions").items() if isinstance(value, str)},
        git_commit=_text(environment, "git_commit"),
    )


def _without_paths(run: Run) -> Run:
    """NOTE [ shared rows ]."""
    keys = {*TRAITS["model"], *TRAITS["data"]}

    def shared(named: dict[str, Any]) -> dict[str, Any]:
        return {key: _last_part(value) if key in keys else value for key, value in named.items()}

    return replace(run, results=shared(run.results), config=shared(run.config))


def _last_part(value: Any) -> Any:
    if isinstance(value, list):
        return [_last_part(one) for one in value]
    is_path = isinstance(value, str) and (os.path.isabs(value) or os.path.exists(value))
    return Path(os.path.abspath(value)).name if is_path else value


def _spread(run: Run) -> tuple[list[float] | None, int | None]:
    """The quartiles of the windows' samples/s, and how many windows there are; nothing of fewer than two."""
    logged = (history_row(row).get(WINDOW_SPEED) for row in run.history.rows)
    speeds = [speed for speed in logged if speed is not None and isfinite(speed)]
    if len(speeds) < 2:
        return None, None
    low, _, high = statistics.quantiles(speeds, n=4, method="inclusive")
    return [low, high], len(speeds)


def _part(nested: Mapping[str, Any], key: str) -> dict[str, Any]:
    part = nested.get(key)
    return part if isinstance(part, dict) else {}


def _text(named: Mapping[str, Any], key: str) -> str | None:
    value = named.get(key)
    return value if isinstance(value, str) and value != UNKNOWN else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _in_bytes(gib: float | None) -> int | None:
    return None if gib is None else round(gib * GIB)


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / GIB


def read_row(path: Path) -> ResultRow:
    """The row in a file.

    Raises:
        InputError: it cannot be read, is of another version, or has other fields or types; all of it in one message.
    """
    try:
        content = sanitized(read_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): add the run again") from error
    problems = list(_schema_problems(content))
    if problems:
        raise InputError(f"{path}: {'; '.join(problems)}")
    return ResultRow(**content)


def _schema_problems(content: Any) -> Iterator[str]:
    if not isinstance(content, dict):
        yield "is no JSON object"
        return
    if content.get("schema_version") != SCHEMA_VERSION:
        yield f"schema_version {content.get('schema_version')} is not {SCHEMA_VERSION}: add the run again"
        return
    hints = get_type_hints(ResultRow)
    names = [field.name for field in fields(ResultRow)]
    yield from (f"unknown key {key}: remove it" for key in content.keys() - set(names))
    for name in names:
        if name not in content:
            yield f"key {name} is missing: write null where it is not known"
        elif not _is_of(content[name], hints[name]):
            yield f"{name} is not of type {hints[name]}"


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the type; a whole number is a float, a truth value is no number."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is dict:
        return isinstance(value, dict) and all(_is_of(one, inner[1]) for one in value.values())
    if kind is list:
        return isinstance(value, list) and all(_is_of(one, inner[0]) for one in value)
    if inner:
        return any(_is_of(value, one) for one in inner)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    return isinstance(value, hint) and not isinstance(value, bool)


def problems_of(row: ResultRow) -> Iterator[str]:
    """A line for each figure that no run can have."""
    counts = ("num_processes", "micro_batch_size", "accumulation_steps", "num_parameters", "num_threads", "num_windows")
    amounts = ("weights_bytes", "predicted_peak_bytes", "peak_bytes", "device_memory_bytes")
    for name in (*counts, *amounts, "samples_per_s", "time_ratio"):
        value = getattr(row, name)
        if value is not None and value <= 0:
            yield f"{name} {value} is not above 0"
    if row.saved_for_backward_bytes is not None and row.saved_for_backward_bytes < 0:
        yield f"saved_for_backward_bytes {row.saved_for_backward_bytes} is below 0"
    yield from _memory_problems(row)
    yield from _speed_problems(row)
    yield from _quality_problems(row)


def _memory_problems(row: ResultRow) -> Iterator[str]:
    for name in ("predicted_peak_bytes", "peak_bytes"):
        peak = getattr(row, name)
        if peak is not None and row.weights_bytes is not None and peak < row.weights_bytes:
            yield f"{name} {format_bytes(peak)} is below the weights' {format_bytes(row.weights_bytes)}"
    if row.peak_bytes and row.device_memory_bytes and row.peak_bytes > MEMORY_SLACK * row.device_memory_bytes:
        device = format_bytes(row.device_memory_bytes)
        yield f"peak_bytes {format_bytes(row.peak_bytes)} is above the device's {device}"


def _speed_problems(row: ResultRow) -> Iterator[str]:
    if row.samples_per_s is not None and row.device is None:
        yield "samples_per_s has no device that it was measured on"
    if row.samples_per_s is None and (row.time_ratio is not None or row.samples_per_s_quartiles is not None):
        yield "time_ratio and samples_per_s_quartiles are of a speed, and samples_per_s is null"
    quartiles = row.samples_per_s_quartiles
    if quartiles is not None and not (len(quartiles) == 2 and 0 < quartiles[0] <= quartiles[1]):
        yield f"samples_per_s_quartiles {quartiles} are not two speeds in order"


def _quality_problems(row: ResultRow) -> Iterator[str]:
    if row.metric is not None and row.metric not in row.evaluation:
        yield f"metric {row.metric} is not in evaluation"
    for name, value in row.evaluation.items():
        if name in SHARES and not 0 <= value <= 1:
            yield f"{name} {value} is not in [0, 1]"


def read_rows(folder: Path) -> tuple[list[ResultRow], list[str]]:
    """The rows of a folder, and a line for each problem of a file.

    Raises:
        InputError: there is no such folder.
    """
    if not os.path.isdir(folder):
        raise InputError(f"{folder} is not a folder of rows: name one that `memsave results add` has written to")
    rows: list[ResultRow] = []
    problems, files = [], defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        try:
            row = read_row(path)
        except InputError as error:
            problems.append(error.one_line)
            continue
        rows.append(row)
        files[row.name].append(path.name)
        problems += [f"{path}: {problem}" for problem in problems_of(row)]
    for name, same in files.items():
        if len(same) > 1:
            problems.append(f"{folder}: {', '.join(same)} are the same run: keep one")
        elif same != [f"{name}.json"]:
            problems.append(f"{folder / same[0]} is not named by its content: rename it to {name}.json")
    return rows, problems
