"""Find the newest whole checkpoint, and check that the run which goes on is the one that was saved.

Damaged checkpoints are named and skipped, and are never a reason to begin from zero. The same run has the same samples
in the same order, the same flags and the same plan; the number of ranks may be another one.
"""

import copy
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.sharding.groups import NONE
from memsave_recipes.core.step.batch_layout import BatchLayout, SampleOrder
from memsave_recipes.core.step.settings import AUTO
from memsave_recipes.data.fingerprint import Fingerprint
from memsave_recipes.models.flags import Rules, rules_of
from memsave_recipes.training.arguments import RunArguments
from memsave_recipes.training.checkpoints.commit import Damaged, discard, verify_manifest
from memsave_recipes.training.launch.start import describe_environment

STEP = "step"
BEST = "best"
OF_ORDER = {
    "num_samples": "the number of training samples",
    "global_batch_size": "--global_batch_size",
    "seed": "--seed",
}
"""The fields of ``SampleOrder``, as the user knows them."""
REMOVED: dict[str, tuple[Any, ...]] = {
    "too_long": ("drop",),
    "train_on_prompt": (False,),
    "mix_weights": (None,),
    "text_column": (None, "text"),
    "vocab_size": (8192,),
    "lora_alpha": (32,),
    "lora_dropout": (0.0,),
    "lora_target_modules": (["all-linear"],),
    "lora_modules_to_save": ([],),
    "use_rslora": (False,),
    "use_dora": (False,),
    "train_last_blocks": (None,),
    "resize_mode": ("crop",),
    "nested_classes": (False,),
    "skip_broken_images": (False,),
    "validation_fraction": (None, 0.1),
    "text_pair_column": (None,),
    "problem_type": (None,),
    "drop_last": (False,),
    "decay_all": (False,),
    "sync_batchnorm": (False,),
    "adam_epsilon": (1e-8,),
    "lora_merge": (False,),
    "bf16_stochastic_round": (False,),
}
"""Flags that earlier versions had, and the values with which those trained as this one does."""
SCHEDULES_WITHOUT_END = {"constant", "constant_with_warmup", "inverse_sqrt"}
SEARCHED = ("micro_batch_size", "activation_checkpointing", "memory_budget_gib")
"""The flags of a search for a plan."""
ANOTHER_VERSION = "another version may compute in another way"
WHY_NOT_BIT_EXACT = {
    "torch": ANOTHER_VERSION,
    "accelerate": ANOTHER_VERSION,
    "transformers": ANOTHER_VERSION,
    "memsave-recipes": ANOTHER_VERSION,
    "flash-attn-3": "another kernel of attention rounds in another way",
    "device": "another device rounds in another way",
    "processor": "another processor, or other instructions of it, round in another way",
    "num_threads": "a sum is cut up among the threads",
    "deterministic_algorithms": "others add in no fixed order",
}
"""The entries of the environment on which the last bits of a result depend, and why."""
OF_A_CPU = {"processor", "num_threads"}


@dataclass(frozen=True, kw_only=True)
class Found:
    """A whole checkpoint, and the newer ones that are damaged, with the defect of each."""

    path: Path
    step: int
    damaged: dict[Path, str]

    @property
    def notices(self) -> list[str]:
        """One line for each damaged checkpoint that was skipped."""
        return [f"note: skipped the damaged checkpoint {path}: {reason}" for path, reason in self.damaged.items()]


def find_newest(folder: Path, kind: str = STEP) -> Found | None:
    """Find the newest whole checkpoint; ``None`` where none was ever committed.

    Raises:
        InputError: there are checkpoints and all of them are damaged.
    """
    damaged: dict[Path, str] = {}
    for step, path in committed(folder, kind):
        try:
            verify_manifest(path)
        except Damaged as error:
            damaged[path] = str(error)
        else:
            return Found(path=path, step=step, damaged=damaged)
    if damaged:
        named = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
        raise InputError(
            f"--resume finds no whole checkpoint in {folder} ({named}): put one back from a backup, or start again "
            "with --overwrite"
        )
    return None


def committed(folder: Path, kind: str = STEP) -> list[tuple[int, Path]]:
    """List the checkpoints in ``folder``, whole or damaged, newest first; each with its step."""
    matches = ((re.fullmatch(rf"{kind}-(\d+)", path.name), path) for path in folder.glob(f"{kind}-*"))
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def prune(folder: Path, kind: str, *, newest: int, keep: int, damaged: Iterable[Path] = ()) -> None:
    """Keep ``keep`` checkpoints up to step ``newest``, which has just been committed; give up others and later ones."""
    known = set(damaged)
    candidates = [path for step, path in committed(folder, kind) if step <= newest and path not in known]
    kept = set(candidates[:keep])
    for _, path in committed(folder, kind):
        if path not in kept:
            discard(path)


