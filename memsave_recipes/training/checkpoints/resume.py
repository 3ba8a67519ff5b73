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
from memsave_recipes.core.step.settings import AUTO, PER_MICRO_BATCH
from memsave_recipes.data.fingerprint import Fingerprint
from memsave_recipes.training.arguments import RunArguments
from memsave_recipes.training.checkpoints.commit import Damaged, discard, verify_manifest
from memsave_recipes.training.launch.start import describe_environment

STEP = "step"
BEST = "best"
FLAGS = {
    "num_samples": "the number of training samples",
    "global_batch_size": "--global_batch_size",
    "seed": "--seed",
    "drop_last": "--drop_last",
}
"""The fields of ``SampleOrder``, as the user knows them."""
FREE = {
    *("output_dir", "overwrite", "resume", "data_changed_ok", "debug", "report_to", "full_determinism"),
    *("save_every", "save_every_minutes", "keep_checkpoints", "save_best", "async_save", "skip_nonfinite"),
    *("load_best_model_at_end", "metric_for_best_model", "early_stopping_patience", "early_stopping_threshold"),
    *("collective_timeout_minutes", "project", "run_name", "tags"),
    *("logging_steps", "eval_steps", "memory_snapshot", "verify", "dataloader_num_workers"),
    *("micro_batch_size", "memory_budget_gib", "activation_checkpointing", "gradient_checkpointing"),
    *("compile", "stream_weights"),
}
"""The flags that change no weight, or no more than rounding does."""
LATER = {
    "batchnorm": "local",
    "decay_all": True,
    "bitwise_topology": False,
    "packed_attention": "mask",
    "fused_ops": NONE,
    "shard": NONE,
    "offload_optimizer": NONE,
    "reduce_gradients": PER_MICRO_BATCH,
    "sequence_parallel": 1,
}
"""Flags that runs of an earlier version did not have, and how they were trained."""
SAME: dict[str, set[str | None]] = {"offload_optimizer": {NONE, "state"}}
"""Values of flags that give the same bits."""
ROUNDS = {
    **dict.fromkeys(("shard", "reduce_gradients", "sequence_parallel"), "ranks add gradients in another order"),
    "offload_optimizer": "an update on the host rounds in another way than one on the device",
    "fused_ops": "a fused operator rounds in another way than those that it is in place of",
}
"""Flags that change no more than rounding does, and why."""
CHOSEN = ("packed_attention", "dtype", "fused_ops")
"""Flags whose ``auto`` is what the run began with, which most resolve and write down."""
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
}
"""Flags that earlier versions had, and the values with which those trained as this one does."""
KEPT = {"decay_all": False}
"""Flags that by default, which is the value here, stay as a run began: one of an earlier version did otherwise."""
CONTENTS = {"weights_by_class": "--class_weights", "lora_entries": "--lora_config"}
"""What a run has read from the file of a flag, and that flag."""
LENGTH = {"max_steps", "num_epochs"}
SCHEDULES_WITHOUT_END = {"constant", "constant_with_warmup", "inverse_sqrt"}
SEARCHED = ("micro_batch_size", "activation_checkpointing", "memory_budget_gib")
"""The flags of a search for a plan."""
PLACES = {"data_dir", "train_file", "validation_file", "tokenizer_name", "model_name_or_path", "weights", "lora_config"}
"""Paths, which may have changed; their content is trusted to be the same."""
ANOTHER_VERSION = "another version may compute in another way"
WHY_NOT_BIT_EXACT = {
    "torch": ANOTHER_VERSION,
    "accelerate": ANOTHER_VERSION,
    "transformers": ANOTHER_VERSION,
    "memsave-recipes": ANOTHER_VERSION,
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
    layout, reduction = earlier["geometry"], earlier.get("reduce_gradients", PER_MICRO_BATCH)
    same_search = all(earlier.get(flag) == getattr(run, flag) for flag in SEARCHED)
    same_search = same_search and run.reduce_gradients in (AUTO, reduction)
    same_ranks = layout["num_processes"] == num_processes and (LATER | earlier)["shard"] == (run.shard or NONE)
    if run.bitwise_topology and run.micro_batch_size == AUTO and layout["num_processes"] != num_processes:
        found = copy.copy(run)  # flags would name a budget beside a number; here it may be the device's memory
        found.micro_batch_size = layout["micro_batch_size"]
        found.memory_budget_gib = run.memory_budget_gib if run.solves else None
        return found
    if not same_ranks or (run.searches and not same_search):
        return run
    if run.in_shards and run.reduce_gradients == AUTO:
        run = replace(run, reduce_gradients=reduction)
    if not run.searches:
        return run
    return replace(
        run,
        micro_batch_size=layout["micro_batch_size"],
        activation_checkpointing=str(plan),
        gradient_checkpointing=False,
        memory_budget_gib=None,
    )


def with_previous_choices(run: Any, earlier: dict[str, Any]) -> Any:
    """Return the flags ``run`` with ``auto`` as the ``earlier`` run resolved it, and ``KEPT``."""
    kept = [name for name in CHOSEN if getattr(run, name, None) == AUTO]
    kept += [name for name, default in KEPT.items() if getattr(run, name, None) == default]
    return replace(run, **{name: (LATER | earlier)[name] for name in kept})


def check_same_flags(saved: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """Refuse to go on with flags that would have made another run; return a line for each that has to be trusted.

    Args:
        saved: ``config.json``; others than flags may be among its entries.
        present: by name.

    Raises:
        InputError: a flag that the weights depend on has changed.
    """
    now = json.loads(json.dumps(present))
    saved = LATER | saved
    if now.get("bitwise_topology"):
        _check_same_micro_batch(saved, now)
    for name in REMOVED.keys() & saved.keys() - now.keys():
        if saved[name] not in REMOVED[name]:
            raise InputError(
                f"--resume: the run was started with --{name} {saved[name]}, which this version does not have: go on "
                "with the version of then, or name another --output_dir"
            )
    free = FREE | LENGTH if now["lr_scheduler_type"] in SCHEDULES_WITHOUT_END else FREE
    notices = []
    for name in saved.keys() & now.keys() - free:
        if _is_same(name, saved[name], now[name]) or (name in (*CHOSEN, "reduce_gradients") and now[name] == AUTO):
            continue
        change = f"--{name} was {saved[name]} and is {now[name]}"
        if name in ROUNDS:
            notices.append(f"note: {change}: {ROUNDS[name]}")
        elif name in PLACES:
            notices.append(f"note: {change}, which is taken to be the same")
        elif name in CONTENTS:
            raise InputError(
                f"--resume: the file of {CONTENTS[name]} has changed since the run was started: put it "
                "back, or name another --output_dir"
            )
        else:
            why = f", and a {now['lr_scheduler_type']} schedule depends on the end" if name in LENGTH else ""
            raise InputError(
                f"--resume: {change}{why}: give what the run was started with, or name another --output_dir"
            )
    return sorted(notices)


def _is_same(name: str, was: Any, now: Any) -> bool:
    return bool(was == now or [was] == now or (name in SAME and {was, now} <= SAME[name]))


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


def check_same_data(saved: dict[str, Any], data: Fingerprint | None, *, changed_ok: bool) -> list[str]:
    """Refuse to go on with other data, unless ``changed_ok``; return a line on what is trusted.

    Raises:
        InputError: the data is not that of ``saved``, the result of ``describe_run``.
    """
    if data is None:
        return []
    if saved.get("data") is None:
        return ["note: the checkpoint has no digest of its data, which is taken to be the same"]
    if differences := "; ".join(data.differences(saved["data"])):
        if not changed_ok:
            raise InputError(
                f"--resume: the data is not what the run was trained on ({differences}): put it back, name another "
                "--output_dir, or go on with it by --data_changed_ok"
            )
        return [f"note: the data is not what the run was trained on ({differences}), and --data_changed_ok goes on"]
    if times := "; ".join(data.other_times(saved["data"])):
        return [f"note: files were modified at another time ({times}), their pixels are taken to be the same"]
    return []


def check_same_samples(saved: dict[str, Any], order: SampleOrder, *, changed_ok: bool = False) -> None:
    """Refuse to go on where a step would train other samples; with ``changed_ok`` there may be more or fewer.

    Raises:
        InputError: the data set or a flag that decides the order has changed.
    """
    present = asdict(order)
    for field, name in FLAGS.items():
        if saved["order"][field] != present[field] and not (changed_ok and field == "num_samples"):
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
