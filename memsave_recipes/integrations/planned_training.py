"""Training under a plan: made on the first batch, compared with a step, removed at the end.

A trainer's callback calls ``before_forward`` ahead of every training forward, ``after_step`` after an optimizer step,
and ``remove`` at the end. ``prepare``, for users' loops, makes the plan at once; hooks of model and optimizer do the
rest.

NOTE [ the peak of a step ]: on a device it is the allocator's high-water mark of every step. A CPU has none, so there
the first step with the optimizer's state is recorded under torch's profiler. The profiler reports no release of memory
that it has not seen allocated. In Lightning a step begins with the gradients of the step before, so that step is
recorded too.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from threading import current_thread
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers import PreTrainedModel

from memsave_recipes.core.activations import PlanHandle, apply_plan, block_names, find_stacks
from memsave_recipes.core.activations.apply import refuse_planned
from memsave_recipes.core.activations.micro_batches import tensors_in
from memsave_recipes.core.costs.block_costs import Workload
from memsave_recipes.core.costs.breakdown import PeakOfStep, break_down_peak, storages_of
from memsave_recipes.core.costs.preserve_state import device_of, preserve_attributes
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.host.step import LEAVING_BYTES, masters_of
from memsave_recipes.core.planner.make_plan import (
    call,
    check_budget,
    loss_of,
    make_plan,
    names_of,
    plan_step,
    refuse_compiled,
)
from memsave_recipes.core.planner.trial_step import Ranks
from memsave_recipes.core.plans import BUDGET_WORDS, Plan
from memsave_recipes.core.plans.chain import StaticMemory, allocated_bytes
from memsave_recipes.core.plans.prediction import Prediction
from memsave_recipes.core.progress import ProgressBar
from memsave_recipes.core.step.memory import memory_of_optimizer, torch_optimizer
from memsave_recipes.core.text import GIB, format_bytes
from memsave_recipes.models.fused_ops import not_fused_in


class StepPeak:
    """Measures a step of a training; ``before_forward`` and ``after_step`` are called in all of them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.num_steps = 0
        self._in_step = False
        self._is_compared = self._is_told = False
        self._seen_gradients = False
        self._recording: PeakOfStep | None = None
        self._resident_bytes = 0
        self._open = ExitStack()

    def before_forward(self, resident: Callable[[], Sequence[Tensor]]) -> None:
        """Open the window of a step, where this is its first forward.

        Args:
            resident: tensors on the device that are neither of the model nor of the optimizer.
        """
        if not self._in_step and self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self.device)
        elif not self._in_step and not self._is_compared and self._has_state():
            self._resident_bytes = sum(storages_of(resident()).values())
            self._seen_gradients |= all(parameter.grad is None for parameter in self.model.parameters())
            self._recording = self._open.enter_context(break_down_peak(self.model, self.optimizer, self.device))
        self._in_step = True

    def after_step(self, prediction: Prediction | None, budget_bytes: int | None) -> str | None:
        """Return a line on the step that has ended, if it is the first with state, or took more than it may."""
        has_state = self._has_state()
        self._open.close()
        self._in_step = False
        self.num_steps += 1
        peak_bytes = self._peak_bytes()
        if peak_bytes is None or prediction is None or not has_state:
            return None
        limit_bytes = budget_bytes or prediction.peak_bytes
        was_told, self._is_told = self._is_told, self._is_told or peak_bytes > limit_bytes
        if not self._is_compared:
            self._is_compared = True
            return _comparison(self.num_steps, peak_bytes, prediction.peak_bytes, budget_bytes)
        if was_told or not self._is_told:
            return None
        return f"step {self.num_steps} took {format_bytes(peak_bytes)}, above {format_bytes(limit_bytes)}"

    def close(self) -> None:
        """Forget a window that is open; the next forward opens another."""
        self._open.close()
        self._in_step, self._recording = False, None

    def _has_state(self) -> bool:
        return bool(self.num_steps or self.optimizer.state)

    def _peak_bytes(self) -> int | None:
        """Return the peak of the window; on a CPU of recorded tensors and those before them; ``None`` without one."""
        if self.device.type != "cpu":
            return torch.accelerator.max_memory_allocated(self.device)
        recording, self._recording = self._recording, None
        if recording is None or recording.breakdown is None:
            return None
        seen_gradients, self._seen_gradients = self._seen_gradients, True
        return recording.breakdown.total_bytes + self._resident_bytes if seen_gradients else None


def _comparison(step: int, peak_bytes: int, predicted_bytes: int, budget_bytes: int | None) -> str:
    error = 100 * (predicted_bytes - peak_bytes) / peak_bytes
    predicted = f"predicted {format_bytes(predicted_bytes)} ({error:+.1f} %)"
    line = f"peak of step {step}: {format_bytes(peak_bytes)}, {predicted}"
    return line if budget_bytes is None else f"{line}, budget {format_bytes(budget_bytes)}"