def read_earlier(config: Path, checkpoints: Path) -> dict[str, Any] | None:
    """Read the ``config`` of the run that left ``checkpoints``; ``None`` if there are no checkpoints.

    Raises:
        InputError: it cannot be read.
    """
    return read_config(config) if committed(checkpoints) else None


def read_config(config: Path) -> dict[str, Any]:
    """Read the ``config`` of a run; raise ``InputError`` where that fails."""
    hint = "put it back, or start again with --overwrite"
    try:
        content: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"--resume: {config} cannot be read: {hint}") from error
    if not _is_whole(content):
        raise InputError(f"--resume: {config} is not what a run writes: {hint}")
    return content


def best_metric(config: dict[str, Any]) -> str:
    """Return the metric that the evaluations of a run are compared by; an earlier version had a flag for it."""
    named = config.get("save_best")
    return named if isinstance(named, str) else str(config.get("metric_for_best_model", "loss"))


def _is_whole(config: Any) -> bool:
    """Return whether all required entries are there; an earlier version may not have known a flag."""
    match config:
        case {
            "environment": {"versions": dict(), "mixed_precision": str()},
            "geometry": {"micro_batch_size": int(), "num_processes": int()},
            "lr_scheduler_type": str(),
        }:
            return True
    return False


def with_previous_plan(run: RunArguments, earlier: dict[str, Any], *, plan: Path, num_processes: int) -> RunArguments:
    """Return ``run`` with the plan and micro-batch that the same search gave the ``earlier`` run.

    A search depends on measured times, and another plan rounds in another way. With ``--bitwise_topology`` another
    number of ranks takes the micro-batch alone. With another ``--shard`` a rank has room for other plans.
    """
    layout, same_search = earlier["geometry"], all(earlier.get(flag) == getattr(run, flag) for flag in SEARCHED)
    same_ranks = layout["num_processes"] == num_processes and earlier.get("shard", NONE) == (run.shard or NONE)
    if run.bitwise_topology and run.micro_batch_size == AUTO and layout["num_processes"] != num_processes:
        found = copy.copy(run)  # flags would name a budget beside a number; here it may be the device's memory
        found.micro_batch_size = layout["micro_batch_size"]
        found.memory_budget_gib = run.memory_budget_gib if run.solves else None
        return found
    if not same_ranks or (run.searches and not same_search):
        return run
    if run.in_shards:
        reduced_once = earlier.get("reduce_gradients") == "step"  # a flag of earlier versions
        run = replace(run, reduces_once=earlier.get("reduces_once", reduced_once))
    if not run.searches:
        return run
    return replace(
        run,
        micro_batch_size=layout["micro_batch_size"],
        activation_checkpointing=str(plan),
        memory_budget_gib=None,
    )


def with_previous_choices(run: Any, earlier: dict[str, Any]) -> Any:
    """Return the flags ``run`` with what the ``earlier`` run began with, where their rules and values say so."""
    rules = rules_of(type(run))
    names = [name for name, rule in rules.items() if rule.resume == "chosen" and getattr(run, name) == AUTO]
    known = _before(rules) | earlier
    return replace(run, **{name: known[name] for name in names})


def check_same_flags(saved: dict[str, Any], present: dict[str, Any], rules: dict[str, Rules]) -> list[str]:
    """Refuse to go on with flags that would have made another run; return a line for each that has to be trusted.

    Args:
        saved: ``config.json``; others than flags may be among its entries.
        present, rules: by name.

    Raises:
        InputError: a flag that the weights depend on has changed.
    """
    now = json.loads(json.dumps(present))
    saved = _before(rules) | saved
    if now.get("bitwise_topology"):
        _check_same_micro_batch(saved, now)
    for name in REMOVED.keys() & saved.keys() - now.keys():
        if saved[name] not in REMOVED[name]:
            raise InputError(
                f"--resume: the run was started with --{name} {saved[name]}, which this version does not have: go on "
                "with the version of then, or name another --output_dir"
            )
    has_no_end = now["lr_scheduler_type"] in SCHEDULES_WITHOUT_END
    notices = []
    for name in saved.keys() & now.keys():
        rule = rules.get(name, Rules())
        if _may_be(rule, saved[name], now[name], has_no_end=has_no_end):
            continue
        change = f"--{name} was {saved[name]} and is {now[name]}"
        if rule.rounds is not None:
            notices.append(f"note: {change}: {rule.rounds}")
        elif rule.resume == "place":
            notices.append(f"note: {change}, which is taken to be the same")
        elif rule.file_of is not None:
            raise InputError(
                f"--resume: the file of {rule.file_of} has changed since the run was started: put it back, or name "
                "another --output_dir"
            )
        else:
            is_length = rule.resume == "length"
            why = f", and a {now['lr_scheduler_type']} schedule depends on the end" if is_length else ""
            raise InputError(
                f"--resume: {change}{why}: give what the run was started with, or name another --output_dir"
            )
    return sorted(notices)


