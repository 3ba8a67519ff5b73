"""A training whose model follows a plan: made on its first batch, compared with a step, taken off at the end.

A trainer's callback calls ``before_forward`` ahead of every training forward, ``after_step`` after an optimizer step,
and ``remove`` at the end. Why the plan is made there: NOTE [ decisions ] of the package.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from memsave_recipes.activations import PlanHandle, apply_plan, block_names, find_stacks
from memsave_recipes.errors import InputError
from memsave_recipes.integrations.attributes import preserve_attributes
from memsave_recipes.integrations.refusals import check_model
from memsave_recipes.integrations.step_peak import StepPeak
from memsave_recipes.planner.budget import StaticMemory
from memsave_recipes.planner.make_plan import Progress, names_of, plan_step, static_of
from memsave_recipes.planner.optimizer_state import torch_optimizer
from memsave_recipes.planner.ranks import Ranks
from memsave_recipes.plans import BUDGET_WORDS, Plan
from memsave_recipes.profiling.block_costs import Workload
from memsave_recipes.profiling.preserve_state import device_of
from memsave_recipes.text import GIB

PREFIX = "memsave: "
PROGRESS_BAR_DELAY_S = 5


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The plan that a script asks for.

    Raises:
        InputError: a strategy for a budget without ``budget_gib``, or ``budget_gib`` with another one.
    """

    budget_gib: float | None = None
    strategy: str = "budget:bitwise"
    blocks: Sequence[str] | type[nn.Module] | None = None

    def __post_init__(self) -> None:
        if self.is_budget and self.budget_gib is None:
            raise InputError(f"strategy {self.strategy}: needs budget_gib, the GiB of memory that a step may take")
        if not self.is_budget and self.budget_gib is not None:
            raise InputError(f"budget_gib {self.budget_gib:g}: strategy {self.strategy} takes none; use budget:bitwise")
        if self.budget_gib is not None and not self.budget_gib > 0:
            raise InputError(f"budget_gib {self.budget_gib:g}: it must be above 0")

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
        """Of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors)


@dataclass(kw_only=True, eq=False, repr=False)
class PlannedTraining:
    """The plan of a training, in effect until ``remove()`` or the end of a ``with`` block; see the module.

    Args:
        model: with the blocks, on its device, inside whatever wraps it.
        optimizer: of the training, or a wrapper of it.
        gradients_resident: whether gradients are there when a forward begins: under accumulation, or where they are
            cleared after the forward.
        others: modules besides the model that are on the device all the time: a reference model.
        owners: objects whose attributes a forward may change.
        plans_again: whether a larger batch may be planned for, by its own forward.
        plan: the plan, from the first batch on.

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
    _on_remove: list[Callable[[], Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_model(self.model)
        self.optimizer = torch_optimizer(self.optimizer)
        self.device = device_of(self.model)
        self.peak = StepPeak(self.model, self.optimizer, self.device)

    def before_forward(self, micro_batch: MicroBatch) -> None:
        """Plan where no plan is made yet, or none for a batch so large; open the window of a measured step."""
        size = micro_batch.num_elements
        if self.plan is None:
            self.make_plan(micro_batch)
        elif size > self._largest and self.settings.is_budget:
            self._grow(micro_batch)
        self._largest = max(self._largest, size)
        self.peak.before_forward(lambda: self._resident(micro_batch))

    def after_step(self) -> None:
        """Once the optimizer has stepped: compare the peak with the prediction."""
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
        self._handle = apply_plan(self.model, self.plan)
        self._largest = micro_batch.num_elements

    def on_remove(self, action: Callable[[], Any]) -> None:
        """Call ``action`` when the plan is removed."""
        self._on_remove.append(action)

    def remove(self) -> None:
        """Set the model back; a second call does nothing."""
        self.peak.close()
        while self._on_remove:
            self._on_remove.pop()()
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
            tqdm.write(f"{PREFIX}{text}")

    def _grow(self, micro_batch: MicroBatch) -> None:
        """NOTE [ decisions ] 3."""
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
        """With a prediction, if there can be one: a named strategy does not need it."""
        try:
            return self._made(micro_batch, self.settings.strategy)
        except (InputError, torch.OutOfMemoryError):
            if self.settings.is_budget:
                raise
        return self._made(micro_batch, self.settings.strategy, predict=False)

    def _made(self, micro_batch: MicroBatch, strategy: str, *, predict: bool = True) -> Plan:
        disable = None if self.ranks.is_first else True  # None: where stderr is no terminal
        with (
            preserve_attributes([*self.owners, *self.model.modules()]),
            tqdm(desc="measuring blocks", unit="run", delay=PROGRESS_BAR_DELAY_S, leave=False, disable=disable) as bar,
        ):
            return plan_step(
                self._workload(micro_batch),
                strategy,
                budget_gib=self.settings.budget_gib,
                static=self._static(),
                named=bool(self.settings.blocks),
                predict=predict,
                progress=Progress(total=bar.reset, step=bar.update),
                ranks=self.ranks,
            )

    def _static(self) -> StaticMemory:
        """Under DDP the gradients live in its buckets; ``static_memory_of`` has the same rule for recipes."""
        trained_bytes = sum(parameter.nbytes for parameter in self.model.parameters() if parameter.requires_grad)
        buckets_bytes = trained_bytes if self.ranks.number > 1 else 0
        return replace(
            static_of(self.optimizer),
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
        )

    def _resident(self, micro_batch: MicroBatch) -> list[Tensor]:
        """The batch, and the tensors of the other modules: on the device all the time, and not of the model."""
        others = [tensor for other in self.others for tensor in (*other.parameters(), *other.buffers())]
        return [*micro_batch.tensors, *others]


def tensors_in(batch: Any) -> list[Tensor]:
    """The tensors of a batch, wherever in it."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
