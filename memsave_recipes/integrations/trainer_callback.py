"""A plan in transformers' ``Trainer`` and the trainers of TRL: ``Trainer(..., callbacks=[MemsaveCallback(...)])``."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainingArguments

from memsave_recipes.core.activations.block_state import replaced
from memsave_recipes.core.activations.micro_batches import tensors_in
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.host.state import is_on_host, keep_state_on_host
from memsave_recipes.core.host.step import HostMasters, masters_of, scale_on_host, step_on_host
from memsave_recipes.core.progress import ProgressBar
from memsave_recipes.core.step.memory import torch_optimizer
from memsave_recipes.integrations.planned_training import (
    PREFIX,
    MicroBatch,
    PlannedTraining,
    PlanningCallback,
    check_model,
    refuse_several,
)

OFFLOADS = ("none", "state", "step")
SHARDS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")


class MemsaveCallback(PlanningCallback, TrainerCallback):
    """The trainer's model follows a plan, from its first batch to the end of ``train()``.

    It prints the plan with its prediction, and in the second step the measured peak.

    Args:
        budget_gib: device memory of a training step, in GiB, for ``budget`` and ``budget:bitwise``.
        strategy, blocks, compiled: as of ``make_plan``.
        offload_optimizer: ``none``; ``state``: the optimizer state waits on the host, also after the training; or
            ``step``: gradients move to the host, which clips them and updates copies of the weights.

    Raises:
        InputError: settings that contradict each other; when training begins: arguments of the trainer that do not work
            with a plan, or a budget that no plan fits in.
    """

    def __init__(
        self,
        budget_gib: float | None = None,
        *,
        strategy: str = "budget:bitwise",
        blocks: Sequence[str] | type[nn.Module] | None = None,
        compiled: bool = False,
        offload_optimizer: str = "none",
    ) -> None:
        super().__init__(budget_gib, strategy=strategy, blocks=blocks, compiled=compiled)
        if offload_optimizer not in OFFLOADS:
            raise InputError(f"offload_optimizer {offload_optimizer!r}: it must be {' or '.join(OFFLOADS)}")
        self.offload_optimizer = offload_optimizer

    def on_init_end(self, args: TrainingArguments, *others: Any, **kwargs: Any) -> None:
        """Refuse arguments before ``train()`` acts on them; see to the optimizer before a checkpoint is loaded."""
        trainer = _calling_trainer()
        _check_arguments(args)
        _check_trainer(trainer, self.offload_optimizer)
        if self.offload_optimizer != "none":
            trainer.create_optimizer = _offloading(trainer, by_step=self.offload_optimizer == "step")

    def on_train_begin(self, args: TrainingArguments, *others: Any, **kwargs: Any) -> None:
        """Wrap the trainer's ``compute_loss``."""
        self.remove()  # after a training that ended outside of a step, by an exception
        trainer = _calling_trainer()
        _check_arguments(args)
        _check_trainer(trainer, self.offload_optimizer)
        refuse_several(trainer.callback_handler.callbacks)
        check_model(trainer.model_wrapped)
        optimizer = torch_optimizer(trainer.optimizer)
        if self.offload_optimizer != "none" and args.device.type != "cpu" and not _is_offloaded(optimizer):
            raise InputError(
                "offload_optimizer: the optimizer was made before the callback came: pass callbacks=[...] to "
                f"{type(trainer).__name__}"
            )
        self.training = PlannedTraining(
            settings=self.settings,
            model=trainer.model,
            optimizer=trainer.optimizer,
            gradients_resident=args.gradient_accumulation_steps > 1,
            others=_other_models(trainer),
            owners=[trainer],
        )
        step = _removing_on_error(self, trainer.training_step, searches=args.auto_find_batch_size)
        patches = self.training.on_remove
        patches.enter_context(replaced(trainer, "compute_loss", _planned_loss(self.training, trainer)))
        patches.enter_context(replaced(trainer, "training_step", step))
        if (masters := masters_of(optimizer)) is not None:
            clip = _clipping(masters, trainer.accelerator)
            patches.enter_context(replaced(trainer.accelerator, "clip_grad_norm_", clip))
            scale_on_host(trainer.accelerator.scaler)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a trainer that never calls ``compute_loss``, before it changes a weight."""
        if self.training is not None and self.plan is None:
            self.remove()
            raise InputError(
                "MemsaveCallback: this trainer's training_step does not call compute_loss: use memsave.prepare in a "
                "loop of your own"
            )

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Compare the step with its prediction."""
        if self.training is not None:
            self.training.after_step()
            if self.offload_optimizer == "step":  # whose gradients are still there if the scaler left the step out
                self.training.optimizer.zero_grad()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Set the trainer and its model back."""
        self.remove()


def _offloading(trainer: Any, *, by_step: bool) -> Callable[..., Optimizer]:
    """Return the trainer's ``create_optimizer``; what that makes keeps its state on the host, or steps there."""
    create_optimizer: Callable[..., Optimizer] = trainer.create_optimizer

    def create(*args: Any, **named: Any) -> Optimizer:
        optimizer = create_optimizer(*args, **named)
        inside = torch_optimizer(optimizer)  # of a second training, in which Accelerate has wrapped it
        if by_step and not _is_offloaded(inside):
            step_on_host(trainer.model, inside)
        elif not _is_offloaded(inside):
            keep_state_on_host(inside)
        return optimizer

    return create


