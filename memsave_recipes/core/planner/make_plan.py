"""A plan for a model in a script of one's own: from a strategy's name, or the fastest that fits a memory budget.

``make_plan`` is for a model with a batch; ``plan_step`` for any forward that ends in a loss, on one rank or on several,
which then take the same plan.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memsave_recipes.core.activations import block_names, find_stacks, plan_blocks
from memsave_recipes.core.activations.apply import idle_of
from memsave_recipes.core.activations.blocks import named_stack
from memsave_recipes.core.activations.micro_batches import tensors_in
from memsave_recipes.core.costs.block_costs import Measurement, Workload
from memsave_recipes.core.costs.preserve_state import running_blocks
from memsave_recipes.core.costs.targets import Host
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.budget import (
    COMPILED_RATIOS,
    Forecast,
    forecast,
    plans_to_measure,
    usable_host_bytes,
)
from memsave_recipes.core.planner.trial_step import (
    ALONE,
    MAX_TRIALS,
    Ranks,
    measured_together,
    step_bytes,
    with_smaller_ratio,
)
from memsave_recipes.core.plans import BUDGET_WORDS, Plan, plan_for
from memsave_recipes.core.plans.chain import StaticMemory
from memsave_recipes.core.plans.prediction import Prediction
from memsave_recipes.core.step.memory import memory_of_adamw, memory_of_optimizer
from memsave_recipes.core.text import GIB, Progress, gib_that_suffice, to_gib

MAX_GIB = 1e6


def make_plan(
    model: nn.Module,
    batch: Any = None,
    *,
    strategy: str,
    budget_gib: float | None = None,
    loss_fn: Callable[[Any], Tensor] | None = None,
    blocks: Sequence[str] | type[nn.Module] | None = None,
    optimizer: Optimizer | None = None,
    static: StaticMemory | None = None,
    predict: bool = False,
    compiled: bool = False,
) -> Plan:
    """Return the plan that ``strategy`` makes for ``model``; ``apply_plan`` puts it into effect.

    A plan for a budget is measured, so that it has a ``prediction`` of memory and time (``print(plan)``), and it is run
    before it is returned. The model, its gradients and the random state stay as they were.

    Args:
        model: on its device. A model in evaluation mode, as ``from_pretrained`` returns it, is measured with all its
            modules in training mode. In a model in training mode, modules in evaluation mode stay so.
        batch: one micro-batch on that device: a mapping for ``model(**batch)``, a sequence for ``model(*batch)``, or
            anything else for ``model(batch)``. ``budget`` needs it; other strategies leave out blocks that it does not
            reach, and K counts only those that have a backward. Call ``make_plan`` under the autocast of the training,
            if there is one.
        strategy: ``none``, ``full``, ``every:K``, ``segments:K``, ``nested:K``, ``selective``, ``offload``,
            ``full_offload``, ``compiled[:RATIO]``, ``bottleneck``, the path of a ``plan.json``, ``budget``, or
            ``budget:bitwise``, which keeps the bits of the same layers without a plan.
        budget_gib: for ``budget``: device memory of a training step, in GiB.
        loss_fn: from the model's output to the loss, a scalar. Default: the output's ``loss``, or the sum of its
            first tensor, which may need less memory than the loss of the training.
        blocks: for a model whose blocks are not found: the class of its layers, or names of modules in the order in
            which they run.
        optimizer: of the training; its state counts. Without one it is AdamW's two copies of all parameters that
            train.
        static: memory besides forward and backward, in place of ``optimizer``.
        predict: measure steps of ``batch`` for the prediction of another strategy as well; those without checkpointing
            have to fit into memory. There is none of ``bottleneck``.
        compiled: whether the layers that repeat compute compiled, under any plan. They round otherwise than eager ones.

    Raises:
        InputError: no such strategy, a budget that no plan fits in, or a model without blocks for it. The message
            names these parameters.
    """
    names = names_of(model, blocks)
    stacks = [names] if names else block_names(find_stacks(model))
    if batch is None:
        if strategy in BUDGET_WORDS:
            raise InputError(f"strategy {strategy}: needs a batch and budget_gib")
        plan = plan_for(strategy, stacks) if names else plan_blocks(model, strategy, None)
        return plan.on_compiled_layers() if compiled else plan
    workload = Workload(
        model=model,
        forward=lambda: (loss_fn or loss_of)(call(model, batch)),
        batch=tensors_in(batch),
        device=next(model.parameters()).device,
        stacks=stacks,
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    static = static or (memory_of_optimizer(optimizer) if optimizer else memory_of_adamw(trained, workload.device))
    of_step = partial(plan_step, workload, strategy, budget_gib=budget_gib, static=static, compiled=compiled)
    return of_step(named=bool(names), predict=predict)


def plan_step(
    workload: Workload,
    strategy: str,
    *,
    budget_gib: float | None,
    static: StaticMemory,
    named: bool = False,
    predict: bool = False,
    compiled: bool = False,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> Plan:
    """Make a plan as ``make_plan`` does, for a forward that ends in a loss.

    Args:
        named: whether the workload's stacks are the user's choice, and not those that are found in the model.
        progress: of the forwards and backwards that measure.
    """
    progress = Progress() if progress is None else progress
    if strategy in BUDGET_WORDS:
        refuse_compiled(workload.model)
        check_budget(budget_gib)
        if budget_gib is None:
            raise InputError(f"strategy {strategy}: needs a batch and budget_gib")
        found = _planned(workload, strategy, int(budget_gib * GIB), static, progress, ranks, compiled=compiled)
        return replace(found.plan, prediction=found.prediction)
    model, stacks = workload.model, workload.stacks
    refuse_compiled(model)
    running = running_blocks(model, stacks, workload.forward, workload.device)
    plan = plan_for(strategy, stacks, idle_of(running)) if named else plan_blocks(model, strategy, running)
    plan = plan.on_compiled_layers() if compiled else plan
    return replace(plan, prediction=_predicted(plan, workload, static, progress, ranks)) if predict else plan


def refuse_compiled(model: nn.Module) -> None:
    """Refuse modules that are compiled in place: code around a block then runs inside the compiled code, or not.

    Raises:
        InputError: ``module.compile()`` was called on one.
    """
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None:
            where = name or type(model).__name__
            raise InputError(f"model: {where} is compiled in place: leave compile() out, and pass compiled=True")


def check_budget(budget_gib: float | None) -> None:
    """Raise ``InputError`` if it is no amount of memory."""
    is_number = isinstance(budget_gib, int | float) and not isinstance(budget_gib, bool)
    if budget_gib is not None and not (is_number and 0 < budget_gib < MAX_GIB):
        raise InputError(f"budget_gib {budget_gib!r}: it must be above 0, and a number of GiB")


def names_of(model: nn.Module, blocks: Sequence[str] | type[nn.Module] | None) -> list[str]:
    """Return the names of the blocks that the user names; none where they are to be found.

    Raises:
        InputError: the model has none of that class, or none that ``named_stack`` takes.
    """
    if not isinstance(blocks, type):
        there = dict(model.named_modules())
        if missing := [name for name in blocks or () if name not in there]:
            raise InputError(f"blocks {missing[0]}: {type(model).__name__} has no module of that name")
        return [block.name for block in named_stack(model, blocks or ()).blocks]
    names = [name for name, module in model.named_modules() if isinstance(module, blocks)]
    if not names:
        raise InputError(f"blocks {blocks.__name__}: {type(model).__name__} has no such modules")
    return names_of(model, names)


def _predicted(
    plan: Plan, workload: Workload, static: StaticMemory, progress: Progress, ranks: Ranks
) -> Prediction | None:
    """Predict by measured costs; ``None`` for a plan of other blocks than the stacks', or in micro-batches."""
    names = {name for stack in workload.stacks for name in stack}
    if plan.micro_batch_size is not None or not set(plan.blocks) <= names:
        return None
    plans = plans_to_measure(plan.strategy, workload, compiled=plan.compiled)
    measured = _measured(workload, plans, progress, ranks)
    found = Forecast(plan=plan, chain=static.added_to(measured.chain_under(plan)))
    return found.prediction if plan.blocks == found.chain.decided_names else None


