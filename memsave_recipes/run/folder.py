"""The folder of a run: checked, cleared or resumed, described by ``config.json``, finished with ``results.json``.

``final/`` and ``results.json`` are each whole or not there. A checkpoint of the last step comes before them, so that a
full disk costs nothing: ``--resume`` writes the rest.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from huggingface_hub import save_torch_state_dict
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE
from safetensors.torch import save_file
from torch import Tensor, nn

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.sharding import gathered, is_sharded
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.core.text import printable
from memsave_recipes.models.adapters import names_in_random_base
from memsave_recipes.models.flags import rules_of
from memsave_recipes.models.pretrained import BASE, write_base_digest
from memsave_recipes.models.saved import Layout, layout_of
from memsave_recipes.run.failures import RunIsDone
from memsave_recipes.run.report import checked_state
from memsave_recipes.run.run_plan import RunPlan
from memsave_recipes.run.trackers import METRICS, RunLabels, cut_back, start_trackers
from memsave_recipes.training.checkpoints import Checkpoints, Resumed, TrainState
from memsave_recipes.training.checkpoints.commit import (
    MANIFEST,
    TEMPORARY,
    TRASH,
    Writer,
    check_space,
    commit_together,
    delete,
    disk_errors_as_input_error,
)
from memsave_recipes.training.checkpoints.resume import check_same_flags, committed, read_config, with_previous_choices
from memsave_recipes.training.launch.distributed import on_main_process
from memsave_recipes.training.launch.start import describe_environment
from memsave_recipes.training.parsing import flag_values

CONFIG, PLAN, RESULTS, FINAL, CHECKPOINTS = "config.json", "plan.json", "results.json", "final", "checkpoints"
OURS = (CONFIG, PLAN, METRICS, RESULTS, FINAL, "tensorboard", "wandb", CHECKPOINTS)
FIGURES = "evaluation.json"
"""The figures of the best weights, beside them."""
LEFTOVERS = (f"{TEMPORARY}{FINAL}", f"{TRASH}{FINAL}")
NAMES = ("project", "run_name")
"""The flags that name a run in dashboards."""
OF_THE_END = ("max_steps", "num_epochs", "save_best")
"""Flags that may change on resume, and change what is in ``final/``."""
OUR_SNAPSHOTS = "memory_snapshot*.pickle"


def check_room(folder: Path, train_state: TrainState, flags: dict[str, Any]) -> None:
    """Raise ``InputError`` where the disk has no room for ``final/`` and the checkpoint before it."""
    check_space(
        folder,
        train_state.num_bytes_in_the_end(flags["optimizer"], flags["momentum"])
        + train_state.num_bytes_of_weights(whole=flags.get("model_type") is not None),
        f"{FINAL}/ and the checkpoint before it take",
        freed_bytes=sum(_num_bytes(folder / name) for name in OURS) if flags["overwrite"] else 0,
    )


def begin_run(
    accelerator: Accelerator,
    folder: Path,
    *,
    project: str,
    work: str,
    flags: dict[str, Any],
    planned: RunPlan,
    layout: BatchLayout,
    resumed: Resumed | None = None,
) -> str:
    """Claim the run's folder, write its configuration and start its trackers; the last thing before training.

    Args:
        project: where dashboards keep the run, unless ``--project`` names another one.
        work: names model and data, such as ``vgg16-gbs64-224px``; runs of the same work are meant to be compared.
        flags: of the command line; those of ``NAMES`` as the run was begun with.
        planned: its strategy and the batch layout name the run, unless ``--run_name`` does.

    Returns:
        The name of the run in dashboards.

    Raises:
        InputError: the folder cannot be written.
    """
    plan = planned.plan
    if resumed is not None:
        checked_state(resumed.state)
        print_lines(accelerator, *resumed.notices, f"going on after {resumed.step} steps")
    elif flags.get("resume"):
        print_lines(accelerator, f"note: --resume finds no checkpoint in {folder}, so the run begins")
    earlier = resumed.state["trackers"] if resumed else None
    device = "gpu" if accelerator.device.type == "cuda" else accelerator.device.type
    batches = f"mbs{layout.micro_batch_size}x{layout.accumulation_steps}"
    default_name = f"{plan.strategy}-{batches}-{layout.num_processes}{device}"
    name = earlier["name"] if earlier else flags["run_name"] or default_name
    sizes = {**asdict(layout), "accumulation_steps": layout.accumulation_steps}
    about = {"plan": json.loads(plan.to_json()), "geometry": sizes, "environment": describe_environment(accelerator)}
    config = {**flags, **about}
    lines = on_main_process(accelerator, lambda: _take_run_folder(folder, config, plan.to_json(), resumed))
    print_lines(accelerator, *lines)
    labels = RunLabels(
        project=flags["project"] or project,
        group=work,
        name=name,
        tags=[plan.strategy, flags["dtype"], device],
        config=config,
        output_dir=folder,
        earlier=earlier,
        first_step=resumed.step + 1 if resumed else 1,
    )
    start_trackers(accelerator, labels)
    return name


def earlier_names(earlier: dict[str, Any], flags: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the names of a resumed run, those that it was begun with, and a line for each flag that asks for others.

    Args:
        earlier: ``config.json`` of the run; one of an earlier version, or edited by hand, may have no names.
        flags: of the command line.
    """
    names = {}
    match earlier:
        case {"project": str() | None, "run_name": str() | None}:
            names = {flag: earlier[flag] for flag in NAMES}
    other = [flag for flag in names if flags[flag] and flags[flag] != names[flag]]
    return names, [f"note: the run goes on under its own names, so another --{flag} is left out" for flag in other]


