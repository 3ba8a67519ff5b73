"""Comparability: what runs must share before their figures say something about the method.

The method is the memory plan and the geometry: those may differ, the loss curve is the same. Everything here changes
the loss, the memory or the speed by itself. What a run did not record counts as equal: unknown is no difference.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from memsave_recipes.evidence.runs import Run

# What must be equal: the keys of results.json or config.json that say it; several together are one trait.
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
# These two change the loss alone, so runs that differ in them still compete for memory and speed.
OF_THE_LOSS_ALONE = {"steps", "seed"}
# A run's own place and how it reports: not worth a line among the differences of its configuration.
NOT_A_CHOICE = {"output_dir", "overwrite", "report_to", "resume", "verify"}
FOLLOWS_FROM_FLAGS = ("plan.", "geometry.")  # and stands in the table


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A trait or a flag that is not the same in all runs: each value, with the positions of the runs that have it."""

    name: str
    values: dict[str, tuple[int, ...]]


def traits(run: Run) -> dict[str, str]:
    """What the run recorded of ``TRAITS``, as text."""
    known = _flat(run.config) | _flat(run.config.get("environment", {})) | _flat(run.results)
    known |= {"torch": known.get("versions.torch"), "memory_source": known.get("memory.source")}
    found = {trait: [known[key] for key in keys if known.get(key) is not None] for trait, keys in TRAITS.items()}
    return {trait: ", ".join(dict.fromkeys(map(str, values))) for trait, values in found.items() if values}


def competition(run: Run) -> tuple[tuple[str, str], ...]:
    """Equal for runs that do the same work on as much hardware: among them, memory and speed decide."""
    shared = {trait: value for trait, value in traits(run).items() if trait not in OF_THE_LOSS_ALONE}
    return (*sorted(shared.items()), ("ranks", str(run.figure("num_processes"))))


def differing_traits(run: Run, other: Run) -> tuple[str, ...]:
    """The traits that both runs recorded and that are not the same."""
    mine, its = traits(run), traits(other)
    return tuple(trait for trait in TRAITS if trait in mine and trait in its and mine[trait] != its[trait])


def trait_differences(runs: Sequence[Run]) -> tuple[Difference, ...]:
    """The traits in which ``runs`` are not all the same."""
    return _differences(TRAITS, [traits(run) for run in runs])


def config_differences(runs: Sequence[Run]) -> tuple[Difference, ...]:
    """The flags, versions and hardware in which ``runs`` are not all the same, by their keys in ``config.json``."""
    configs = [{key: _text(value) for key, value in _flat(run.config).items()} for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if not key.startswith(FOLLOWS_FROM_FLAGS))
    return _differences((key for key in keys if key not in NOT_A_CHOICE), configs)


def _differences(names: Iterable[str], records: Sequence[dict[str, str]]) -> tuple[Difference, ...]:
    found = []
    for name in names:
        values: dict[str, tuple[int, ...]] = {}
        for position, record in enumerate(records):
            if name in record:
                values[record[name]] = (*values.get(record[name], ()), position)
        if len(values) > 1:
            found.append(Difference(name=name, values=values))
    return tuple(found)


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _flat(nested: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries, keyed ``outer.inner``."""
    flat: dict[str, Any] = {}
    for key, value in nested.items() if isinstance(nested, dict) else ():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
