"""What ``--bitwise_topology`` and ``--batchnorm`` ask of a step, of a model and of a plan."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Plan
from memsave_recipes.core.step.batch_layout import BatchLayout, SampleOrder
from memsave_recipes.core.step.settings import AUTO, StepSettings
from memsave_recipes.training.exact.batch_layouts import IndexedLayout, LockstepLayout
from memsave_recipes.training.exact.global_batchnorm import global_batchnorm


class ExactSettings(StepSettings):
    """``StepSettings`` with the flags of this package; a dataclass that has these fields inherits the rest.

    Args:
        bitwise_topology: the same bits on any number of ranks.
        batchnorm: statistics of BatchNorm: ``local``, ``sync`` (torch's ``SyncBatchNorm``) or ``global``.
    """

    bitwise_topology: bool
    batchnorm: str

    @property
    def joins_micro_batches(self) -> bool:
        """Whether BatchNorm joins several micro-batches of a rank, so that the feature maps of all of them live."""
        return self.batchnorm == "global" and isinstance(self.micro_batch_size, int)

    @property
    def keeps_micro_batch(self) -> bool:
        """As of ``StepSettings``: no search changes what a BatchNorm joins."""
        return self.batchnorm == "global"

    @property
    def budget_strategy(self) -> str:
        """As of ``StepSettings``."""
        return "budget:bitwise" if self.bitwise_topology else super().budget_strategy

    def layout(self, num_processes: int) -> BatchLayout:
        """As of ``StepSettings``; undivided, too, where blocks cut the share of a rank up and not the training loop."""
        if not self.bitwise_topology:
            size = None if self.joins_micro_batches else self.named_micro_batch
            return BatchLayout.of(self.global_batch_size, size, num_processes, self.sequence_parallel)
        kind = LockstepLayout if self.batchnorm == "global" else IndexedLayout
        return kind.of(self.global_batch_size, self.named_micro_batch, num_processes)

    def micro_batch_of_blocks(self, layout: BatchLayout) -> int | None:
        """As of ``StepSettings``: under ``--batchnorm global``, unless that is a rank's whole share."""
        size = self.named_micro_batch
        if self.batchnorm != "global" or size is None or size >= layout.micro_batch_size:
            return None
        return size

    def convert(self, model: nn.Module) -> None:
        """As of ``StepSettings``: BatchNorm over the global batch."""
        if self.batchnorm == "global":
            global_batchnorm(model)

    def check_flags(self) -> None:
        """Refuse flags that measure or convert a model in another way, or depend on the number of ranks.

        Raises:
            InputError: there is one.
        """
        if self.batchnorm == "global" and self.micro_batch_size == AUTO:
            raise InputError(
                "--batchnorm global needs a --micro_batch_size that is a number, or none: auto is no number"
            )
        if not self.bitwise_topology:
            return
        if self.micro_batch_size is None:
            raise InputError(
                "--bitwise_topology needs the same micro-batches on any number of ranks: give --micro_batch_size a "
                "number, or auto"
            )
        if self.batchnorm == "sync":
            raise InputError("--bitwise_topology: --batchnorm sync normalises over the ranks: leave one of them out")

    def check_model(self, model: nn.Module) -> None:
        """Refuse statistics that follow the micro-batches of one rank, under ``--bitwise_topology``.

        Raises:
            InputError: the model has BatchNorm layers, and they are local.
        """
        if not self.bitwise_topology or self.batchnorm == "global":
            return
        names = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(
                f"--bitwise_topology: {names[0]}{more} are BatchNorm layers, whose running statistics follow the "
                "micro-batches of one rank: add --batchnorm global, or take a model without BatchNorm"
            )

    def check_order(self, order: SampleOrder, layout: BatchLayout) -> None:
        """Refuse a step in which a rank has padding alone, whose values would count in ``--batchnorm global``.

        Raises:
            InputError: the last step of an epoch is such a one.
        """
        if self.batchnorm != "global":
            return
        num_samples = order.num_samples_in(order.steps_per_epoch - 1)
        if not all(any(micro_batches) for micro_batches in layout.micro_batches(num_samples)):
            of_size = f" in micro-batches of {layout.micro_batch_size}" if layout.is_bitwise else ""
            raise InputError(
                f"--batchnorm global: the last step of an epoch has {num_samples} samples{of_size} for "
                f"{layout.num_processes} ranks, and padding would count in the statistics: "
                "take another --global_batch_size, or fewer ranks"
            )

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan that rounds otherwise than ``--bitwise_topology`` promises.

        Raises:
            InputError: it does.
        """
        if not self.bitwise_topology or plan.is_bitwise:
            return
        does = "compiles, and rounds by the shapes that a rank has seen"
        if plan.micro_batch_size is not None:
            does = "runs blocks in micro-batches by themselves, and adds their gradients in the order of a rank"
        raise InputError(f"--bitwise_topology: plan {plan.strategy} {does}: take a plan that does not")

    def notice(self, model: nn.Module, layout: BatchLayout) -> str | None:
        """Return a line on local BatchNorm layers, where they do not normalise the global batch as one."""
        layers = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
        synchronised = all(isinstance(layer, nn.SyncBatchNorm) for layer in layers)
        parts = layout.accumulation_steps * (1 if synchronised else layout.num_processes)
        if self.batchnorm == "global" or not layers or parts == 1:
            return None
        hint = "" if self.in_shards else "; --batchnorm global takes all of them together"
        return (
            f"note: {len(layers)} BatchNorm layers normalise each of {parts} micro-batches by itself, so other numbers "
            f"of ranks or accumulation steps give another curve{hint}"
        )
