"""A run of a recipe: Accelerator, folder, plan, checkpoints, trackers and figures. The training step is the recipe's.

NOTE [ the order of a run ]

1. ``Run.open`` checks flags and folder, starts Accelerate and locks the folder. Nothing is written or deleted yet, so a
   mistake beside ``--overwrite`` costs nothing.
2. ``train_on``, ``prepare``, ``apply_plan``: the data, the model, then the plan, which is measured on the model as
   prepared; in shards it is found before, and tried then. ``--verify`` proves it here.
3. ``begin`` restores the newest checkpoint or clears the folder. From here on files are written.
4. A step is finished with ``log_step``, ``evaluate_if_due``, ``save_if_due``, in that order. The last step is saved
   before its evaluation: a failure from then on costs nothing, ``--resume`` writes the rest.
5. ``finish`` writes ``final/`` and ``results.json``; the end of ``open`` prints the summary and closes the trackers.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from memsave_recipes.activations import apply_plan, plan_blocks
from memsave_recipes.activations.global_batchnorm import global_batchnorm
from memsave_recipes.activations.streaming import leave_to_this_rank, stream_of
from memsave_recipes.checkpoints import Checkpoints, Resumed, RunLock, TrainState, locked_run_folder
from memsave_recipes.checkpoints.resume import (
    check_same_environment,
    check_same_flags,
    read_earlier,
    with_previous_choices,
    with_previous_plan,
)
from memsave_recipes.compare import compare, read_run
from memsave_recipes.distributed import (
    main_process_first,
    missing_ranks_end_the_run,
    on_main_process,
    require_same,
)
from memsave_recipes.errors import InputError
from memsave_recipes.fingerprint import Fingerprint
from memsave_recipes.models.adapters import check_merging
from memsave_recipes.planner.search import Candidate, reduction_line
from memsave_recipes.planner.task import Task
from memsave_recipes.processes import StoppedBySignal, StopSignals, is_restarted, num_workers
from memsave_recipes.profiling.preserve_state import preserve_state
from memsave_recipes.render.choice import show_choice
from memsave_recipes.render.comparison import show
from memsave_recipes.run.first_steps import settle_kernels, verify_plan
from memsave_recipes.run.folder import (
    CHECKPOINTS,
    CONFIG,
    PLAN,
    begin_run,
    check_room,
    check_run_folder,
    earlier_names,
    print_lines,
    save_final,
    weight_writers,
    write_results,
)
from memsave_recipes.run.log import recorded
from memsave_recipes.run.report import CardFacts, RunReport, write_model_card
from memsave_recipes.run.run_plan import choose_in_shards, plan_run
from memsave_recipes.run.step_on_device import StepOnDevice
from memsave_recipes.run.trackers import finish_trackers, log_metrics, resolve_trackers
from memsave_recipes.sharding import ShardGroups, launched_shard, shard
from memsave_recipes.sharding.groups import NONE, check_precision
from memsave_recipes.sharding.shards import Rows, callable_in_parts, reduce_once_a_step
from memsave_recipes.sharding.units import joint_blocks
from memsave_recipes.step.batch_layout import Batch, IndexedLayout, SampleOrder
from memsave_recipes.step.settings import AUTO, PER_MICRO_BATCH, PER_STEP
from memsave_recipes.text import ProgressBar
from memsave_recipes.training.arguments import RecipeArguments
from memsave_recipes.training.batching import GlobalBatch, GlobalBatches
from memsave_recipes.training.evaluation import evaluation_batches
from memsave_recipes.training.launch import (
    batchnorm_notice,
    check_no_batchnorm,
    check_share_of_every_rank,
    describe_environment,
    deterministic_kernels,
    installed_versions,
    matmul_precision,
    start_accelerator,
    use_expandable_segments,
)
from memsave_recipes.training.optimizers import (
    NonFiniteGuard,
    NotFinite,
    check_in_backward,
    clip_gradients,
    describe_lost_updates,
    describe_state_in_shards,
    make_optimizer,
    make_scheduler,
)
from memsave_recipes.training.parsing import flag_values
from memsave_recipes.training.tree_sum import describe_cost


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The folder that an open run has to itself.

    Args:
        earlier: ``config.json`` of the run that is resumed; ``None`` where none is.
        signals: those that ask the run to stop.
    """

    path: Path
    earlier: dict[str, Any] | None
    signals: StopSignals
    lock: RunLock