SHARDED = ("FullyShardedDataParallel", "DeepSpeedEngine")
REASON = "a plan decides which activations are recomputed"


def check_model(model: nn.Module) -> None:
    """Raise ``InputError`` for a model that checkpoints, shards or compiles by itself."""
    kinds = {base.__name__ for base in type(model).__mro__}
    if sharded := kinds.intersection(SHARDED):
        raise InputError(f"model: {sharded.pop()} shards it, which no plan is made for: train with DDP or one process")
    if "OptimizedModule" in kinds:
        raise InputError("model: torch.compile has wrapped it: pass the model itself, with compiled=True")
    refuse_compiled(model)
    if "DataParallel" in kinds:
        raise InputError("model: DataParallel runs copies of it: launch one process for each GPU, with DDP")
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            kind = "activation" if hasattr(PreTrainedModel, "activation_checkpointing_disable") else "gradient"
            raise InputError(
                f"{kind}_checkpointing: {name or type(model).__name__} is checkpointed already, and {REASON}: call "
                f"model.{kind}_checkpointing_disable()"
            )
        if type(module).__name__ == "CheckpointWrapper":
            raise InputError(f"model: {name} is a CheckpointWrapper, and {REASON}: leave the wrapper out")
    refuse_planned(model)


def refuse_several(callbacks: Sequence[Any]) -> None:
    """Raise ``InputError`` for two callbacks of this package in a trainer."""
    ours = [type(one).__name__ for one in callbacks if isinstance(one, PlanningCallback)]
    if len(ours) > 1:
        raise InputError(f"callbacks: {' and '.join(ours)}, and a model follows one plan: leave one of them out")


