"""The rows of the results table: one run each, as a JSON file that can be checked and sent.

``ResultRow`` is the schema: a file has exactly its fields, with null for a figure that is not known. ``rows_of`` makes
rows of finished runs.

NOTE [ time ratio ]: the seconds a sample of a run, divided by those of the first run without a plan (``none``) that has
the same workload on the same hardware and is added together with it.

NOTE [ shared rows ]: a row is made to be sent, so data and models that lie in local folders are named by the last part
of their path alone.
"""

import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.text import GIB
from memsave_recipes.tools.compare import (
    PEAK,
    SPEED,
    TRAITS,
    WINDOW_SPEED,
    ComparisonRow,
    History,
    Run,
    compare,
    traits,
    workload_key,
)

SCHEMA_VERSION = 1
OF_THE_HARDWARE = {"device", "torch", "memory source"}  # traits that have fields of their own
SETTINGS = (
    *("optimizer", "optimizer_in_backward", "loss", "lora", "load_in_4bit", "attn_implementation"),
    *("batchnorm", "bitwise_topology", "channels_last", "matmul_precision"),
)
"""Flags that change memory or speed beside the plan and the batch layout."""
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
    "metric": "end the run, which evaluates",
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
        if one.plan == "none" and (speed := one.value(SPEED)):
            plain.setdefault(workload_key(one.run), speed)
    return [
        replace(_row(one, plain.get(workload_key(one.run))), device_memory_bytes=device_memory_bytes)
        for one in compared
    ]


def _row(one: ComparisonRow, plain_samples_per_s: float | None) -> ResultRow:
    run, environment = one.run, one.run.config.get("environment")
    environment = environment if isinstance(environment, dict) else {}
    speed, peak = one.value(SPEED), _whole(one.value(PEAK))
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
        saved_for_backward_bytes=_whole(one.value("saved_for_backward_bytes")),
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
    speeds = list(filter(isfinite, run.history.curve(WINDOW_SPEED).values()))
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
