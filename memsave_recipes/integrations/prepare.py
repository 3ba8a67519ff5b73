"""A plan in a loop of one's own: plain PyTorch, Accelerate, Fabric.

The plan is made at once, on a batch that the script gives. Hooks of the model and of the optimizer tell where a step
begins and ends, for the comparison with the prediction; they go when the plan does.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memsave_recipes.integrations.planned_training import MicroBatch, PlannedTraining, PlanSettings, tensors_in
from memsave_recipes.planner.make_plan import call, loss_of


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
) -> PlannedTraining:
    """Plan a training on ``batch`` and put the plan into effect, until ``remove()`` or the end of a ``with`` block.

    The plan and its prediction are printed, and in the second step the peak beside it. The model, its gradients and the
    random state stay as they were. On several ranks all call it.

    Args:
        model: on its device, as ``Accelerator.prepare``, ``Fabric.setup`` or DDP returned it, or bare.
        batch: one micro-batch on that device, as for ``make_plan``; the longest that there will be.
        optimizer: of the training, or a wrapper of it: its state counts.
        budget_gib: device memory of a training step, in GiB, for ``budget`` and ``budget:bitwise``.
        strategy, loss_fn, blocks: as of ``make_plan``.
        accumulation_steps: micro-batches of an optimizer step.

    Returns:
        A context manager with ``plan`` and ``remove()``.

    Raises:
        InputError: as ``make_plan``, and for a model that checkpoints, shards or compiles by itself.
    """
    bare, precision = _bare(model), _precision_of(model)

    def forward() -> Tensor:
        with precision():
            return (loss_fn or loss_of)(call(bare, batch))

    training = PlannedTraining(
        settings=PlanSettings(budget_gib=budget_gib, strategy=strategy, blocks=blocks),
        model=bare,
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

    training.on_remove(bare.register_forward_pre_hook(begin_forward, with_kwargs=True).remove)
    training.on_remove(training.optimizer.register_step_post_hook(lambda one, *_: stepped.append(one)).remove)
    return training


def _bare(model: Any) -> nn.Module:
    """The module inside the wrappers of DDP and Fabric."""
    wrapped = isinstance(model, DistributedDataParallel) or _is_fabric(model)
    bare: nn.Module = _bare(model.module) if wrapped else model
    return bare


def _precision_of(model: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Fabric's wrapper enters its precision around the forward; Accelerate has put its own into the model."""
    if not _is_fabric(model):
        return nullcontext
    context: Callable[[], AbstractContextManager[Any]] = model._strategy.precision.forward_context
    return context


def _is_fabric(model: Any) -> bool:
    return type(model).__name__ == "_FabricModule"
