"""The plan of a run: what ``--activation_checkpointing`` says, with ``budget`` measured on the run's own step.

All ranks measure, since a model may make them meet (SyncBatchNorm); what the first one finds holds for all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from tqdm import tqdm

from memsave_recipes.activations import block_names, find_stacks, plan_blocks
from memsave_recipes.costs import Workload
from memsave_recipes.errors import InputError
from memsave_recipes.planner.budget import Beside, Forecast
from memsave_recipes.planner.make_plan import plan_workload
from memsave_recipes.planner.picture import show_forecast
from memsave_recipes.plans import Plan
from memsave_recipes.training.arguments import OptimizerArguments, RunArguments
from memsave_recipes.training.batching import Batch, GlobalBatches
from memsave_recipes.training.optimizers import state_bytes
from memsave_recipes.training.sample_order import Geometry
from memsave_recipes.units import GIB

SECONDS_BEFORE_THE_BAR = 5


@dataclass(frozen=True)
class RunPlan:
    """A plan; of one that was made for a budget, the bytes that a step should need at most."""

    plan: Plan
    predicted_peak_bytes: int | None = None


def plan_run(
    run: RunArguments,
    optim: OptimizerArguments,
    accelerator: Accelerator,
    model: nn.Module,
    batches: GlobalBatches,
    prepared: nn.Module,
    loss_of: Callable[[Batch], Tensor],
) -> RunPlan:
    """The plan that the flags ask for; where it is made for a budget, it is printed as a picture.

    Args:
        model: the one with the blocks, inside ``prepared``.
        prepared: what ``accelerator.prepare`` made of it.
        loss_of: a forward of ``prepared`` on a micro-batch, as in training.

    Raises:
        InputError: no such strategy, or no plan fits in ``--memory_budget_gib``.
    """
    strategy = run.activation_checkpointing or "none"
    if run.memory_budget_gib is None:
        return RunPlan(plan_blocks(model, strategy))
    batch = batches.largest_micro_batch()

    def forward() -> Tensor:
        with accelerator.no_sync(prepared):
            return loss_of(batch)

    workload = Workload(
        model=model,
        forward=forward,
        batch=list(batch.values()),
        device=accelerator.device,
        stacks=block_names(find_stacks(model)),
    )
    budget_bytes = int(run.memory_budget_gib * GIB)
    beside = beside_the_step(optim, batches.geometry, model)
    forecast = _of_the_first_rank(accelerator, partial(plan_workload, workload, strategy, budget_bytes, beside))
    if accelerator.is_main_process:
        show_forecast(forecast, budget_bytes)
    return RunPlan(forecast.plan, forecast.peak.total_bytes)


def _of_the_first_rank(accelerator: Accelerator, choose: Callable[..., Forecast]) -> Forecast:
    """What ``choose`` finds on the first rank, or its refusal, for all of them."""
    found: list[Forecast | str] = []
    with _progress(accelerator) as progress:
        try:
            found = [choose(on_runs=partial(setattr, progress, "total"), on_run=progress.update)]
        except InputError as refusal:
            found = [refusal.one_line]
    broadcast_object_list(found)
    if isinstance(found[0], str):
        raise InputError(found[0])
    return found[0]


def beside_the_step(optim: OptimizerArguments, geometry: Geometry, model: nn.Module) -> Beside:
    """What a run holds besides its forward and backward.

    Under DDP the gradients live in its buckets from the start; under accumulation the micro-batches' own do as well.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state = state_bytes(optim.optimizer, trained, momentum=optim.momentum)
    buckets = sum(parameter.nbytes for parameter in trained) if geometry.num_processes > 1 else 0
    accumulates = geometry.accumulation_steps > 1
    return Beside(
        resident_bytes=state + buckets,
        gradients_resident=accumulates,
        gradients_stay=not optim.optimizer_in_backward and not (buckets and not accumulates),
    )


def _progress(accelerator: Accelerator) -> tqdm:
    return tqdm(
        desc="measuring blocks",
        unit="run",
        delay=SECONDS_BEFORE_THE_BAR,
        leave=False,
        disable=not accelerator.is_main_process,
    )
