"""The last phase of a run: its steps, what is logged, evaluated and saved after each, and how it is finished."""

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import chain
from math import isfinite, isnan
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from memsave_recipes.core.activations import PlanHandle
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.host.step import masters_of
from memsave_recipes.core.progress import ProgressBar
from memsave_recipes.core.sharding.shards import callable_in_parts
from memsave_recipes.core.step.batch_layout import Batch
from memsave_recipes.data.fingerprint import Fingerprint
from memsave_recipes.models.adapters import without_adapters
from memsave_recipes.models.fused_ops import fused_in
from memsave_recipes.models.slices import slices_of
from memsave_recipes.run.building import Built
from memsave_recipes.run.folder import (
    CHECKPOINTS,
    FIGURES,
    begin_run,
    check_room,
    save_final,
    weight_writers,
    write_figures,
    write_results,
)
from memsave_recipes.run.report import RunReport, scalars_of, write_model_card
from memsave_recipes.training.batching import GlobalBatch
from memsave_recipes.training.checkpoints import Checkpoints, Resumed, TrainState
from memsave_recipes.training.checkpoints.resume import best_metric
from memsave_recipes.training.evaluation import evaluation_batches
from memsave_recipes.training.launch.distributed import on_main_process
from memsave_recipes.training.launch.start import check_gradients, describe_environment, deterministic_kernels
from memsave_recipes.training.optimizers import clip_gradients
from memsave_recipes.training.weight_average import WeightAverage

FEW_SAMPLES = 8