def _planned(
    workload: Workload,
    strategy: str,
    budget_bytes: int,
    static: StaticMemory,
    progress: Progress,
    ranks: Ranks,
    *,
    compiled: bool,
) -> Forecast:
    """Find the fastest plan that fits, both in prediction and in a trial step: NOTE [ trial step ].

    On several ranks the first one's prediction chooses, and the largest trial step of all of them has to fit.

    Raises:
        InputError: the model has no blocks, no plan is predicted to fit, or none of ``MAX_TRIALS`` does.
        torch.OutOfMemoryError: a rank had no memory for the trial step, or to measure.
    """
    device, ratios, missed_bytes = workload.device, COMPILED_RATIOS, 0
    if not any(workload.stacks):
        raise InputError(f"strategy {strategy}: {type(workload.model).__name__} has no blocks for it; use none")
    host = Host(usable_host_bytes(device))

    @cache
    def measured(ratios: tuple[float, ...]) -> Measurement:
        plans = plans_to_measure(strategy, workload, compiled=compiled, ratios=ratios)
        return _measured(workload, plans, progress, ranks)

    for _ in range(MAX_TRIALS):
        costs = measured(ratios)
        choose = partial(forecast, costs, budget_bytes, static, missed_bytes=missed_bytes)
        found = ranks.of_first(partial(choose, host=host))
        tried = ranks.attempt(partial(step_bytes, found, static, workload.model, workload.forward, device))
        if tried is None:
            raise torch.OutOfMemoryError(
                f"budget_gib {to_gib(budget_bytes):g}: the device is out of memory. It has less"
            )
        needed = ranks.largest(tried)
        if needed <= budget_bytes:
            return found
        missed_bytes = needed - found.peak.total_bytes  # more than was kept free, or the plan would have fitted
        ratios = with_smaller_ratio(ratios, found.plan)
    raise InputError(
        f"budget_gib {to_gib(budget_bytes):g}: this model needs more than predicted, and none of the {MAX_TRIALS} "
        f"plans that were tried fits; the last one works with {gib_that_suffice(needed)}"
    )


def _measured(workload: Workload, plans: Sequence[Plan], progress: Progress, ranks: Ranks) -> Measurement:
    """Measure all blocks at once, or group by group where memory is too small for that.

    Raises:
        torch.OutOfMemoryError: it is too small for the smallest groups as well.
    """
    measured = measured_together(
        lambda: workload,
        lambda _: plans,
        ranks,
        progress,
        device=workload.device,
        num_blocks=sum(map(len, workload.stacks)),
        host=Host(usable_host_bytes(workload.device)),
    )
    if measured is None:
        raise torch.OutOfMemoryError("measuring this batch ran out of memory. Make it smaller")
    return measured


def call(model: nn.Module, batch: Any) -> Any:
    """Call ``model`` with a mapping, a sequence, or a single argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


def loss_of(output: Any) -> Tensor:
    """Return the ``loss`` of an output, or the sum of its first tensor."""
    loss: Tensor | None = getattr(output, "loss", None)
    if loss is not None:
        return loss
    first = tensors_in(output)[0]
    return first if first.ndim == 0 else first.float().sum()
