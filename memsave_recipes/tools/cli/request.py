"""The request of ``memsave plan`` and ``frontier``: a recipe, its flags and a target device; and its results."""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from memsave_recipes.core.costs.targets import Target, target_of
from memsave_recipes.core.errors import InputError, require
from memsave_recipes.core.planner.budget import usable_bytes
from memsave_recipes.core.planner.make_plan import MAX_GIB
from memsave_recipes.core.planner.search import Candidate, Choice
from memsave_recipes.core.planner.task import (
    Launch,
    Task,
    choose_for_target,
    fake_planned_model,
    layouts_of,
    shard_groups,
)
from memsave_recipes.core.plans import BUDGET_WORDS
from memsave_recipes.core.progress import ProgressBar
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.core.step.settings import AUTO
from memsave_recipes.core.text import GIB, to_gib
from memsave_recipes.tools.cli.flags import CONFIGS, other_recipe, recipe_at_hand, recipes_folder
from memsave_recipes.tools.fit.advice import budget_too_small
from memsave_recipes.tools.fit.frontier import FrontierPoint
from memsave_recipes.tools.fit.recipe_task import read_task
from memsave_recipes.training.arguments import PRECISIONS
from memsave_recipes.training.parsing import named_flags, underscored

EXPECTED_SECONDS = (
    "seconds are expected, not measured: by the shares of the data sheet's rates that eager kernels reach on an H100, "
    "without waits for the host or for data (docs/design/predictions.md)"
)
COMPILED_LAYERS = (
    "layers that repeat compute compiled, as --compile auto does on a GPU with Triton; --compile none plans without"
)
CPU_SECONDS = "seconds are estimates by the rates measured here: they rank plans"
NO_FIGURE = "not in any figure: fragmentation of the allocator"
NO_FIGURE_OF_CONVOLUTIONS = f"{NO_FIGURE}, and cuDNN's workspaces, for which convolutions take memory that is free"
DEFAULT_LEAVES = "; the default budget leaves 5 %"
IN_SHARDS = (
    "peaks are those of the first rank, which has most: with the weights of a unit or two that are gathered whole, and "
    "gradients while they are reduced (communication); streams of a GPU may hold one buffer more"
)
TRAFFIC = (
    "traffic is assumed to pass at {rate:.4g} GB/s ({source}), two gathers of all weights a micro-batch and a "
    "reduction whenever gradients are reduced, and to hide behind a unit's own forward and backward"
)
EXCHANGES = (
    "{size} ranks share each row (--sequence_parallel): what they exchange is assumed to pass at {rate:.4g} GB/s "
    "({source}), and is in the seconds of the blocks"
)
TO_HOST = "a device's link to its host; --interconnect names another rate"
COPIES = "that of copies on this CPU; --interconnect names another rate"
NO_TEXTS = "FILE stands for your texts: without --train_file the run trains on texts that are built in"
MAX_GB_PER_S = 1e6
SHARED = "sequence_parallel"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A recipe with its flags, to be planned for a device.

    Args:
        flags: the recipe's, as they were typed.
        named: the flags given there or in their preset, with the values.
        task: with micro-batch size ``auto`` and strategy ``budget`` unless the flags name others.
        budget_gib: memory of a device, for everything on it.
    """

    recipe: Path
    flags: tuple[str, ...]
    named: dict[str, str]
    task: Task
    launch: Launch
    budget_gib: float

    @property
    def budget_bytes(self) -> int:
        """The budget of a device."""
        return int(self.budget_gib * GIB)

    @property
    def has_no_texts(self) -> bool:
        """Whether the flags of a recipe for texts leave them out."""
        return hasattr(self.task.run, "train_file") and not {"train_file", "dataset"} & self.named.keys()

    @property
    def title(self) -> str:
        """``vgg16, image_classification``: the model and the recipe."""
        names = (self.named.get(flag) for flag in ("model", "model_name_or_path", "model_type"))
        return ", ".join(filter(None, (next(filter(None, names), None), self.recipe.stem)))

    @property
    def place(self) -> str:
        """``2 x NVIDIA A10, bf16``: the devices and the precision."""
        count, precision = self.launch.num_processes, self.launch.mixed_precision
        devices = f"{count} x {self.launch.target.name}" if count > 1 else self.launch.target.name
        return devices if precision == "no" else f"{devices}, mixed precision {precision}"

    @property
    def remarks(self) -> list[str]:
        """The sources of the figures, in sentences."""
        target = self.launch.target
        takes_images = any(isinstance(one, Tensor) and one.ndim == 4 for one in self.task.micro_batch(1).values())
        no_figure = (NO_FIGURE_OF_CONVOLUTIONS if takes_images else NO_FIGURE) + DEFAULT_LEAVES
        return [
            f"for {self.place}" + (f" ({target.remark})" if target.remark else ""),
            *self._remarks_on_ranks(),
            *(f"assumed: {assumption}" for assumption in self.task.assumed),
            *([NO_TEXTS] if self.has_no_texts else []),
            *other_recipe(self.recipe),
            *([CPU_SECONDS] if target.device.type == "cpu" else [EXPECTED_SECONDS, no_figure]),
        ]

    def remarks_on(self, candidate: Candidate) -> list[str]:
        """Return ``remarks``, and what a step of ``candidate`` compiles, holds and sends for sums of gradients."""
        remarks = [*self.remarks, *([COMPILED_LAYERS] if candidate.forecast.plan.compiled else [])]
        if not candidate.layout.is_bitwise:
            return remarks
        model = fake_planned_model(self.task, self.launch.target)
        return [*remarks, *filter(None, [candidate.layout.describe_sums(model)])]

    def reducing_every_micro_batch(self) -> "PlanRequest":
        """Return the request for gradients that are reduced for every micro-batch, where weights are in shards."""
        return replace(self, task=replace(self.task, run=replace(self.task.run, reduces_once=False)))

    def _remarks_on_ranks(self) -> list[str]:
        groups, size = shard_groups(self.task, self.launch), self.task.run.sequence_parallel
        rate = self.launch.bytes_per_s_between / 1e9
        unnamed = COPIES if self.launch.target.device.type == "cpu" else TO_HOST
        source = unnamed if self.launch.link_bytes_per_s is None else "--interconnect"
        shared = [EXCHANGES.format(size=size, rate=rate, source=source)] if size > 1 else []
        in_shards = [] if groups is None else [groups.describe(), IN_SHARDS, TRAFFIC.format(rate=rate, source=source)]
        return [*shared, *in_shards]

    def no_fit(self, choice: Choice) -> InputError:
        """Return the error where no candidate fits."""
        return budget_too_small(choice.smallest, self.task, lambda: self.launch)


def read_request(arguments: argparse.Namespace) -> PlanRequest:
    """Read a command line; micro-batch size and strategy are searched unless the flags name them.

    Raises:
        InputError: an invalid value, an unknown target, or flags that the recipe refuses.
    """
    flags = underscored(arguments.flags)
    named = named_flags(flags)
    target = target_of(arguments.target, arguments.target_memory)
    usable_gib = to_gib(usable_bytes(target.memory_bytes, target.device))
    gib, count = arguments.memory_budget_gib, arguments.num_processes
    require(gib is None or 0 < gib <= MAX_GIB, "--memory_budget_gib", gib, "from above 0 to a million")
    require(count >= 1, "--num_processes", count, "at least 1")
    if named.get("dtype") == AUTO:
        named["dtype"] = target.half
        flags = (*without(flags, {"dtype": AUTO}), "--dtype", target.half)
    precision = PRECISIONS.get(named.get("dtype", ""), arguments.mixed_precision)  # as in a run
    check_precision(precision, target)
    if gib is None and "memory_budget_gib" not in named:
        gib = usable_gib
    task = read_task(arguments.recipe, [*flags, *open_flags(named, gib)])
    return PlanRequest(
        recipe=arguments.recipe,
        flags=flags,
        named=named,
        task=task,
        launch=Launch(
            target=target,
            num_processes=arguments.num_processes,
            mixed_precision=precision,
            host_budget_bytes=host_budget_of(arguments, target, count),
            link_bytes_per_s=_link_bytes_per_s(arguments, task),
        ),
        budget_gib=gib or task.run.memory_budget_gib or usable_gib,
    )


def host_budget_of(arguments: argparse.Namespace, target: Target, num_processes: int = 1) -> int | None:
    """Return a rank's share of ``--host_memory``; ``None`` where it is not given."""
    if arguments.host_memory is None:
        return None
    size = f"{arguments.host_memory:g}GiB"
    require(arguments.host_memory > 0, "--host_memory", size, "above 0")
    if target.device.type == "cpu":
        raise InputError(f"--host_memory {size}: nothing is offloaded from a CPU: leave it out, or name a GPU")
    return int(arguments.host_memory * GIB) // num_processes