def check_run_folder(output_dir: str, *, overwrite: bool, resume: bool = False) -> Path:
    """Refuse a folder that holds another run. Change nothing, so that a mistake found later costs no earlier run.

    Raises:
        InputError: ``output_dir`` holds a run and may neither be cleared nor be gone on with, or is no folder.
    """
    folder = Path(output_dir)
    if resume and overwrite:
        raise InputError("--overwrite deletes the run that --resume goes on with: give one of them")
    if _exists(folder) and not folder.is_dir():
        raise InputError(f"--output_dir {folder} is a file: name a folder")
    _refuse_links(folder, overwrite=overwrite)
    if any((folder / name).exists() for name in OURS) and not (overwrite or resume):
        raise InputError(
            f"--output_dir {folder} holds another run: name another folder, go on with --resume or pass --overwrite"
        )
    return folder


def check_not_done(folder: Path, run: Any) -> None:
    """End a run that resumes one that is done and kept no checkpoint.

    Raises:
        RunIsDone: its flags ``run`` ask for nothing else.
        InputError: they ask for another run, or a longer one.
    """
    if not (folder / RESULTS).exists() or committed(folder / CHECKPOINTS):
        return
    earlier = read_config(folder / CONFIG)
    present = flag_values((with_previous_choices(run, earlier),))
    check_same_flags(earlier, present, rules_of(type(run)))
    for name in OF_THE_END:
        if earlier.get(name, present.get(name)) != present.get(name):
            raise InputError(
                f"--output_dir {folder} holds a run that is done and kept no checkpoint, so --resume has nothing to "
                f"continue with another --{name}: pass --overwrite to start again, or name another folder"
            )
    raise RunIsDone(f"--resume: the run in {folder} is done, so nothing is left to do")


def _refuse_links(folder: Path, *, overwrite: bool) -> None:
    """Refuse links that lead nowhere, and those to folders that would have to be deleted."""
    for path in (folder, *folder.parents):
        if path.is_symlink() and not os.path.lexists(os.path.realpath(path)):
            raise InputError(
                f"--output_dir {folder}: {path} is a link that leads nowhere: mount its disk, or name another folder"
            )
    for path in (folder / name for name in OURS if overwrite):
        if path.is_symlink() and path.is_dir():
            raise InputError(
                f"--overwrite: {path} is a link to a folder, which is left alone: delete the link, or name another "
                "--output_dir"
            )


