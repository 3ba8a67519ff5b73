"""A run's folder: who may have it, and what it holds from the run's beginning to its ``results.json``.

What a run leaves when it is done: ``final/`` and ``results.json``, each whole or not there.

Before them comes a checkpoint of the last step, so that a full disk costs nothing: ``--resume`` writes what is missing.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from memsave_recipes.checkpoints import (
    Checkpoints,
    Resumed,
    RunLock,
    StoppedBySignal,
    StopSignals,
    TrainState,
    locked_run_folder,
)
from memsave_recipes.checkpoints.commit import (
    TEMPORARY,
    TRASH,
    check_space,
    delete,
    disk_errors_as_input_error,
    make_whole,
)
from memsave_recipes.checkpoints.resume import (
    check_same_environment,
    check_same_flags,
    committed,
    read_earlier,
    with_previous_plan,
)
from memsave_recipes.distributed import missing_ranks_end_the_run, on_main_process
from memsave_recipes.errors import InputError
from memsave_recipes.fingerprint import Fingerprint
from memsave_recipes.planner.run_plan import RunPlan
from memsave_recipes.run.out_of_memory import RunSettings
from memsave_recipes.run.report import check_state
from memsave_recipes.run.trackers import NAME as METRICS
from memsave_recipes.run.trackers import cut_back, finish_trackers, resolve_trackers, start_trackers
from memsave_recipes.text import printable
from memsave_recipes.training.arguments import CheckpointArguments, RunArguments
from memsave_recipes.training.batch_layout import BatchLayout
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.environment import (
    describe_environment,
    deterministic_kernels,
    let_segments_grow,
    matmul_precision,
)
from memsave_recipes.training.launch import start_accelerator
from memsave_recipes.training.non_finite import NotFinite

CONFIG, PLAN, RESULTS, FINAL, CHECKPOINTS = "config.json", "plan.json", "results.json", "final", "checkpoints"
OURS = (CONFIG, PLAN, METRICS, RESULTS, FINAL, "tensorboard", "wandb", CHECKPOINTS)
LEFTOVERS = (f"{TEMPORARY}{FINAL}", f"{TRASH}{FINAL}")
OUR_SNAPSHOTS = "memory_snapshot*.pickle"


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that has its folder to itself.

    Args:
        safety: the flags that keep work from being lost.
        flags: all of them, by name.
        earlier: ``config.json`` of the run that it goes on with; ``None`` where it begins.
        signals: that ask it to stop.
        lock: of its folder.
    """

    accelerator: Accelerator
    folder: Path
    checkpointing: CheckpointArguments
    flags: dict[str, Any]
    earlier: dict[str, Any] | None
    signals: StopSignals
    lock: RunLock

    def checkpoints(self, training: TrainState, batches: GlobalBatches, data: Fingerprint) -> Checkpoints:
        """Those of this run, saved as its flags say.

        Raises:
            InputError: the disk has no room for what the run is to leave.
        """
        on_main_process(self.accelerator, lambda: self._check_room(training))
        folder = self.folder / CHECKPOINTS
        return Checkpoints.from_args(
            self.checkpointing, self.accelerator, folder, training, batches, data, signals=self.signals, lock=self.lock
        )

    def _check_room(self, training: TrainState) -> None:
        """For ``final/`` and the checkpoint before it, so that the lack of it is not found when all is trained."""
        flags = self.flags
        check_space(
            self.folder,
            training.num_bytes_in_the_end(flags["optimizer"], flags["momentum"])
            + training.num_bytes_of_weights(merged=flags.get("lora_merge", False)),
            f"{FINAL}/ and the checkpoint before it take",
            freed_bytes=sum(_num_bytes(self.folder / name) for name in OURS) if flags["overwrite"] else 0,
        )

    def planned(self, run: RunArguments) -> RunArguments:
        """``run`` with the plan and the micro-batch that an earlier life of it searched and found."""
        if self.earlier is None:
            return run
        return with_previous_plan(
            run, self.earlier, plan=self.folder / PLAN, num_processes=self.accelerator.num_processes
        )