def _link_bytes_per_s(arguments: argparse.Namespace, task: Task) -> float | None:
    rate: float | None = arguments.interconnect
    if rate is None:
        return None
    require(0 < rate <= MAX_GB_PER_S, "--interconnect", rate, "GB/s from above 0 to a million")
    if not task.run.in_shards and (SHARED not in vars(task.run) or arguments.num_processes == 1):
        raise InputError(f"--interconnect {rate:g}: only shards are gathered: add --shard full, or leave it out")
    return rate * 1e9


def choose(request: PlanRequest, **options: Any) -> Choice:
    """Choose with a progress bar; ``options`` are those of ``choose_for_target``."""
    task, launch = request.task, request.launch
    total = len(layouts_of(task, launch.num_processes)) * len(task.losses_on(launch.target.device))
    with ProgressBar(desc="planning", total=total, unit="size") as bar:

        def on_size(layout: BatchLayout) -> None:
            bar.set_postfix_str(f"micro-batch {layout.micro_batch_size}", refresh=False)
            bar.update()

        budget_bytes = request.budget_bytes
        return choose_for_target(task, launch, budget_bytes, on_size=on_size, in_processes=True, **options)


def open_flags(named: dict[str, str], gib: float | None) -> Sequence[str]:
    """Return the flags to add to the recipe's, so that the planner searches everything that these do not name."""
    added = []
    strategy = named.get("activation_checkpointing")
    if strategy is None:
        added += ["--activation_checkpointing", BUDGET_WORDS[0]]
    if "micro_batch_size" not in named:
        added += ["--micro_batch_size", AUTO]
    is_searched = strategy in (None, *BUDGET_WORDS) or named.get("micro_batch_size", AUTO) == AUTO
    # A run without a search refuses a budget; the request still compares the run's need with it.
    return [*added, "--memory_budget_gib", repr(gib)] if is_searched and gib is not None else added


