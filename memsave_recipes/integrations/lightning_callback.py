"""A plan in Lightning's ``Trainer``: ``Trainer(..., callbacks=[MemsaveLightningCallback(...)])``."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from memsave_recipes.core.activations.block_state import replaced
from memsave_recipes.core.activations.micro_batches import tensors_in
from memsave_recipes.core.errors import InputError, packages_of
from memsave_recipes.integrations.planned_training import MicroBatch, PlannedTraining, PlanningCallback, refuse_several

with packages_of("lightning", "plans in Lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ParallelStrategy, SingleDeviceStrategy
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature


class MemsaveLightningCallback(PlanningCallback, Callback):
    """The module of ``trainer.fit`` follows a plan, from its first batch to the end of the fit.

    It prints the plan with its prediction, and in the second step the measured peak. Lightning clears the gradients of
    a step only after the next forward, so they always count in the peak.

    Args:
        budget_gib: device memory of a training step, in GiB, for ``budget`` and ``budget:bitwise``.
        strategy, blocks, compiled: as of ``make_plan``.

    Raises:
        InputError: settings that contradict each other; when the fit begins: a trainer or module that does not work
            with a plan, or a budget that no plan fits in.
    """

    _global_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what does not work with a plan."""
        _check_trainer(trainer, pl_module)
        refuse_several(getattr(trainer, "callbacks", ()))
        self.training = PlannedTraining(
            settings=self.settings,
            model=pl_module,
            optimizer=trainer.optimizers[0],
            gradients_resident=True,
        )
        self._global_step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Plan on the first batch, and on larger ones; open the window of the measured step."""

        def forward() -> Tensor:
            with replaced(pl_module, "log", _log_nothing), _without_reduction(trainer):
                return _loss_of(trainer.strategy.training_step(*_arguments(pl_module, batch, batch_idx)))

        if self.training is not None:
            self.training.before_forward(MicroBatch(forward=forward, tensors=tensors_in(batch)))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compare a step with its prediction, where the optimizer has stepped."""
        if self.training is not None and trainer.global_step > self._global_step:
            self._global_step = trainer.global_step
            self.training.after_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the module back."""
        self.remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Set the module back."""
        self.remove()


def _check_trainer(trainer: Trainer, pl_module: LightningModule) -> None:
    """Raise ``InputError`` for a strategy that shards the model, or a module that steps its optimizers itself."""
    strategy = trainer.strategy
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy) or isinstance(strategy, DeepSpeedStrategy):
        raise InputError(
            f"strategy: {type(strategy).__name__} shards or moves the model, which no plan is made for: train with "
            "strategy='ddp' or on one device"
        )
    if not pl_module.automatic_optimization:
        raise InputError(
            "automatic_optimization=False: the module steps its optimizers itself: use memsave.prepare in its "
            "on_train_start"
        )


def _arguments(pl_module: LightningModule, batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """Return the arguments that its ``training_step`` takes."""
    takes_index = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)
    return (batch, batch_idx) if takes_index else (batch,)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise InputError("training_step: returned no loss for the first batch, so nothing can be planned")
    return loss


def _without_reduction(trainer: Trainer) -> AbstractContextManager[Any]:
    """Keep DDP from averaging gradients inside."""
    strategy = trainer.strategy
    return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()


def _log_nothing(*args: Any, **named: Any) -> None:
    """Replace ``LightningModule.log`` in a measured step."""