@contextmanager
def open_run(run: RunArguments, checkpointing: CheckpointArguments, flags: dict[str, Any]) -> Iterator[OpenRun]:
    """Start Accelerate and keep the run's folder, and the signals that ask to stop, until the block ends.

    Raises:
        InputError: the folder holds another run, or is in use, or cannot be written, or this run cannot go on with
            what it holds; or the launch is not what was asked for.
    """
    folder = check_run_folder(run.output_dir, overwrite=run.overwrite, resume=checkpointing.resume)
    earlier = read_earlier(folder / CONFIG, folder / CHECKPOINTS) if checkpointing.resume else None
    notices = check_same_flags(earlier, flags) if earlier else []
    with ExitStack() as stack:
        stack.enter_context(deterministic_kernels(run.full_determinism, later=run.verify != "off"))
        stack.enter_context(matmul_precision(run.matmul_precision))
        let_segments_grow()
        limit_s = 60 * checkpointing.collective_timeout_minutes
        accelerator = start_accelerator(collective_timeout_s=limit_s, log_with=resolve_trackers(run.report_to, folder))
        notices += check_same_environment(earlier["environment"], accelerator) if earlier else []
        lock = stack.enter_context(locked_run_folder(accelerator, folder))
        try:
            with missing_ranks_end_the_run(limit_s), StopSignals(limit_s) as signals:
                _tell(accelerator, *notices)
                yield OpenRun(
                    accelerator=accelerator,
                    folder=folder,
                    checkpointing=checkpointing,
                    flags=flags,
                    earlier=earlier,
                    signals=signals,
                    lock=lock,
                )
        except (StoppedBySignal, NotFinite):  # which all ranks know of
            finish_trackers(accelerator, {})
            raise


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
) -> RunSettings:
    """Claim the run's folder, write its configuration and start its trackers: what a run does last before it trains.

    One that has ``resumed`` takes up its folder and its trackers where the checkpoint left them.

    Args:
        project: where dashboards keep the runs of a recipe.
        work: what is trained, such as ``vgg16-gbs64-224px``; runs of the same work are meant to be compared.
        flags: of the command line.
        planned: the memory plan. Its strategy's words and the geometry are the method, and name the run.

    Returns:
        What ``RunReport`` wants to know of it.

    Raises:
        InputError: the folder cannot be written, or this device cannot do what a flag asks for.
    """
    if flags.get("memory_snapshot") and accelerator.device.type != "cuda":
        raise InputError(f"--memory_snapshot needs a CUDA device and this is {accelerator.device.type}: leave it out")
    plan, name, earlier, step = planned.plan, _name_of(accelerator, planned, layout), None, 0
    if resumed is not None:
        check_state(resumed.state)
        earlier, step = resumed.state["trackers"], resumed.step
        name = earlier["name"]
        _tell(accelerator, *resumed.notices, f"going on after {step} steps")
    elif flags.get("resume"):
        _tell(accelerator, f"note: --resume finds no checkpoint in {folder}, so the run begins")
    sizes = {**asdict(layout), "accumulation_steps": layout.accumulation_steps}
    about = {"plan": json.loads(plan.to_json()), "geometry": sizes, "environment": describe_environment(accelerator)}
    config = {**flags, **about}
    _tell(accelerator, *on_main_process(accelerator, lambda: _take_run_folder(folder, config, plan.to_json(), resumed)))
    start_trackers(
        accelerator,
        project=project,
        group=work,
        name=name,
        tags=[plan.strategy, flags["dtype"], _device_word(accelerator)],
        config=config,
        output_dir=folder,
        earlier=earlier,
        first_step=step + 1,
    )
    return RunSettings(
        folder=folder,
        name=name,
        flags=flags,
        blocks=plan.blocks,
        compiles=not plan.is_bitwise,
        predicted_peak_bytes=planned.predicted_peak_bytes,
    )


def _name_of(accelerator: Accelerator, planned: RunPlan, layout: BatchLayout) -> str:
    batches = f"mbs{layout.micro_batch_size}x{layout.accumulation_steps}"
    return f"{planned.plan.strategy}-{batches}-{layout.num_processes}{_device_word(accelerator)}"


def _device_word(accelerator: Accelerator) -> str:
    return "gpu" if accelerator.device.type == "cuda" else accelerator.device.type


def check_run_folder(output_dir: str, *, overwrite: bool, resume: bool = False) -> Path:
    """Refuse a folder that holds another run. Changes nothing, so that a mistake found later costs no earlier run.

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
    if resume and (folder / RESULTS).exists() and not committed(folder / CHECKPOINTS):
        raise InputError(
            f"--output_dir {folder} holds a run that is done and kept no checkpoint, so --resume has nothing to go on "
            "with: pass --overwrite to begin anew, or name another folder"
        )
    return folder


def _refuse_links(folder: Path, *, overwrite: bool) -> None:
    """Those that lead nowhere, and those to folders that would have to be deleted."""
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


def _tell(accelerator: Accelerator, *lines: str) -> None:
    """They may hold names of files, and what a checkpoint says."""
    for line in lines:
        accelerator.print(printable(line))


def _take_run_folder(folder: Path, config: dict[str, Any], plan: str, resumed: Resumed | None) -> list[str]:
    """Clear ``folder`` of an earlier run, or of what it wrote of later steps, and describe this one in it.

    Returns:
        A line on the rows that are missing, where any are.

    Raises:
        InputError: it cannot be written, or its rows cannot be read.
    """
    notices = []
    way_out = "then start it again" if resumed is None else "then go on with --resume"
    with disk_errors_as_input_error(folder / CONFIG, f"{PLAN} or {CONFIG}", way_out=way_out):
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
    """Of a file, or of all files in a folder."""
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


def save_model(accelerator: Accelerator, model: nn.Module, folder: Path) -> None:
    """Write the weights as safetensors, for a model of transformers or peft in its ``save_pretrained`` layout."""
    bare = accelerator.unwrap_model(model)
    if hasattr(bare, "save_pretrained"):
        bare.save_pretrained(folder, is_main_process=accelerator.is_main_process)
    else:
        accelerator.save_model(bare, folder)


def save_final(accelerator: Accelerator, folder: Path, *writers: Callable[[Path], Any], way_out: str = GO_ON) -> None:
    """Let ``writers`` fill ``final/`` on rank 0, one after the other; it replaces that of an earlier life.

    Raises:
        InputError: on all ranks, where the disk does not take it; what was there before is as it was.
    """

    def write(temporary: Path) -> None:
        for writer in writers:
            writer(temporary)

    def put() -> None:
        with disk_errors_as_input_error(folder / FINAL, f"{FINAL}/", way_out=way_out):
            make_whole(folder, FINAL, write)

    on_main_process(accelerator, put)


def write_results(
    accelerator: Accelerator,
    folder: Path,
    results: dict[str, Any],
    checkpoints: Checkpoints | None = None,
    *,
    way_out: str = GO_ON,
) -> None:
    """Write ``results.json`` on rank 0; then the checkpoint of the last step may go.

    Raises:
        InputError: on all ranks, where the disk does not take it.
    """

    def write() -> None:
        with disk_errors_as_input_error(folder / RESULTS, RESULTS, way_out=way_out):
            write_json(folder / RESULTS, results)

    on_main_process(accelerator, write)
    if checkpoints is not None:
        checkpoints.give_up_the_end()