def check_precision(precision: str | None, target: Target) -> None:
    """Raise ``InputError`` for fp16 on a CPU."""
    if target.device.type == "cpu" and precision == "fp16":
        raise InputError("--mixed_precision fp16 does not work on the CPU: take bf16 or no, and not --dtype float16")


def launch_line(request: PlanRequest, chosen: Candidate, plan_file: Path | None = None) -> str:
    """Return ``accelerate launch ...`` with the typed and the chosen flags, quoted for a shell.

    Args:
        plan_file: with the chosen plan, for a run without a search.
    """
    decided = _chosen_flags(request, chosen)
    if plan_file is not None:
        decided["activation_checkpointing"] = str(plan_file)
        decided.pop("memory_budget_gib", None)
    words = ["accelerate", "launch", "--config_file", str(_config_file(request))]
    if request.launch.num_processes > 1:
        words += ["--num_processes", str(request.launch.num_processes)]
    if request.launch.mixed_precision != "no":
        words += ["--mixed_precision", request.launch.mixed_precision]
    words += [str(recipe_at_hand(request.recipe)), *without(request.flags, decided)]
    words += [word for name, value in decided.items() for word in (f"--{name}", value)]
    words += ["--train_file", "FILE"] if request.has_no_texts else []
    if "output_dir" not in request.named:
        words += ["--output_dir", f"out/{request.recipe.stem}"]
    return " ".join(map(_quoted, words))


def check_plan_file(request: PlanRequest) -> None:
    """Raise ``InputError`` for ``--plan`` with a budget in the preset, with which a run reads no plan from a file."""
    if "memory_budget_gib" in request.named:
        raise InputError("--plan does not go with a preset that has memory_budget_gib: give the budget as a flag")


def _quoted(word: str) -> str:
    """Quote ``word`` for a shell; characters that are not printable in the form ``$'\\x1b'``."""
    if word.isprintable():
        return shlex.quote(word)
    letters = (letter if letter.isprintable() and letter not in "\\'" else _as_bytes(letter) for letter in word)
    return f"$'{''.join(letters)}'"


def _as_bytes(letter: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in letter.encode())