class TrainingRun:
    """A run that trains. All methods are for all ranks.

    A step is finished with ``end_step``, ``evaluate_if_due``, ``save_if_due``, in that order. The last step is saved
    before its evaluation, so that a failure from then on costs nothing.

    Attributes:
        step: how many are done.
        num_trained: parameters that train.
        results: the content of ``results.json``; ``None`` before ``finish``.
    """

    def __init__(
        self,
        built: Built,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        handle: PlanHandle,
        *,
        data: Fingerprint,
        work: str,
        notices: tuple[str | None, ...],
    ) -> None:
        """Prove the plan, restore the newest checkpoint or clear the folder, and start the trackers: ``Run.begin``."""
        self.model, self.optimizer, self.scheduler, self.handle = model, optimizer, scheduler, handle
        self.built, self.run, self.batches = built, built.run, built.batches
        self._equivalence = built.verify(model, handle)
        self.args, self.accelerator = self.run.args, self.run.accelerator
        self.step = 0
        self.results: dict[str, Any] | None = None
        self.num_trained = sum(p.numel() for p in built.bare.parameters() if p.requires_grad)
        self.num_parameters = sum(parameter.numel() for parameter in built.bare.parameters())
        self._average = self._make_average()
        self._saves_last = False
        self._measured = ExitStack()
        self._metric = self.args.save_best or "loss"
        self._knows_metric = self.args.eval_only or self._metric == "loss"
        self._checkpoints = self._make_checkpoints(data)
        resumed = self._checkpoints.resume_into(self.batches) if self.args.resume else None
        name = begin_run(
            self.accelerator,
            self.run.path,
            project=f"memsave-{self.run.recipe.replace('_', '-')}",
            work=work,
            flags=self.run.flags,
            planned=built.planned,
            layout=self.batches.layout,
            resumed=resumed,
        )
        self.accelerator.print(*filter(None, self._lines(notices)), sep="\n")
        self._report = RunReport(self.accelerator, self.batches, model, optimizer, built.planned, name)
        if resumed is not None:
            self._go_on(resumed)

    def steps(self) -> Iterator[GlobalBatch]:
        """Yield the global batches that are left, with a progress bar. Count FLOPs before the first is trained on.

        The memory of a step is measured from here to ``end_step``. With ``--ema_decay`` the model has the
        average of its weights from the end of the batches on.
        """
        if self.args.eval_only:
            return
        first = self.accelerator.is_main_process
        self._progress = ProgressBar(self.batches, shown=first, unit="step", delay=0, leave=True)
        freezes = not gc.get_freeze_count()  # a caller that has frozen its own objects keeps them so
        try:
            for number, batch in enumerate(self._report.clock.loading(self._progress)):
                self._learning_rate = float(self.scheduler.get_last_lr()[0])
                self._report.count_flops(batch, self.built.loss_of)
                self._batch = batch
                self._measured.enter_context(self._report.measured(batch.step))
                yield batch
                if number == 0:
                    gc.collect()
                    if freezes:  # else each full collection, at any step of any rank, looks at all that was imported
                        gc.freeze()
        finally:
            if freezes:
                gc.unfreeze()
        if self._average is not None:
            self._average.apply()

    def break_off(self, error: BaseException) -> None:
        """Leave the step in which an error has ended the run.

        Raises:
            torch.OutOfMemoryError: there was no memory left; its message is a page that explains it.
        """
        self._measured.__exit__(type(error), error, error.__traceback__)

    def clip_grad_norm_(self, max_norm: float) -> Tensor | None:
        """Clip the global batch's gradient (0: not). In the first step, check first that all weights have one.

        Returns:
            Its norm, or ``None`` where the backward has used it up.

        Raises:
            InputError: in the first step, the loss does not depend on some weights, which DDP does not take.
        """
        if not self.step and masters_of(self.optimizer) is None:  # which take all gradients away
            check_gradients(self.model)
        return clip_gradients(self.args, self.accelerator, self.model, self.optimizer, max_norm)

    def end_step(self, grad_norm: Tensor | None) -> dict[str, Any]:
        """Count a finished step; return the figures of the window that it ends, for ``accelerator.log``, or nothing.

        Raises:
            NotFinite: a step of the window is not finite.
        """
        self._measured.close()
        was_skipped = getattr(self.optimizer, "step_was_skipped", False)
        if self._average is not None and not was_skipped:
            self._average.update()
        self._report.count(self._batch, grad_norm)
        self.handle.check_first_step(self.accelerator.print)
        self.step = self._batch.step + 1
        self._saves_last = self.step == self.batches.steps.stop
        if self.step % self.args.logging_steps and not self._saves_last:
            return {}
        figures, words = self._report.end_window(self.step, learning_rate=self._learning_rate)
        self._progress.set_postfix_str(words)
        if self._progress.disable:
            self.accelerator.print(f"step {self.step}/{self.batches.steps.stop}: {words}", flush=True)
        return figures

    def _save_last_step(self) -> None:
        if self._saves_last:
            self._saves_last = False
            with self._report.clock.paused():
                self._checkpoints.save(self.step, self._report.state_dict())

    def evaluate_if_due(
        self, evaluate: Callable[[Iterator[Batch]], dict[str, Any]], dataset: Any, **options: Any
    ) -> None:
        """Log ``evaluate(batches)`` after ``--eval_steps`` or an epoch, and keep the best weights with ``--save_best``.

        It is due before the first step, too, with ``--eval_only``, and where a signal ended the resumed run's.

        Args:
            evaluate: figures of this rank's batches, with a ``loss``; others than numbers for ``results.json``.
            options: ``num_samples`` and ``collate_fn`` of ``evaluation_batches``.
        """
        self._save_last_step()
        if not self._knows_metric:
            self._check_metric_of_few(evaluate, dataset, **options)
        if not (self.step or self.args.eval_only):
            return
        if not self._report.evaluation_is_due(self.step, every=self.args.eval_steps):
            return
        with self._report.clock.paused(synchronize=True):
            self._report.losses.read()
            batches = self._evaluation_batches(dataset, **options)
            with nullcontext() if self._average is None else self._average.applied():
                figures = evaluate(self._checkpoints.until_signal(batches, self.step, self._state_in_evaluation))
                self._check_metric(figures)
                is_best = self._report.log_evaluation(self.step, figures, metric=self._metric)
                if is_best and self.args.save_best:
                    weights = weight_writers(self.accelerator, self.built.saved)
                    self._checkpoints.save_best(
                        self.step, chain(weights, [partial(write_figures, self._report.evaluated)])
                    )

    def _evaluation_batches(self, dataset: Any, **options: Any) -> Iterator[Batch]:
        layout = self.batches.layout
        return evaluation_batches(
            self.accelerator,
            dataset,
            self.built.planned.plan.micro_batch_size or layout.micro_batch_size,
            layout=type(layout),
            sequence_parallel=layout.sequence_parallel,
            num_workers=self.run.num_workers,
            **options,
        )

    def save_if_due(self) -> None:
        """Save a checkpoint if it is time, or a signal asks for it.

        Raises:
            StoppedBySignal: a rank received a signal; the checkpoint has been saved.
        """
        self._save_last_step()
        with self._report.clock.paused():
            self._checkpoints.after_step(self.step, self._report.state_dict)

    def finish(
        self,
        saved: nn.Module,
        *writers: Callable[[Path], Any],
        evaluated: dict[str, Any] | None = None,
        sample: Callable[[], str] | None = None,
        **figures: Any,
    ) -> dict[str, Any]:
        """Take the plan off, write ``final/`` and ``results.json``, and return the content of the latter.

        With ``--eval_only`` there is no ``final/``, as the model is as it was.

        Args:
            saved: the model whose weights are written.
            sample: makes a text of the model to print at the end.
            writers: write other files of ``final/``, such as a tokenizer's, into the folder that they are given.
            evaluated: more figures for the entry of the last evaluation.
            figures: entries of ``results.json``.

        Raises:
            InputError: the disk does not take them; ``--resume`` writes them later.
        """
        self.handle.remove()
        best = self._take_best()
        figures_of_classes = {k: v for k, v in self._report.evaluated.items() if isinstance(v, dict | list)}
        known = {
            "recipe": self.run.recipe,
            **figures,
            "num_trained_parameters": self.num_trained,
            "num_parameters": self.num_parameters,
            "plan": self.built.planned.plan.strategy,
            "eval": {**scalars_of(self._report.evaluated), **(evaluated or {})},
            **figures_of_classes,
        }
        if not self.args.eval_only:
            card = partial(
                write_model_card,
                model=saved,
                flags=self.run.flags,
                results=known,
                steps=self.step,
                batch=self.batches.layout.describe(),
                versions=describe_environment(self.accelerator)["versions"],
                mixed_precision=self.accelerator.mixed_precision,
            )
            save_final(self.accelerator, self.run.path, saved, *writers, card, best=best)
        self.results = {**known, **self._equivalence, **self._report.results()}
        write_results(self.accelerator, self.run.path, self.results, self._checkpoints)
        if sample is not None:
            self._print_sample(sample)
        return self.results

    def _print_sample(self, sample: Callable[[], str]) -> None:
        """Print a text that the first rank draws; in shards all ranks have to."""
        accelerator, deterministic = self.accelerator, self.args.full_determinism
        with callable_in_parts(self.model):
            if accelerator.is_main_process or self.run.groups is not None:
                with accelerator.autocast(), deterministic_kernels(deterministic):  # here a warning is enough
                    accelerator.print("sample:", sample())

    def _state_in_evaluation(self) -> dict[str, Any]:
        """Return the state for a checkpoint, which has the weights and not their average."""
        if self._average is not None:
            self._average.take_off()
        return self._report.state_dict()

    def _check_metric(self, figures: dict[str, Any], *, of_few: bool = False) -> None:
        """The metric of ``--save_best`` is a figure of the evaluations; print a line where it is not defined.

        Args:
            of_few: samples, before any step.

        Raises:
            InputError: it is none; the step has been saved.
        """
        metric, known = self._metric, scalars_of(figures)
        if metric not in known:
            if self.step and not of_few:
                self._checkpoints.save(self.step, self._state_in_evaluation())
            raise InputError(f"--save_best {metric}: must be one of {', '.join(sorted(known))}; go on with --resume")
        if not of_few and isnan(known[metric]) and isfinite(known["loss"]):
            words = f"the {metric} of the evaluation after step {self.step} is not defined, so it counts as not better"
            self.accelerator.print(f"note: {words}")

    def _check_metric_of_few(
        self, evaluate: Callable[[Iterator[Batch]], dict[str, Any]], dataset: Any, **options: Any
    ) -> None:
        """Evaluate a few samples, before the first step where the recipe asks so early, to know the figures."""
        self._knows_metric = True
        with self._report.clock.paused(synchronize=True):
            figures = evaluate(self._evaluation_batches(dataset, **{**options, "num_samples": FEW_SAMPLES}))
        self._check_metric(figures, of_few=True)

    def _take_best(self) -> Path | None:
        """Return the folder of the best weights, and report their figures, with ``--save_best``."""
        if self.args.eval_only or not self.args.save_best:
            return None
        found = on_main_process(self.accelerator, self._find_best)
        if found is None:
            self.accelerator.print("note: no evaluation was the best, so final/ has the last weights")
            return None
        path, self._report.evaluated = found
        self.accelerator.print(f"final/ has the weights of checkpoints/{path.name}")
        return path

    def _find_best(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the best weights and their figures; an earlier version wrote the weights alone."""
        path, best = self._checkpoints.find_best(), self._report.best_figure
        if path is None or best is None:
            return None
        figures = path / FIGURES
        known = {self._metric: best}
        return path, json.loads(figures.read_text(encoding="utf-8")) if figures.is_file() else known

    def _make_average(self) -> WeightAverage | None:
        """Make the average of ``--ema_decay``."""
        decay = self.args.ema_decay
        if decay is None or self.args.eval_only:
            return None
        return WeightAverage(self.accelerator.unwrap_model(self.model), decay, self.optimizer)

    def _lines(self, notices: tuple[str | None, ...]) -> Iterator[str | None]:
        """Yield what is printed before the first step."""
        layout, model = self.batches.layout, self.built.bare
        if self.num_trained < self.num_parameters:
            yield f"{self.num_trained:,} of {self.num_parameters:,} parameters train"
            yield without_adapters(model)
        yield layout.describe()
        yield layout.describe_sums(model)
        yield self.built.planned.plan.describe()
        yield from (*notices, slices_of(model).line, fused_in(model))
        yield self.args.notice(model, layout)

    def _make_checkpoints(self, data: Fingerprint) -> Checkpoints:
        parts = self.model, self.optimizer, self.scheduler
        train_state = TrainState(self.accelerator, *parts, average=self._average)
        if not self.args.eval_only:
            on_main_process(self.accelerator, lambda: check_room(self.run.path, train_state, self.run.flags))
        return Checkpoints(
            self.accelerator,
            self.run.path / CHECKPOINTS,
            train_state,
            order=self.batches.order,
            layout=self.batches.layout,
            every_steps=self.args.save_every_steps,
            every_minutes=self.args.save_every_minutes,
            signals=self.run.signals,
            data=data,
            lock=self.run.lock,
        )

    def _go_on(self, resumed: Resumed) -> None:
        """Restore the counts; where the best weights are lost, forget their figure, so that later ones are saved."""
        self.step = resumed.step
        self._report.load_state_dict(resumed.state)
        if best_metric(self.run.earlier or {}) != self._metric:
            self._report.best_figure = None
        best = self._report.best_figure
        if (
            best is None
            or not self.args.save_best
            or on_main_process(self.accelerator, lambda: self._checkpoints.find_best() is not None)
        ):
            return
        self.accelerator.print(
            f"note: the weights of the best evaluation so far ({self._metric} {best:.4f}) are not "
            "in checkpoints/: --save_best begins anew"
        )
        self._report.best_figure = None