def _exists(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError as error:
        raise InputError(f"--output_dir {folder} cannot be a folder ({error.strerror}): name another one") from error


def print_lines(accelerator: Accelerator, *lines: str) -> None:
    """Print lines, which may hold foreign text, on the main process."""
    for line in lines:
        accelerator.print(printable(line))


def _take_run_folder(folder: Path, config: dict[str, Any], plan: str, resumed: Resumed | None) -> list[str]:
    """Clear ``folder`` of an earlier run, or of the later steps of the resumed one, and describe this run in it.

    Return a line on the rows that are missing, where any are.
    """
    notices = []
    hint = "then start it again" if resumed is None else "then go on with --resume"
    with disk_errors_as_input_error(folder / CONFIG, f"{PLAN} or {CONFIG}", hint=hint):
        folder.mkdir(parents=True, exist_ok=True)
        if resumed is None:
            for path in (*(folder / name for name in (*OURS, *LEFTOVERS)), *folder.glob(OUR_SNAPSHOTS)):
                delete(path)
        else:
            state = resumed.state
            notices = cut_back(folder, resumed.step, evaluated_at=state["evaluated_at"], num_rows=state.get("num_rows"))
            delete(folder / RESULTS)
        _write_whole(folder / PLAN, plan + "\n")
        write_json(folder / CONFIG, config)
    return notices


def _num_bytes(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if file.is_file())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` whole or not at all."""
    _write_whole(path, json.dumps(content, indent=1) + "\n")


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


GO_ON = "then go on with --resume"
MAX_FILE_BYTES = 5 * 1000**3
"""The limit of a file of weights, as ``save_pretrained`` has one; a larger tensor has a file to itself."""


def weight_writers(accelerator: Accelerator, model: nn.Module) -> Iterator[Writer]:
    """Yield what writes the weights of ``model`` on rank 0, as ``save_model`` does; all ranks take one after the other.

    Weights in shards are gathered file by file: rank 0 has those of one at a time. All are gathered at once where
    ``save_pretrained`` joins or splits tensors, for adapters, and for models that are not transformers'.
    """
    unwrapped, wanted = accelerator.unwrap_model(model), accelerator.is_main_process
    names_of_base = names_in_random_base(unwrapped)  # before peft, as it saves, notes a base on rank 0
    if not is_sharded(unwrapped):
        yield partial(save_model, accelerator, model)
    elif (layout := layout_of(unwrapped, MAX_FILE_BYTES)) is None:
        weights = gathered(unwrapped, _saved(unwrapped), wanted=wanted)
        yield partial(save_model, accelerator, model, weights=weights)
    else:
        yield partial(save_model, accelerator, model, weights={})
        for file, names in layout.files.items():
            yield partial(_write_and_free, _named(names, gathered(unwrapped, names.values(), wanted=wanted)), file)
        yield partial(_write_index, layout)
    if names_of_base:
        in_shards = is_sharded(unwrapped)
        found = gathered(unwrapped, names_of_base, wanted=wanted) if in_shards else unwrapped.state_dict()
        own = {new: found[name] for name, new in names_of_base.items() if name in found}
        yield partial(_save_base, unwrapped, own)
    if hasattr(unwrapped, "peft_config"):
        yield write_base_digest


def _save_base(model: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Write the weights from scratch that adapters were trained on, without which nobody can use them."""
    model.get_base_model().save_pretrained(folder / BASE, state_dict=weights, max_shard_size=MAX_FILE_BYTES)


def _saved(model: nn.Module) -> set[str]:
    """Return the names of the tensors that are saved; of adapters those that are trained."""
    if hasattr(model, "peft_config"):
        return {name for name, weight in model.named_parameters(remove_duplicate=False) if weight.requires_grad}
    return set(model.state_dict())


def _named(names: dict[str, str], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are here, by their ``names`` in a file."""
    return {name: tensors[own].contiguous() for name, own in names.items() if own in tensors}


def _write_and_free(tensors: dict[str, Tensor], file: str, folder: Path) -> None:
    """Write, and free before the next ones are gathered."""
    save_file(tensors, folder / file, metadata={"format": "pt"})
    tensors.clear()


def _write_index(layout: Layout, folder: Path) -> None:
    if layout.index is not None:
        text = json.dumps(layout.index, indent=2, sort_keys=True) + "\n"
        (folder / SAFETENSORS_INDEX_FILE).write_text(text, encoding="utf-8")


def save_model(
    accelerator: Accelerator, model: nn.Module, folder: Path, *, weights: dict[str, Tensor] | None = None
) -> None:
    """Write the weights as safetensors, for a model of transformers or peft in its ``save_pretrained`` layout.

    Args:
        weights: in place of the model's own, where these are in shards; empty for the other files alone.
    """
    unwrapped = accelerator.unwrap_model(model)
    if hasattr(unwrapped, "save_pretrained"):
        options = {"is_main_process": accelerator.is_main_process, "max_shard_size": MAX_FILE_BYTES}
        unwrapped.save_pretrained(folder, state_dict=weights, **options)
    elif weights is None:
        accelerator.save_model(unwrapped, folder, MAX_FILE_BYTES)
    else:
        save_torch_state_dict(weights, folder, max_shard_size=MAX_FILE_BYTES)


def save_final(
    accelerator: Accelerator, folder: Path, model: nn.Module, *writers: Writer, best: Path | None = None
) -> None:
    """Write ``final/``, the weights of ``model`` and what ``writers`` write; replace an earlier one.

    Args:
        best: the folder of the best weights, which are taken instead.

    Raises:
        InputError: on all ranks, where the disk does not take it; an earlier ``final/`` is left as it was.
    """
    disk_errors = partial(disk_errors_as_input_error, folder / FINAL, f"{FINAL}/", hint=GO_ON)
    left_out = shutil.ignore_patterns(MANIFEST, FIGURES)
    copied = [] if best is None else [partial(shutil.copytree, best, ignore=left_out, dirs_exist_ok=True)]
    of_weights = copied or weight_writers(accelerator, model)
    commit_together(accelerator, folder, FINAL, chain(of_weights, writers), disk_errors)


def write_figures(figures: dict[str, Any], folder: Path) -> None:
    """Write the figures of an evaluation beside the weights."""
    write_json(folder / FIGURES, figures)


def write_results(accelerator: Accelerator, folder: Path, results: dict[str, Any], checkpoints: Checkpoints) -> None:
    """Write ``results.json`` on rank 0; then the checkpoint of the last step may go.

    Raises:
        InputError: on all ranks, where the disk does not take it.
    """

    def write() -> None:
        with disk_errors_as_input_error(folder / RESULTS, RESULTS, hint=GO_ON):
            write_json(folder / RESULTS, results)

    on_main_process(accelerator, write)
    checkpoints.delete_last_step()