def _config_file(request: PlanRequest) -> Path:
    """Return the launch file: next to the folder of the recipe, else in the current folder, else that of ours."""
    several = request.launch.num_processes > 1
    if request.launch.target.device.type == "cpu":
        name = "cpu_ddp.yaml" if several else "cpu.yaml"
    else:
        name = "multi_gpu.yaml" if several else "single_gpu.yaml"
    folders = (recipe_at_hand(request.recipe).parent.parent, Path(), recipes_folder().parent)
    return next((folder for folder in folders if (folder / CONFIGS).is_dir()), Path()) / CONFIGS / name


def _chosen_flags(request: PlanRequest, chosen: Candidate) -> dict[str, str]:
    """Return the values of the flags that were searched, by name.

    A budget in a preset cannot be removed, and needs ``budget`` or ``auto``: that flag is left to the run. So it is
    where gradients are reduced once a step, which a run with a budget alone finds.
    """
    run, strategy = request.task.run, str(request.task.run.activation_checkpointing)
    by_preset = "memory_budget_gib" in request.named
    searches = by_preset or chosen.reduces_once
    decided = {}
    if run.micro_batch_size == AUTO:
        stays_open = searches and strategy not in BUDGET_WORDS
        decided["micro_batch_size"] = AUTO if stays_open else str(chosen.layout.micro_batch_size)
    if strategy in BUDGET_WORDS:
        searches = searches or chosen.strategy in BUDGET_WORDS
        decided["activation_checkpointing"] = strategy if searches else chosen.strategy
    if len(request.task.losses) > 1 and chosen.loss is not None:
        decided["loss"] = chosen.loss
    if searches and not by_preset:
        decided["memory_budget_gib"] = f"{request.budget_gib:.12g}"
    return decided


def without(flags: Sequence[str], names: dict[str, str]) -> list[str]:
    """Return ``flags`` without those of ``names`` and their values."""
    kept: list[str] = []
    words = iter(flags)
    for word in words:
        name, is_joined, _ = word.partition("=")
        if name.removeprefix("--") not in names or not name.startswith("--"):
            kept.append(word)
        elif not is_joined:
            next(words, None)
    return kept


def record_of(request: PlanRequest, points: Sequence[FrontierPoint], **others: Any) -> dict[str, Any]:
    """Return the request, its candidates and ``others`` as data, in bytes and seconds."""
    launch, run = request.launch, request.task.run
    return {
        "version": FORMAT_VERSION,
        "recipe": str(request.recipe),
        "flags": list(request.flags),
        "target": record_of_target(launch.target),
        "num_processes": launch.num_processes,
        "shard": run.shard,
        "sequence_parallel": run.sequence_parallel,
        "interconnect_bytes_per_s": launch.bytes_per_s_between if run.in_shards or run.sequence_parallel > 1 else None,
        "mixed_precision": launch.mixed_precision,
        "budget_bytes": request.budget_bytes,
        "remarks": request.remarks,
        **others,
        "candidates": [_of_point(point) for point in points],
    }


def record_of_target(target: Target) -> dict[str, Any]:
    """Return a device as data."""
    return {"word": target.word, "name": target.name, "memory_bytes": target.memory_bytes}


def record_of_candidate(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate as data; ``parts`` add up to ``needed_bytes``."""
    peak = candidate.forecast.peak
    return {
        "micro_batch_size": candidate.layout.micro_batch_size,
        "accumulation_steps": candidate.layout.accumulation_steps,
        "global_batch_size": candidate.layout.global_batch_size,
        "loss": candidate.loss,
        "strategy": candidate.strategy,
        "reduces_once": candidate.reduces_once,
        "peak_bytes": candidate.peak_bytes,
        "peak_phase": peak.phase,
        "peak_block": peak.block,
        "needed_bytes": candidate.needed_bytes,
        "host_bytes": candidate.host_bytes,
        "parts": candidate.parts,
        "fits": candidate.fits,
        "step_s": candidate.step_s,
        "device_update_s": candidate.device_update_s,
        "awaited_s": candidate.awaited_s,
        "communication_s": candidate.communication_s[0],
        "exposed_communication_s": candidate.communication_s[1],
        "samples_per_s": candidate.samples_per_s,
    }


def _of_point(point: FrontierPoint) -> dict[str, Any]:
    return {
        **record_of_candidate(point.candidate),
        "is_pareto_optimal": point.is_optimal,
        "plan": json.loads(point.candidate.forecast.plan.to_json()),
    }


def to_json(record: Mapping[str, Any]) -> str:
    """Return the record as text."""
    return json.dumps(record, indent=1) + "\n"