PREFIX = "memsave: "
_UNDER_WAY: "WeakSet[PlannedTraining]" = WeakSet()
"""The trainings whose plan has not been removed: torch's profiler is one for the whole process."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The plan that a script asks for.

    Raises:
        InputError: a strategy for a budget without ``budget_gib``, or ``budget_gib`` with another strategy.
    """

    budget_gib: float | None = None
    strategy: str = "budget:bitwise"
    blocks: Sequence[str] | type[nn.Module] | None = None
    compiled: bool = False

    def __post_init__(self) -> None:
        check_budget(self.budget_gib)
        if self.is_budget and self.budget_gib is None:
            raise InputError(f"strategy {self.strategy}: needs budget_gib, the GiB of memory that a step may take")
        if not self.is_budget and self.budget_gib is not None:
            raise InputError(f"budget_gib {self.budget_gib:g}: strategy {self.strategy} takes none; use budget:bitwise")

    @property
    def is_budget(self) -> bool:
        """Whether the plan is the fastest for a budget."""
        return self.strategy in BUDGET_WORDS


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A forward that is about to run.

    Args:
        forward: the trainer's, to the loss, without collectives of the gradients.
        tensors: its input, on the device.
    """

    forward: Callable[[], Tensor]
    tensors: Sequence[Tensor]

    @property
    def num_elements(self) -> int:
        """The sum over all tensors."""
        return sum(tensor.numel() for tensor in self.tensors)


@dataclass(kw_only=True, eq=False, repr=False)
class PlannedTraining:
    """The plan of a training, in effect until ``remove()`` or the end of a ``with`` block.

    Args:
        model: with the blocks, on its device, inside its wrappers.
        optimizer: of the training, or a wrapper of it.
        gradients_resident: whether gradients are there when a forward begins: under accumulation, or where they are
            cleared after the forward.
        others: modules besides the model that are on the device all the time: a reference model.
        owners: objects whose attributes a forward may change.
        plans_again: whether a larger batch may be planned for, by its own forward.
        plan: set from the first batch on.
        on_remove: what else ends when the plan is removed.

    Raises:
        InputError: something else checkpoints, shards or compiles the model.
    """

    settings: PlanSettings
    model: nn.Module
    optimizer: Optimizer
    gradients_resident: bool
    others: Sequence[nn.Module] = ()
    owners: Sequence[Any] = ()
    plans_again: bool = True
    plan: Plan | None = None
    ranks: Ranks = field(default_factory=Ranks.of_world)
    _handle: PlanHandle | None = None
    _largest: int = 0
    _grown: bool = False
    on_remove: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        check_model(self.model)
        self._in_shards = isinstance(self.model, FSDPModule)
        if self._in_shards and self.settings.is_budget:
            raise InputError(
                f"strategy {self.settings.strategy}: FSDP2 shards the model, and a budget is measured on a whole one: "
                "pass strategy='full' or another that needs no budget, or train with DDP"
            )
        self._thread = current_thread()
        for other in _UNDER_WAY:
            if other._thread is not self._thread and other._thread.is_alive():
                raise InputError(
                    f"model: a training with a plan runs in thread {other._thread.name} already, and torch has one "
                    "profiler: train in processes of their own"
                )
        _UNDER_WAY.add(self)
        self.optimizer = torch_optimizer(self.optimizer)
        self.device = device_of(self.model)
        self.peak = StepPeak(self.model, self.optimizer, self.device)

    def before_forward(self, micro_batch: MicroBatch) -> None:
        """Plan if there is no plan yet, or the batch is larger than before; open the window of a measured step."""
        size = micro_batch.num_elements
        if self.plan is None:
            self.make_plan(micro_batch)
        elif size > self._largest and self.settings.is_budget:
            self._grow(micro_batch)
        self._largest = max(self._largest, size)
        self.peak.before_forward(lambda: self._resident(micro_batch))

    def after_step(self) -> None:
        """Compare the peak with the prediction, after the optimizer has stepped."""
        prediction = self.plan.prediction if self.plan else None
        budget = self.settings.budget_gib
        if line := self.peak.after_step(prediction, None if budget is None else int(budget * GIB)):
            self.say(line)
        if self._handle is not None:
            self._handle.check_first_step(self.say)

    def make_plan(self, micro_batch: MicroBatch) -> None:
        """Plan, print and apply."""
        self.plan = self._predicted(micro_batch)
        self.say(str(self.plan))
        if line := not_fused_in(self.model):
            self.say(line)
        self._handle = apply_plan(self.model, self.plan)
        self._largest = micro_batch.num_elements

    def remove(self) -> None:
        """Set the model back; a second call does nothing."""
        _UNDER_WAY.discard(self)
        self.peak.close()
        self.on_remove.close()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __enter__(self) -> "PlannedTraining":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def say(self, text: str) -> None:
        """Print it on the first rank, above the trainer's progress bar."""
        if self.ranks.is_first:
            ProgressBar.write(f"{PREFIX}{text}")

    def _grow(self, micro_batch: MicroBatch) -> None:
        """Plan for a larger batch, or say that it was not planned for: NOTE [ decisions ] 3."""
        larger = f"a batch of {micro_batch.num_elements:,} elements, {self._largest:,} were planned for"
        if self.plans_again and self.ranks.number == 1:
            self._plan_again(micro_batch, larger)
        elif not self._grown:
            self.say(f"{larger}: its step may take more than predicted")
        self._grown = True

    def _plan_again(self, micro_batch: MicroBatch, larger: str) -> None:
        self.peak.close()
        if self._handle is not None:
            self._handle.remove()
        try:
            self.plan = self._made(micro_batch, self.settings.strategy)
            self.say(f"{larger}; planned again, {self.plan.describe()}")
        except (InputError, torch.OutOfMemoryError) as refusal:
            self.plan = self._made(micro_batch, "full", predict=False)
            self.say(f"{larger}; {refusal}: goes on with {self.plan.describe()}")
        self._handle = apply_plan(self.model, self.plan)

    def _predicted(self, micro_batch: MicroBatch) -> Plan:
        """Plan with a prediction, if there can be one: a named strategy does not need it.

        In shards there is none, as a forward without its backward would leave weights gathered.
        """
        if self._in_shards:
            settings = self.settings
            return make_plan(self.model, strategy=settings.strategy, blocks=settings.blocks, compiled=settings.compiled)
        try:
            return self._made(micro_batch, self.settings.strategy)
        except (InputError, torch.OutOfMemoryError):
            if self.settings.is_budget:
                raise
        return self._made(micro_batch, self.settings.strategy, predict=False)

    def _made(self, micro_batch: MicroBatch, strategy: str, *, predict: bool = True) -> Plan:
        with (
            preserve_attributes([*self.owners, *self.model.modules()]),
            ProgressBar(shown=self.ranks.is_first, desc="measuring blocks", unit="run") as bar,
        ):
            return plan_step(
                self._workload(micro_batch),
                strategy,
                budget_gib=self.settings.budget_gib,
                static=self._static(),
                named=bool(self.settings.blocks),
                predict=predict,
                compiled=self.settings.compiled,
                progress=bar,
                ranks=self.ranks,
            )

    def _static(self) -> StaticMemory:
        """Return the static memory; under DDP gradients live in its buckets, as in ``static_memory_of``."""
        trained = (parameter.nbytes for parameter in self.model.parameters() if parameter.requires_grad)
        trained_bytes = allocated_bytes(trained, self.device)
        if masters_of(self.optimizer) is not None and self.ranks.number == 1:
            sums = LEAVING_BYTES if self.gradients_resident else 0
            return StaticMemory(sums_bytes=sums, gradients_stay=False, leaving_bytes=LEAVING_BYTES - sums)
        buckets_bytes = trained_bytes if self.ranks.number > 1 else 0
        return replace(
            memory_of_optimizer(self.optimizer),
            buckets_bytes=buckets_bytes,
            gradients_resident=self.gradients_resident,
            gradients_stay=self.gradients_resident or not buckets_bytes,
        )

    def _workload(self, micro_batch: MicroBatch) -> Workload:
        names = names_of(self.model, self.settings.blocks)
        return Workload(
            model=self.model,
            forward=micro_batch.forward,
            batch=self._resident(micro_batch),
            device=self.device,
            stacks=[names] if names else block_names(find_stacks(self.model)),
            gradients_stay=self._static().gradients_stay,
        )

    def _resident(self, micro_batch: MicroBatch) -> list[Tensor]:
        """Return the batch and the tensors of the other modules, which are on the device all the time."""
        others = [tensor for other in self.others for tensor in (*other.parameters(), *other.buffers())]
        return [*micro_batch.tensors, *others]


