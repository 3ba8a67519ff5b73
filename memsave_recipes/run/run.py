"""A run of a recipe: Accelerator, folder, plan, checkpoints, trackers and figures. The training step is the recipe's.

1. ``Run.open`` checks flags and folder, starts Accelerate and locks the folder; it writes and deletes nothing.
2. ``Run.prepare`` makes a ``PreparedRun``: Accelerate's model and optimizer, and the plan, which ``--verify`` proves.
3. ``Run.begin`` restores the newest checkpoint or clears the folder, and makes a ``TrainingRun``. Its ``finish`` writes
   ``final/`` and ``results.json``; the end of ``open`` prints the summary, closes the trackers and uploads ``final/``.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed
from torch import nn

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.task import Task
from memsave_recipes.core.sharding.groups import NONE
from memsave_recipes.core.step.settings import AUTO
from memsave_recipes.core.text import say
from memsave_recipes.data.fingerprint import Fingerprint
from memsave_recipes.models.hub import check_push, push
from memsave_recipes.run.failures import RunIsDone, describe_early_end, recorded
from memsave_recipes.run.folder import CHECKPOINTS, CONFIG, FINAL, check_not_done, check_run_folder, print_lines
from memsave_recipes.run.open_run import OpenRun, RunFolder
from memsave_recipes.run.prepared_run import PreparedRun
from memsave_recipes.run.trackers import alert, finish_trackers, resolve_trackers
from memsave_recipes.run.training_run import TrainingRun
from memsave_recipes.tools.compare import compare, read_run
from memsave_recipes.tools.pages.comparison import show
from memsave_recipes.training.arguments import RecipeArguments
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.checkpoints import locked_run_folder
from memsave_recipes.training.checkpoints.resume import (
    check_same_environment,
    check_same_flags,
    read_earlier,
    with_previous_choices,
)
from memsave_recipes.training.launch.distributed import missing_ranks_end_the_run, on_main_process, require_same
from memsave_recipes.training.launch.launched_shard import launched_shard
from memsave_recipes.training.launch.processes import StoppedBySignal, StopSignals, is_restarted
from memsave_recipes.training.launch.start import (
    chosen_dtype,
    describe_no_gpu,
    deterministic_kernels,
    installed_versions,
    matmul_precision,
    start_accelerator,
    use_expandable_segments,
)
from memsave_recipes.training.optimizers import NotFinite
from memsave_recipes.training.parsing import flag_values


class Run(OpenRun):
    """A run, as ``Run.open`` gives it."""

    training: TrainingRun | None = None

    @classmethod
    @contextmanager
    def open(cls, args: RecipeArguments, *, recipe: str) -> Iterator["Run"]:
        """Start Accelerate, seed, and keep the run's folder and the signals that ask to stop until the block ends.

        Ranks that the launcher has started in place of lost ones resume.

        Args:
            recipe: its name, such as ``image_classification``.

        Raises:
            RunIsDone: the one to resume is done.
            InputError: the folder holds another run, is in use, cannot be written or cannot be resumed; the launch
                is not the one of the flags; or nobody is logged in for ``--push_to_hub``.
        """
        args = _with_resume(args)
        path = check_run_folder(args.output_dir, overwrite=args.overwrite, resume=args.resume)
        limit_s = 60 * args.collective_timeout_minutes
        with ExitStack() as stack:
            stack.enter_context(recorded())
            args = _with_shard(args, stack.enter_context(launched_shard()))
            if args.resume:
                _end_if_done(path, args)
            earlier = read_earlier(path / CONFIG, path / CHECKPOINTS) if args.resume else None
            notices = list(filter(None, [describe_no_gpu()]))
            if earlier:
                args = with_previous_choices(args, earlier)
                notices += check_same_flags(earlier, flag_values((args,)))
            stack.enter_context(deterministic_kernels(args.full_determinism, later=args.verify != "off"))
            stack.enter_context(matmul_precision(args.matmul_precision))
            use_expandable_segments()
            if (dtype := chosen_dtype(args.dtype)) != args.dtype:
                args = replace(args, dtype=dtype)
                notices.append(f"--dtype auto: {dtype}" + (", with fp16" if dtype == "float16" else ""))
            log_with = resolve_trackers(args.report_to, path)
            precision = "fp16" if args.dtype == "float16" else None  # that of the launch
            accelerator = start_accelerator(collective_timeout_s=limit_s, log_with=log_with, mixed_precision=precision)
            require_same(accelerator, installed_versions(), "install the same versions on every machine")
            notices += check_same_environment(earlier["environment"], accelerator) if earlier else []
            if args.push_to_hub is not None:
                on_main_process(accelerator, partial(check_push, args.push_to_hub))
            lock = stack.enter_context(locked_run_folder(accelerator, path))
            try:
                with missing_ranks_end_the_run(limit_s), StopSignals(limit_s) as signals:
                    print_lines(accelerator, *notices)
                    folder = RunFolder(path=path, earlier=earlier, signals=signals, lock=lock)
                    set_seed(args.seed)
                    run = cls(args, recipe, accelerator, folder)
                    try:
                        yield run
                    except NotFinite:  # so all ranks are well, and end a save in the background
                        if run.training is not None:
                            run.training.finish_writing()
                        raise
                    run._close()
            except (Exception, StoppedBySignal) as error:
                alert(accelerator, *describe_early_end(error))
                if isinstance(error, StoppedBySignal | NotFinite):  # which all ranks know of
                    finish_trackers(accelerator, {})
                raise
            run._push()

    def prepare(
        self, task: Task, batches: GlobalBatches, model: nn.Module, trained: nn.Module | None = None
    ) -> PreparedRun:
        """Prepare model, optimizer and schedule of the flags, and apply the plan.

        Args:
            task: with the loss of a micro-batch by the prepared model.
            batches: to train on.
            model: the one with the blocks; all its parameters that require gradients are trained.
            trained: the module around it that is trained, where that is another one.

        Raises:
            InputError: the model does not take ``--bitwise_topology``, ``--batchnorm global``, ``--shard`` or
                ``--lora_merge``; no such strategy, or nothing fits.
            VerificationFailed: ``--verify`` found that the plan changes the step.
        """
        return PreparedRun(self, task, batches, model, model if trained is None else trained)

    def begin(
        self,
        prepared: PreparedRun,
        *,
        data: Fingerprint,
        work: str,
        saved: nn.Module | None = None,
        notices: tuple[str | None, ...] = (),
    ) -> TrainingRun:
        """Restore the newest checkpoint with ``--resume``, else clear the folder; then start the trackers.

        Args:
            data: the digest of the data.
            work: a name such as ``vgg16-gbs64-224px``; runs of the same work are compared with one another.
            saved: the model whose weights ``--save_best`` writes, where that is another one, such as peft's.
            notices: lines to print, about the data or the model.

        Raises:
            InputError: no checkpoint fits, the disk has no room, or the folder cannot be written.
        """
        self.training = TrainingRun(prepared, data=data, work=work, saved=saved, notices=notices)
        return self.training

    def _close(self) -> None:
        """Print the summary and close the trackers of a run that is done."""
        results = self.training and self.training.results
        if not results:
            return
        if self.args.eval_only:
            self.accelerator.print(", ".join(f"{name} {value:.4f}" for name, value in results["eval"].items()))
        elif self.accelerator.is_main_process:
            show(compare([read_run(self.folder.path)]))
        finish_trackers(self.accelerator, results)

    def _push(self) -> None:
        """Upload the model of a run that is done; the other ranks have ended, as this may take any time."""
        is_done = self.training is not None and self.training.results
        if is_done and self.accelerator.is_main_process:
            _upload(self.folder.path, self.args)


def _upload(folder: Path, args: Any) -> None:
    if args.push_to_hub is not None:
        say(push(args.push_to_hub, folder / FINAL, private=args.hub_private_repo))


def _end_if_done(folder: Path, args: Any) -> None:
    """End a run that is done already, as of a job that is queued again; first repeat the upload, which may have failed.

    Raises as ``check_not_done``, and ``InputError`` where nobody is logged in for the upload.
    """
    try:
        check_not_done(folder, args)
    except RunIsDone:
        if args.push_to_hub is not None:
            check_push(args.push_to_hub)
        if os.environ.get("RANK", "0") == "0":
            _upload(folder, args)
        raise


def _with_resume(args: Any) -> Any:
    """Return the flags of this life: restarted ranks resume, also where the first ones began by overwriting."""
    return replace(args, resume=True, overwrite=False) if is_restarted() and not args.eval_only else args


def _with_shard(args: Any, launched: str | None) -> Any:
    """Return the flags with the ``--shard`` of the launch file; the last rank of a launch has whole weights."""
    if launched is not None and args.shard not in (None, launched):
        raise InputError(f"--shard {args.shard}: the launch file says {launched}: leave one of them out")
    if is_restarted() and os.environ.get("WORLD_SIZE", "1") == "1":
        return replace(args, shard=NONE, reduce_gradients=AUTO)  # which are for shards
    return replace(args, shard=args.shard or launched or NONE)