class Run:
    """A run, as ``Run.open`` gives it; see NOTE [ the order of a run ]. All methods are for all ranks.

    Attributes:
        args: the recipe's flags; on a resumed run with the plan and micro-batch size that were found before.
        accelerator: Accelerate's.
    """

    def __init__(self, args: Any, recipe: str, accelerator: Accelerator, folder: RunFolder) -> None:
        self.recipe = recipe
        self.accelerator = accelerator
        self.folder = folder
        self.flags = flag_values((args,))
        self.args = args
        if folder.earlier is not None:
            names, notices = earlier_names(folder.earlier, self.flags)
            print_lines(accelerator, *notices)
            self.flags |= names
            plan, num_processes = folder.path / PLAN, accelerator.num_processes
            self.args = with_previous_plan(args, folder.earlier, plan=plan, num_processes=num_processes)
        self.num_workers = num_workers(args.dataloader_num_workers, accelerator)
        self.step = 0
        self.results: dict[str, Any] | None = None
        self._groups = ShardGroups.of(args.shard, accelerator.num_processes)
        self._in_shards: Candidate | None = None
        if self._groups is not None:
            check_precision(args.shard, accelerator.mixed_precision)
        layout = self.args.layout(accelerator.num_processes)
        check_in_backward(args, layout, accelerator.mixed_precision, skip_nonfinite=args.skip_nonfinite)

    @classmethod
    @contextmanager
    def open(cls, args: RecipeArguments, *, recipe: str) -> Iterator["Run"]:
        """Start Accelerate, seed, and keep the run's folder and the signals that ask to stop until the block ends.

        Where the launcher has lost ranks of this run and started these in their place, ``--resume`` is implied.

        Args:
            recipe: its name, such as ``image_classification``.

        Raises:
            InputError: the folder holds another run, is in use, cannot be written or cannot be resumed; or the launch
                is not the one of the flags.
        """
        args = _with_resume(args)
        path = check_run_folder(args.output_dir, overwrite=args.overwrite, resume=args.resume)
        limit_s = 60 * args.collective_timeout_minutes
        with ExitStack() as stack:
            stack.enter_context(recorded())
            args = _with_shard(args, stack.enter_context(launched_shard()))
            earlier = read_earlier(path / CONFIG, path / CHECKPOINTS) if args.resume else None
            notices = []
            if earlier:
                args = with_previous_choices(args, earlier)
                notices = check_same_flags(earlier, flag_values((args,)))
            stack.enter_context(deterministic_kernels(args.full_determinism, later=args.verify != "off"))
            stack.enter_context(matmul_precision(args.matmul_precision))
            use_expandable_segments()
            log_with = resolve_trackers(args.report_to, path)
            accelerator = start_accelerator(collective_timeout_s=limit_s, log_with=log_with)
            require_same(accelerator, installed_versions(), "install the same versions on every machine")
            notices += check_same_environment(earlier["environment"], accelerator) if earlier else []
            lock = stack.enter_context(locked_run_folder(accelerator, path))
            try:
                with missing_ranks_end_the_run(limit_s), StopSignals(limit_s) as signals:
                    print_lines(accelerator, *notices)
                    folder = RunFolder(path=path, earlier=earlier, signals=signals, lock=lock)
                    set_seed(args.seed)
                    run = cls(args, recipe, accelerator, folder)
                    try:
                        yield run
                    except NotFinite:  # so all ranks are well, and end a save beside the training
                        run._checkpoints.finish_writing()
                        raise
                    run._close()
            except (StoppedBySignal, NotFinite):  # which all ranks know of
                finish_trackers(accelerator, {})
                raise

    def chose(self, **flags: Any) -> None:
        """Write to ``config.json`` what an ``auto`` has become; a resumed run takes it from there."""
        self.flags |= flags

    def main_process_first(self) -> AbstractContextManager[None]:
        """What stands inside runs on the main process first, so that the others find what it keeps in caches."""
        return main_process_first(self.accelerator)

    def train_on(self, dataset: Any, **options: Any) -> GlobalBatches:
        """Take the samples to train on, in the global batches that are returned: one for each optimizer step.

        Args:
            options: ``count_valid`` and ``collate_fn`` of ``GlobalBatches``.
        """
        args = self.args
        order = SampleOrder(
            num_samples=len(dataset), global_batch_size=args.global_batch_size, seed=args.seed, drop_last=args.drop_last
        )
        layout = args.layout(self.accelerator.num_processes)
        if args.batchnorm == "global":
            check_share_of_every_rank(order, layout)
        self._batches = GlobalBatches(
            self.accelerator,
            dataset,
            order=order,
            layout=layout,
            num_steps=0 if args.eval_only else args.max_steps or ceil(args.num_epochs * order.steps_per_epoch),
            seed=args.seed,
            num_workers=self.num_workers,
            **options,
        )
        return self._batches

    @property
    def slices_on(self) -> torch.device | None:
        """The device for slices of the weights, where a rank is to have a part of them; else ``None``."""
        return None if self._groups is None else self.accelerator.device

    def prepare(
        self,
        task: Task,
        model: nn.Module,
        trained: nn.Module | None = None,
        *,
        unread: Mapping[nn.Parameter, Rows] | None = None,
    ) -> tuple[nn.Module, Optimizer, LRScheduler]:
        """The model as Accelerate prepares it, with the optimizer and the schedule of the flags.

        The schedule is not prepared: Accelerate's would move it once for every rank.

        Args:
            task: with the loss of a micro-batch by the prepared model.
            model: the one with the blocks; all its parameters that require gradients are trained.
            trained: the module around it that is trained, where that is another one.
            unread: with ``--shard``, the parameters that stand for weights which are not there yet, as ``shard`` takes
                them.

        Raises:
            InputError: ``--bitwise_topology`` and a model with BatchNorm that is local; ``--batchnorm global`` and one
                without; or, with ``--shard``, as ``shard`` and ``choose_in_shards``.
        """
        if self.args.batchnorm == "global":
            global_batchnorm(model)
        elif self.args.bitwise_topology:
            check_no_batchnorm(model)
        self._task, self._bare = task, model
        trained = model if trained is None else trained
        if self._groups is not None:
            self._shard(trained, model, self._groups, unread)
        optimizer = make_optimizer(self.args, model, seed=self.args.seed)
        notices = [describe_state_in_shards(self.args, model), describe_lost_updates(self.args, model)]
        print_lines(self.accelerator, *filter(None, notices))
        self._scheduler = make_scheduler(self.args, optimizer, self._batches.steps.stop)
        if self._groups is not None:  # as for evaluation: with autocast, and without a DDP around the shards
            self._model = self.accelerator.prepare_model(trained, device_placement=False, evaluation_mode=True)
            self._optimizer = self.accelerator.prepare_optimizer(optimizer)
            return self._model, self._optimizer, self._scheduler
        is_streamed = stream_of(model) is not None
        if is_streamed:
            leave_to_this_rank(trained)
        placement = [not is_streamed, True]
        self._model, self._optimizer = self.accelerator.prepare(trained, optimizer, device_placement=placement)
        return self._model, self._optimizer, self._scheduler

    def _shard(
        self, trained: nn.Module, model: nn.Module, groups: ShardGroups, unread: Mapping[nn.Parameter, Rows] | None
    ) -> None:
        """Cut the weights up, in units of the plan that the flags name or that is found for a budget.

        Raises:
            InputError: as ``shard`` and ``choose_in_shards``, or ``--verify`` and a plan that rounds otherwise.
        """
        args = self.args
        if args.searches:
            self._in_shards = choose_in_shards(self.accelerator, self._task, show_choice)
            plan = self._in_shards.forecast.plan
        else:
            plan = plan_blocks(model, args.activation_checkpointing)
        if args.verify == "stop" and not plan.is_bitwise:
            raise InputError(
                f"--verify: plan {plan.strategy} rounds in another order, so it is compared with a step in float64, "
                f"which weights under --shard {args.shard} do not take: leave --verify out, or take a plan that keeps "
                "every bit, such as full or budget:bitwise"
            )
        shard(trained, model, plan, groups, self.accelerator.device, args.shard, unread)
        self._joint_blocks = joint_blocks(plan)
        self.accelerator.print(groups.describe())

    def apply_plan(self) -> None:
        """Apply the activation plan that the flags name, or the fastest that fits the budget; verify it.

        Raises:
            InputError: no such strategy, nothing fits, a plan beside ``--bitwise_topology`` that rounds otherwise, or
                as ``check_merging``.
            VerificationFailed: ``--verify`` found that the plan changes the step.
        """
        args, accelerator, batches, model = self.args, self.accelerator, self._batches, self._model
        loss_of = self._loss_of = partial(self._task.loss_of, model)
        if self.flags.get("lora_merge"):
            with preserve_state(model, accelerator.device):
                check_merging(self._bare, lambda: loss_of(batches.largest_forward(batches.layout)()))
        self.planned = plan_run(
            args,
            args,
            StepOnDevice(accelerator, self._bare, batches, model, loss_of),
            task=lambda: self._task,
            show=show_choice,
            in_shards=self._in_shards,
        )
        if args.bitwise_topology and not self.planned.plan.is_bitwise:
            does = "compiles, and rounds by the shapes that a rank has seen"
            if self.planned.plan.micro_batch_size is not None:
                does = "runs blocks in micro-batches by themselves, and adds their gradients in the order of a rank"
            raise InputError(
                f"--bitwise_topology: the plan of --activation_checkpointing {args.activation_checkpointing} {does}: "
                "take a plan that does not"
            )
        if self._groups is not None and joint_blocks(self.planned.plan) != self._joint_blocks:
            raise InputError(
                f"--shard {args.shard}: not all blocks of --activation_checkpointing {args.activation_checkpointing} "
                "run, so its spans are others than the units of the weights: take full"
            )
        self._settle_reduction()
        self._handle = apply_plan(self._bare, self.planned.plan)
        self._equivalence = verify_plan(args.verify, accelerator, model, self._handle, batches, loss_of)
        settle_kernels(args.full_determinism, accelerator, model, batches, loss_of)

    def _settle_reduction(self) -> None:
        """Of gradients in shards, as they were planned: ``--reduce_gradients``."""
        if self._groups is None:
            return
        once = self.planned.reduces_once
        reduce_once_a_step(self._model, once)
        self.chose(reduce_gradients=PER_STEP if once else PER_MICRO_BATCH)
        if self._batches.layout.accumulation_steps > 1:
            self.accelerator.print(reduction_line(once=once))

    def begin(
        self, *, data: Fingerprint, work: str, saved: nn.Module | None = None, notices: tuple[str | None, ...] = ()
    ) -> None:
        """Restore the newest checkpoint with ``--resume``, else clear the folder; then start the trackers.

        Args:
            data: the digest of the data.
            work: a name such as ``vgg16-gbs64-224px``; runs of the same work are compared with one another.
            saved: writes the weights with ``--save_best``, where that is not the model; such as peft's.
            notices: lines to print, about the data or the model.

        Raises:
            InputError: no checkpoint fits, the disk has no room, or the folder cannot be written.
        """
        self._saved = self._bare if saved is None else saved
        train_state = TrainState(self.accelerator, self._model, self._optimizer, self._scheduler)
        self._checkpoints = self._make_checkpoints(train_state, data)
        resumed = self._checkpoints.resume_into(self._batches) if self.args.resume else None
        settings = begin_run(
            self.accelerator,
            self.folder.path,
            project=f"memsave-{self.recipe.replace('_', '-')}",
            work=work,
            flags=self.flags,
            planned=self.planned,
            layout=self._batches.layout,
            resumed=resumed,
        )
        self._count_parameters()
        layout, order = self._batches.layout, self._batches.order
        cost = describe_cost(self._bare, layout) if isinstance(layout, IndexedLayout) else None
        lines = (layout.describe(), cost, self.planned.plan.describe(), *notices, order.notice)
        is_local, in_shards = self.args.batchnorm == "local", self._groups is not None
        batchnorm = batchnorm_notice(self._bare, layout, in_shards=in_shards) if is_local else None
        self.accelerator.print(*filter(None, (*lines, batchnorm)), sep="\n")
        self._guard = NonFiniteGuard(self.accelerator, self._model, self._optimizer, skips=self.args.skip_nonfinite)
        self._report = RunReport(self.accelerator, self._batches, self._model, self._optimizer, settings)
        if resumed is not None:
            self._go_on(resumed)

    def steps(self) -> Iterator[GlobalBatch]:
        """The global batches that are left, with a progress bar on a terminal. FLOPs are counted beside the first."""
        if self.args.eval_only:
            return
        first = self.accelerator.is_main_process
        self._progress = ProgressBar(self._batches, shown=first, unit="step", delay=0, leave=True)
        for batch in self._report.clock.loading(self._progress):
            self._learning_rate = float(self._scheduler.get_last_lr()[0])
            self._report.count_flops(batch, self._loss_of)
            yield batch

    def paused(self) -> AbstractContextManager[None]:
        """What stands inside takes no time of the run's."""
        return self._report.clock.paused(synchronize=True)

    def measured(self, batch: GlobalBatch) -> AbstractContextManager[None]:
        """The training step goes inside; its memory is measured.

        Raises:
            torch.OutOfMemoryError: there is no memory left; its message is a page that explains it.
        """
        return self._report.measured(batch.step)

    def clip_gradients(self) -> Tensor | None:
        """The norm of the global batch's gradient, now clipped; ``None`` where the backward has used them up."""
        return clip_gradients(self.args, self.accelerator, self._model)

    def should_step(self, batch: GlobalBatch, grad_norm: Tensor | None) -> bool:
        """Whether the optimizer may step: ``False`` where loss or gradient is not finite and ``--skip_nonfinite``."""
        return self._guard.should_step(batch, grad_norm)

    def log_step(self, batch: GlobalBatch, grad_norm: Tensor | None) -> None:
        """Count a finished step, log the window that it ends, and save the last step of the run.

        Raises:
            NotFinite: more steps of the window than allowed are not finite.
        """
        self._report.count(batch, grad_norm)
        self._handle.check_first_step(self.accelerator.print)
        self.step = batch.step + 1
        is_last = self.step == self._batches.steps.stop
        if self.step % self.args.logging_steps == 0 or is_last:
            figures = self._report.log_window(self.step, learning_rate=self._learning_rate)
            self._progress.set_postfix_str(figures)
            if self._progress.disable:
                self.accelerator.print(f"step {self.step}/{self._batches.steps.stop}: {figures}", flush=True)
        if is_last:
            with self._report.clock.paused():
                self._checkpoints.save(self.step, self._report.state_dict())

    def log(self, figures: dict[str, Any]) -> None:
        """Log a row of the recipe's own after a finished step, into ``metrics.jsonl`` and the trackers."""
        log_metrics(self.accelerator, figures, self.step)

    def evaluate_if_due(
        self, evaluate: Callable[[Iterator[Batch]], dict[str, float]], dataset: Any, **options: Any
    ) -> None:
        """Log ``evaluate(batches)`` after ``--eval_steps`` or an epoch, and keep the best weights with ``--save_best``.

        Before the first step it is due with ``--eval_only``, and where a signal has ended the evaluation of the run
        that is resumed.

        Args:
            evaluate: figures of this rank's batches, with a ``loss``.
            options: ``num_samples`` and ``collate_fn`` of ``evaluation_batches``.
        """
        if not (self.step or self.args.eval_only):
            return
        if not self._report.evaluation_is_due(self.step, every=self.args.eval_steps):
            return
        with self._report.clock.paused(synchronize=True):
            layout = self._batches.layout
            batches = evaluation_batches(
                self.accelerator,
                dataset,
                self.planned.plan.micro_batch_size or layout.micro_batch_size,
                layout=type(layout),
                num_workers=self.num_workers,
                **options,
            )
            figures = evaluate(self._checkpoints.until_signal(batches, self.step, self._report.state_dict))
            if self._report.log_evaluation(self.step, figures) and self.args.save_best:
                self._checkpoints.save_best(self.step, weight_writers(self.accelerator, self._saved))

    def save_if_due(self) -> None:
        """Save a checkpoint if it is time, or a signal asks for it.

        Raises:
            StoppedBySignal: a rank received a signal; the checkpoint has been saved.
        """
        with self._report.clock.paused():
            self._checkpoints.after_step(self.step, self._report.state_dict)

    @contextmanager
    def drawing_samples(self) -> Iterator[bool]:
        """Inside, this rank may run the model outside of a step, if it is told so; in shards all ranks have to."""
        with callable_in_parts(self._model):
            yield self.accelerator.is_main_process or self._groups is not None

    def finish(
        self,
        trained: nn.Module,
        *writers: Callable[[Path], Any],
        evaluated: dict[str, Any] | None = None,
        **figures: Any,
    ) -> dict[str, Any]:
        """Take the plan off, write ``final/`` and ``results.json``, and return the content of the latter.

        With ``--eval_only`` there is no ``final/``, as the model is as it was; unless adapters were merged into it.

        Args:
            trained: the model whose weights are written.
            writers: write other files of ``final/``, such as a tokenizer's, into the folder that they are given.
            evaluated: figures beside those of the last evaluation.
            figures: entries of ``results.json``.

        Raises:
            InputError: the disk does not take them; ``--resume`` writes them later.
        """
        self._handle.remove()
        known = {
            "recipe": self.recipe,
            **figures,
            "num_parameters": self.num_parameters,
            "plan": self.planned.plan.strategy,
            "eval": {**self._report.evaluated, **(evaluated or {})},
        }
        if not self.args.eval_only or self.flags.get("lora_merge"):
            card = partial(write_model_card, facts=self._card(trained, known))
            save_final(self.accelerator, self.folder.path, trained, *writers, card)
        self.results = {**known, **self._equivalence, **self._report.results()}
        write_results(self.accelerator, self.folder.path, self.results, self._checkpoints)
        return self.results

    def _make_checkpoints(self, train_state: TrainState, data: Fingerprint) -> Checkpoints:
        if not self.args.eval_only:
            on_main_process(self.accelerator, lambda: check_room(self.folder.path, train_state, self.flags))
        return Checkpoints.from_args(
            self.args,
            self.accelerator,
            self.folder.path / CHECKPOINTS,
            train_state,
            self._batches,
            data,
            signals=self.folder.signals,
            lock=self.folder.lock,
        )

    def _card(self, trained: nn.Module, results: dict[str, Any]) -> CardFacts:
        return CardFacts(
            model=trained,
            flags=self.flags,
            results=results,
            steps=self.step,
            batch=self._batches.layout.describe(),
            versions=describe_environment(self.accelerator)["versions"],
            mixed_precision=self.accelerator.mixed_precision,
        )

    @property
    def smallest_micro_batch(self) -> int:
        """The fewest samples that a forward of the run is given: one, where the planner is to choose the size."""
        return 1 if self.args.micro_batch_size == AUTO else self._batches.smallest_micro_batch

    def _count_parameters(self) -> None:
        self.num_parameters = sum(parameter.numel() for parameter in self._bare.parameters())
        self.num_trained = sum(p.numel() for p in self._bare.parameters() if p.requires_grad)
        if self.num_trained < self.num_parameters:
            words = f"{self.num_trained:,} of {self.num_parameters:,} parameters train"
            self.accelerator.print(words)

    def _go_on(self, resumed: Resumed) -> None:
        self.step = resumed.step
        self._report.load_state_dict(resumed.state)
        if self.args.save_best and not on_main_process(self.accelerator, self._checkpoints.has_best):
            self._forget_best()

    def _forget_best(self) -> None:
        """The next evaluation is the best then: the remembered loss would keep every later one from being saved."""
        if self._report.best_loss < float("inf"):
            self.accelerator.print(
                f"note: the weights of the lowest evaluation loss so far ({self._report.best_loss:.4f}) are not in "
                "checkpoints/: --save_best begins anew"
            )
        self._report.best_loss = float("inf")

    def _close(self) -> None:
        """Print the summary and close the trackers of a run that is done."""
        if self.results is None:
            return
        if self.args.eval_only:
            self.accelerator.print(", ".join(f"{name} {value:.4f}" for name, value in self.results["eval"].items()))
        elif self.accelerator.is_main_process:
            show(compare([read_run(self.folder.path)]))
        finish_trackers(self.accelerator, self.results)


def _with_resume(args: Any) -> Any:
    """The flags of ranks that come after others of their launch: they go on, also where those began by overwriting."""
    return replace(args, resume=True, overwrite=False) if is_restarted() and not args.eval_only else args


def _with_shard(args: Any, launched: str | None) -> Any:
    """The flags with the ``--shard`` that the launch file implies; the last rank of a launch has whole weights.

    Raises:
        InputError: the flag says another one.
    """
    if launched is not None and args.shard not in (None, launched):
        raise InputError(f"--shard {args.shard}: the launch file says {launched}: leave one of them out")
    if is_restarted() and os.environ.get("WORLD_SIZE", "1") == "1":
        return replace(args, shard=NONE, reduce_gradients=AUTO, async_save=False)  # which are for shards
    return replace(args, shard=args.shard or launched or NONE)