class PlanningCallback:
    """The settings of a trainer's callback, and the training that follows its plan."""

    def __init__(
        self,
        budget_gib: float | None = None,
        *,
        strategy: str = "budget:bitwise",
        blocks: Sequence[str] | type[nn.Module] | None = None,
        compiled: bool = False,
    ) -> None:
        self.settings = PlanSettings(budget_gib=budget_gib, strategy=strategy, blocks=blocks, compiled=compiled)
        self.training: PlannedTraining | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan of the training, from its first batch on."""
        return self.training.plan if self.training else None

    def remove(self) -> None:
        """Set the trainer and its model back; a second call does nothing.

        The trainer calls it at the end of training and where a step fails. A script that goes on with the model calls
        it after an exception of the data loader or another callback.
        """
        if self.training is not None:
            self.training.remove()


def prepare(
    model: nn.Module,
    batch: Any,
    optimizer: Optimizer,
    *,
    budget_gib: float | None = None,
    strategy: str = "budget:bitwise",
    loss_fn: Callable[[Any], Tensor] | None = None,
    accumulation_steps: int = 1,
    blocks: Sequence[str] | type[nn.Module] | None = None,
    compiled: bool = False,
) -> PlannedTraining:
    """Plan a training on ``batch`` and put the plan into effect, until ``remove()`` or the end of a ``with`` block.

    The plan and its prediction are printed, and in the second step the measured peak. The model, its gradients and the
    random state stay as they were. On several ranks all call it.

    Args:
        model: on its device, as ``Accelerator.prepare``, ``Fabric.setup`` or DDP returned it, or not wrapped.
        batch: one micro-batch on that device, as for ``make_plan``; the longest that there will be.
        optimizer: of the training, or a wrapper of it: its state counts.
        budget_gib: device memory of a training step, in GiB, for ``budget`` and ``budget:bitwise``.
        strategy, loss_fn, blocks, compiled: as of ``make_plan``.
        accumulation_steps: micro-batches of an optimizer step.

    Returns:
        A context manager with ``plan`` and ``remove()``.

    Raises:
        InputError: as ``make_plan``, for a model that checkpoints or compiles by itself, and for one in shards, unless
            they are FSDP2's and the strategy needs no budget.
    """
    unwrapped, precision = _unwrapped(model), _precision_of(model)

    def forward() -> Tensor:
        with precision():
            return (loss_fn or loss_of)(call(unwrapped, batch))

    training = PlannedTraining(
        settings=PlanSettings(budget_gib=budget_gib, strategy=strategy, blocks=blocks, compiled=compiled),
        model=unwrapped,
        optimizer=optimizer,
        gradients_resident=accumulation_steps > 1,
        plans_again=False,
    )
    training.make_plan(MicroBatch(forward=forward, tensors=tensors_in(batch)))
    stepped: list[Optimizer] = []

    def begin_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
        if stepped:
            stepped.clear()
            training.after_step()
        if module.training and torch.is_grad_enabled():
            training.before_forward(MicroBatch(forward=forward, tensors=tensors_in((args, kwargs))))

    training.on_remove.enter_context(unwrapped.register_forward_pre_hook(begin_forward, with_kwargs=True))
    training.on_remove.enter_context(training.optimizer.register_step_post_hook(lambda one, *_: stepped.append(one)))
    return training


def _unwrapped(model: Any) -> nn.Module:
    """Return the module inside the wrappers of DDP and Fabric."""
    wrapped = isinstance(model, DistributedDataParallel) or _is_fabric(model)
    unwrapped: nn.Module = _unwrapped(model.module) if wrapped else model
    return unwrapped


def _precision_of(model: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Return the context of Fabric's precision, which its wrapper enters; Accelerate's is inside the model."""
    if not _is_fabric(model):
        return nullcontext
    context: Callable[[], AbstractContextManager[Any]] = model._strategy.precision.forward_context
    return context


def _is_fabric(model: Any) -> bool:
    return type(model).__name__ == "_FabricModule"
