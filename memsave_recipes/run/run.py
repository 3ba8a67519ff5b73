"""A run of a recipe: folder, flags, checkpoints, trackers and figures. Accelerate's calls are the recipe's own.

1. ``Run.open`` checks flags and folder. ``join`` locks the folder for the ranks of an ``Accelerator``. Neither writes
   or deletes anything.
2. ``build`` makes the model of a task on its device. ``choose_plan`` finds its activation plan, once Accelerate has
   prepared it.
3. ``begin`` proves the plan with ``--verify``, restores the newest checkpoint or clears the folder, and makes a
   ``TrainingRun``. Its ``finish`` writes ``final/`` and ``results.json``; the end of ``open`` prints the summary,
   closes the trackers.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from memsave_recipes.core.activations import PlanHandle
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.task import Task
from memsave_recipes.core.plans import Plan
from memsave_recipes.core.sharding.groups import NONE
from memsave_recipes.data.fingerprint import Fingerprint
from memsave_recipes.models.flags import rules_of
from memsave_recipes.run.building import Built
from memsave_recipes.run.failures import describe_early_end
from memsave_recipes.run.folder import (
    CHECKPOINTS,
    CONFIG,
    check_not_done,
    check_run_folder,
    print_lines,
)
from memsave_recipes.run.joined import JoinedRun
from memsave_recipes.run.trackers import alert, finish_trackers, resolve_trackers
from memsave_recipes.run.training_run import TrainingRun
from memsave_recipes.tools.compare import compare, read_run
from memsave_recipes.tools.pages.comparison import show
from memsave_recipes.training.arguments import PRECISIONS, RecipeArguments
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.checkpoints import locked_run_folder
from memsave_recipes.training.checkpoints.resume import (
    check_same_environment,
    check_same_flags,
    read_earlier,
    with_previous_choices,
)
from memsave_recipes.training.launch.distributed import (
    main_process_first,
    missing_ranks_end_the_run,
    require_same,
)
from memsave_recipes.training.launch.launched_shard import launched_shard
from memsave_recipes.training.launch.processes import StoppedBySignal, StopSignals, is_restarted
from memsave_recipes.training.launch.start import (
    LIMIT_S,
    Accelerator,
    chosen_dtype,
    describe_no_gpu,
    deterministic_kernels,
    installed_versions,
    matmul_precision,
    use_expandable_segments,
)
from memsave_recipes.training.optimizers import NotFinite
from memsave_recipes.training.parsing import flag_values


class Run:
    """A run. All methods are for all ranks.

    Attributes:
        launch: what the run asks of its ``Accelerator``.
        training: once begun.
    """

    accelerator: Accelerator
    training: TrainingRun | None = None

    def __init__(self, args: Any, recipe: str, path: Path, earlier: dict[str, Any] | None) -> None:
        self.args, self.recipe, self.path, self.earlier = args, recipe, path, earlier
        self.notices: list[str] = []
        precision = PRECISIONS.get(args.dtype)  # else that of the launch
        log_with = resolve_trackers(args.report_to, path)
        self.launch = {"mixed_precision": precision, "log_with": log_with}
        self._lock, self._signals = ExitStack(), ExitStack()

    @classmethod
    @contextmanager
    def open(cls, args: RecipeArguments, *, recipe: str) -> Iterator["Run"]:
        """Check flags and folder; keep the folder and the signals that ask to stop until the block ends.

        Ranks that the launcher has started in place of lost ones resume.

        Args:
            recipe: its name, such as ``image_classification``.

        Raises:
            RunIsDone: the one to resume is done.
            InputError: the folder holds another run, cannot be written or cannot be resumed.
        """
        args = _with_resume(args)
        path = check_run_folder(args.output_dir, overwrite=args.overwrite, resume=args.resume)
        with ExitStack() as stack:
            args = _with_shard(args, stack.enter_context(launched_shard()))
            if args.resume:
                check_not_done(path, args)
            earlier = read_earlier(path / CONFIG, path / CHECKPOINTS) if args.resume else None
            notices = list(filter(None, [describe_no_gpu()]))
            if earlier:
                args = with_previous_choices(args, earlier)
                notices += check_same_flags(earlier, flag_values((args,)), rules_of(type(args)))
            stack.enter_context(deterministic_kernels(args.full_determinism, later=args.verify != "off"))
            stack.enter_context(matmul_precision(args.matmul_precision))
            use_expandable_segments()
            if (dtype := chosen_dtype(args.dtype)) != args.dtype:
                args = replace(args, dtype=dtype)
                notices.append(f"--dtype auto: {dtype}" + (", with fp16" if dtype == "float16" else ""))
            run = cls(args, recipe, path, earlier)
            run.notices = notices
            stack.enter_context(run._lock)
            try:
                with run._signals, run._explained():
                    yield run
                    run._close()
            except (Exception, StoppedBySignal) as error:
                run._tell_of(error)
                raise

    def join(self, accelerator: Accelerator) -> Any:
        """Take the folder for the ranks of ``accelerator``, and seed; return the flags of this life of the run.

        Raises:
            InputError: the folder is in use, ranks have other versions, or the launch is not the one of the flags.
        """
        self.accelerator, args, earlier = accelerator, self.args, self.earlier
        require_same(accelerator, installed_versions(), "install the same versions on every machine")
        self.notices += check_same_environment(earlier["environment"], accelerator) if earlier else []
        lock = self._lock.enter_context(locked_run_folder(accelerator, self.path))
        self._signals.enter_context(missing_ranks_end_the_run(LIMIT_S))
        signals = self._signals.enter_context(StopSignals(LIMIT_S))
        print_lines(accelerator, *self.notices)
        set_seed(args.seed)
        self._joined = JoinedRun(args, self.recipe, accelerator, self.path, earlier=earlier, signals=signals, lock=lock)
        return self._joined.args

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on the main process first, so that the others find its results in caches."""
        return main_process_first(self.accelerator)

    def global_batches(self, dataset: Any, **options: Any) -> GlobalBatches:
        """Make the global batches of the samples to train on, one for each optimizer step.

        Args:
            options: ``count_valid``, ``weights`` and ``collate_fn`` of ``GlobalBatches``.
        """
        return self._joined.global_batches(dataset, **options)

    def build(
        self, task: Task, batches: GlobalBatches, settle: Callable[[Any], Iterable[str | None] | None] | None = None
    ) -> tuple[nn.Module, nn.Module]:
        """Build the model of a task on its device, with its weights, or with this rank's parts of them.

        Args:
            settle: sets up and checks the model on its device, under autocast; returns lines for people.

        Returns:
            The module with the blocks, and the module around it that is trained, such as one with the loss; often the
            same.

        Raises:
            InputError: the model does not take ``--bitwise_topology``, ``--batchnorm global`` or ``--shard``, or no
                plan fits.
        """
        self._built = built = Built(self._joined, task, batches, settle)
        return built.bare, built.trained

    @property
    def saved(self) -> nn.Module:
        """The module whose weights are saved: the built one, or peft's around it."""
        saved: nn.Module = self._built.saved
        return saved

    def choose_plan(self, model: nn.Module, optimizer: Optimizer) -> Plan:
        """Return the plan that the flags name, or the fastest that fits the memory; ``apply_plan`` applies it.

        Args:
            model, optimizer: as Accelerate has prepared them.

        Raises:
            InputError: no such strategy, or nothing fits.
        """
        return self._built.choose_plan(model, optimizer)

    def begin(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        handle: PlanHandle,
        *,
        data: Fingerprint,
        work: str,
        notices: tuple[str | None, ...] = (),
    ) -> TrainingRun:
        """Prove the plan, restore the newest checkpoint with ``--resume``, else clear the folder; start the trackers.

        Args:
            scheduler: as torch has it: Accelerate's would move it once for every rank.
            handle: of the plan.
            data: the digest of the data.
            work: a name such as ``vgg16-gbs64-224px``; runs of the same work are compared with one another.
            notices: lines to print, about the data or the model.

        Raises:
            InputError: no checkpoint fits, the disk has no room, or the folder cannot be written.
            VerificationFailed: ``--verify`` found that the plan changes the step.
        """
        parts = model, optimizer, scheduler, handle
        self.training = TrainingRun(self._built, *parts, data=data, work=work, notices=notices)
        return self.training

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Let the training explain the error that ends it, such as a step that ran out of memory."""
        try:
            yield
        except (Exception, StoppedBySignal) as error:
            if self.training is not None:
                self.training.break_off(error)
            raise

    def _tell_of(self, error: BaseException) -> None:
        """Alert people of the error that has ended the run, and close trackers where all ranks know of it."""
        if not hasattr(self, "accelerator"):
            return
        alert(self.accelerator, *describe_early_end(error))
        if isinstance(error, StoppedBySignal | NotFinite):
            finish_trackers(self.accelerator, {})

    def _close(self) -> None:
        """Print the summary and close the trackers of a run that is done."""
        results = self.training and self.training.results
        if not results:
            return
        if self.args.eval_only:
            self.accelerator.print(", ".join(f"{name} {value:.4f}" for name, value in results["eval"].items()))
        elif self.accelerator.is_main_process:
            show(compare([read_run(self.path)]))
        finish_trackers(self.accelerator, results)


def _with_resume(args: Any) -> Any:
    """Return the flags of this life: restarted ranks resume, also where the first ones began by overwriting."""
    return replace(args, resume=True, overwrite=False) if is_restarted() and not args.eval_only else args


def _with_shard(args: Any, launched: str | None) -> Any:
    """Return the flags with the ``--shard`` of the launch file."""
    if launched is not None and args.shard not in (None, launched):
        raise InputError(f"--shard {args.shard}: the launch file says {launched}: leave one of them out")
    return replace(args, shard=args.shard or launched or NONE)