def _before(rules: dict[str, Rules]) -> dict[str, Any]:
    """Return how runs of an earlier version were trained, by the flags that they did not have."""
    return {name: rule.before for name, rule in rules.items() if rule.before is not None}


def _may_be(rule: Rules, was: Any, now: Any, *, has_no_end: bool) -> bool:
    """Return whether the weights are the same with what a flag is ``now``, without a word."""
    return bool(
        was == now
        or [was] == now  # earlier versions took one word of what is a list now
        or rule.resume == "free"
        or (rule.same and {was, now} <= {*rule.same})
        or (rule.resume == "chosen" and now == AUTO)
        or (rule.resume == "length" and has_no_end)
    )


def _check_same_micro_batch(saved: dict[str, Any], now: dict[str, Any]) -> None:
    size = saved["geometry"]["micro_batch_size"]
    if now["micro_batch_size"] not in (size, AUTO):
        raise InputError(
            f"--resume: --micro_batch_size was {size} and is {now['micro_batch_size']}, on which the bits of "
            f"--bitwise_topology depend: give {size}, or name another --output_dir"
        )


def check_same_environment(saved: dict[str, Any], accelerator: Accelerator) -> list[str]:
    """Return a line for everything that may round in another way than in the ``saved`` environment.

    Raises:
        InputError: the mixed precision has changed.
    """
    was, now = ({**about, **about["versions"]} for about in (saved, describe_environment(accelerator)))
    if was["mixed_precision"] != now["mixed_precision"]:
        raise InputError(
            f"--resume: --mixed_precision was {was['mixed_precision']} and is {now['mixed_precision']}: launch with "
            f"`accelerate launch --mixed_precision {was['mixed_precision']}`, or name another --output_dir"
        )
    on_cpu = accelerator.device.type == "cpu"
    return [
        f"note: {name} was {was[name]} and is {now[name]}: bit-exact no longer promised, because {reason}"
        for name, reason in WHY_NOT_BIT_EXACT.items()
        if name in was and was[name] != now[name] and (on_cpu or name not in OF_A_CPU)
    ]


def describe_run(order: SampleOrder, layout: BatchLayout, data: Fingerprint | None) -> dict[str, Any]:
    """Return what a checkpoint keeps for the comparison with the run that resumes it."""
    return {"order": asdict(order), "geometry": asdict(layout), "data": data.record() if data else None}


def check_same_data(saved: dict[str, Any], data: Fingerprint | None) -> list[str]:
    """Refuse to go on with other data; return a line on what is trusted.

    Raises:
        InputError: the data is not that of ``saved``, the result of ``describe_run``.
    """
    if data is None:
        return []
    if saved.get("data") is None:
        return ["note: the checkpoint has no digest of its data, which is taken to be the same"]
    if differences := "; ".join(data.differences(saved["data"])):
        raise InputError(
            f"--resume: the data is not what the run was trained on ({differences}): put it back, or name another "
            "--output_dir"
        )
    return []


def check_same_samples(saved: dict[str, Any], order: SampleOrder) -> None:
    """Refuse to go on where a step would train other samples.

    Raises:
        InputError: the data set or a flag that decides the order has changed.
    """
    present = asdict(order)
    for field, name in OF_ORDER.items():
        if saved["order"][field] != present[field]:
            raise InputError(
                f"--resume: {name} was {saved['order'][field]} and is {present[field]}, so the steps would train other "
                "samples: give what the run was started with, or name another --output_dir"
            )


def describe_change(saved: dict[str, Any], layout: BatchLayout) -> str | None:
    """Return a line on another batch layout; ``None`` where it is the same."""
    before = type(layout)(**saved["geometry"])
    if before == layout:
        return None
    if layout.is_bitwise:
        return f"note: saved as {before.describe()}, going on as {layout.describe()}: bit-exact"
    return (
        f"note: saved as {before.describe()}, going on as {layout.describe()}: data-exact, every step trains the "
        "same samples, but not bit-exact, sums are rounded in another order and dropout draws other masks"
    )