def _is_offloaded(optimizer: Optimizer) -> bool:
    return is_on_host(optimizer) or masters_of(optimizer) is not None


def _clipping(masters: HostMasters, accelerator: Any) -> Callable[..., Tensor]:
    """Return ``accelerator.clip_grad_norm_`` of all gradients of a step, which ``masters`` have on the host."""

    def clip(parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        return masters.clip(max_norm, accelerator.unscale_gradients)

    return clip


def _planned_loss(training: PlannedTraining, trainer: Any) -> Callable[..., Any]:
    """Return ``trainer.compute_loss``, with a plan before its first training forward."""
    compute_loss: Callable[..., Any] = trainer.compute_loss

    def planned_loss(model: nn.Module, inputs: Any, *others: Any, **named: Any) -> Any:
        def forward() -> Tensor:
            with trainer.accelerator.no_sync(model=model):
                loss: Tensor = compute_loss(model, copy.copy(inputs), *others, **named)
                return loss

        if trainer.model.training and torch.is_grad_enabled():  # not in an evaluation
            training.before_forward(MicroBatch(forward=forward, tensors=tensors_in(dict(inputs))))
        return compute_loss(model, inputs, *others, **named)

    return planned_loss


def _removing_on_error(
    callback: MemsaveCallback, training_step: Callable[..., Any], *, searches: bool
) -> Callable[..., Any]:
    """Return ``training_step`` that removes the plan where it fails.

    Args:
        searches: whether the trainer tries a smaller batch (``auto_find_batch_size``) if this one is out of memory.
    """

    def guarded_step(*args: Any, **named: Any) -> Any:
        try:
            return training_step(*args, **named)
        except BaseException as error:
            callback.remove()
            if searches and isinstance(error, InputError) and str(error).startswith("budget_gib"):
                ProgressBar.write(f"{PREFIX}{error}")
                raise torch.OutOfMemoryError("MemsaveCallback: no plan fits, so it is out of memory.") from error
            raise

    return guarded_step


def _calling_trainer() -> Any:
    """Find the trainer in whose ``train()`` this is called: transformers does not give it to callbacks."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back
    raise InputError("MemsaveCallback: it is for transformers' Trainer: use memsave.prepare in a loop of your own")


def _check_arguments(args: TrainingArguments) -> None:
    """Raise ``InputError`` for a second checkpointing, offloading, compiling or ``DataParallel``."""
    flag = "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"
    if getattr(args, flag):
        raise InputError(
            f"{flag}=True: a plan decides which activations are recomputed: pass {flag}=False to "
            f"{type(args).__name__}; TRL's default is True"
        )
    if getattr(args, "activation_offloading", False):
        raise InputError("activation_offloading=True: pass activation_offloading=False, or leave MemsaveCallback out")
    if args.torch_compile:
        raise InputError("torch_compile=True: pass torch_compile=False, and compiled=True to MemsaveCallback")
    if args.n_gpu > 1:
        raise InputError(f"{args.n_gpu} GPUs in one process (DataParallel): launch a process for each, with torchrun")


def _check_trainer(trainer: Any, offload_optimizer: str) -> None:
    """Raise ``InputError`` where ranks share layers, or for an engine that does not work with a plan or a setting."""
    accelerator = trainer.accelerator
    if (size := getattr(getattr(accelerator, "parallelism_config", None), "tp_size", 1)) > 1:
        raise InputError(
            f"parallelism_config: tp_size {size} shares layers between ranks, which no plan is made for: train with "
            "tp_size=1, or leave MemsaveCallback out"
        )
    kind = str(accelerator.distributed_type.value)
    if kind in SHARDS and not accelerator.is_fsdp2:
        raise InputError(f"{kind} shards or moves the model, which no plan is made for: train with DDP or FSDP2")
    if kind in SHARDS and offload_optimizer != "none":
        raise InputError(
            f"offload_optimizer {offload_optimizer!r}: under FSDP2 the optimizer gets other parameters, and its state "
            "stays on the device: pass offload_optimizer='none'"
        )


def _other_models(trainer: Any) -> list[nn.Module]:
    """Return the models of the trainer besides the one it trains, as the reference model of DPO."""
    models = [value for value in vars(trainer).values() if isinstance(value, nn.Module)]
    trained = set(trainer.model.modules())
    return [model for model in models if trained.isdisjoint(model.modules())]
