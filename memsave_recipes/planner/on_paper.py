"""Plan a recipe for a device that need not be here: no data, no weights, nothing is run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from memsave_recipes.activations import block_names, find_stacks, plan_blocks
from memsave_recipes.costs import Measurement, Workload
from memsave_recipes.costs.on_paper import measure_on_paper, paper_batch, paper_model
from memsave_recipes.costs.targets import Target, find_target
from memsave_recipes.planner.beside import beside_the_step, overheads_of_target
from memsave_recipes.planner.budget import plans_to_measure
from memsave_recipes.planner.search import Candidate, Choice, Terms, open_geometries, search
from memsave_recipes.planner.sketch import Sketch
from memsave_recipes.training.sample_order import Geometry

AUTOCAST_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Where a recipe is to run.

    Args:
        target: the device of every rank.
        mixed_precision: of ``accelerate launch``.
        host_budget_bytes: of a rank's host, for what is offloaded; ``None`` where it is not known.
    """

    target: Target
    num_processes: int = 1
    mixed_precision: str = "no"
    host_budget_bytes: int | None = None

    @classmethod
    def here(cls, num_processes: int, mixed_precision: str) -> "Launch":
        """On the device that is here.

        Raises:
            InputError: there are no figures of it.
        """
        target = find_target("cuda" if torch.cuda.is_available() else "cpu")
        return cls(target=target, num_processes=num_processes, mixed_precision=mixed_precision.replace("fp8", "bf16"))


def choose_on_paper(
    sketch: Sketch,
    launch: Launch,
    budget_bytes: int,
    *,
    on_size: Callable[[Geometry], None] = lambda geometry: None,
    candidates: Callable[[Terms, Measurement, Geometry, str | None], list[Candidate]] = Terms.candidates,
) -> Choice:
    """All candidates for a recipe on a device, by fake tensors and the vendor's rates.

    A micro-batch size and a strategy that the flags name are kept; what they leave open is searched.

    Args:
        on_size: is told which geometry is looked at next.
        candidates: what a measurement of one micro-batch makes possible.

    Raises:
        InputError: flags that contradict each other, or a model without blocks for the strategy.
    """
    model = paper_model(sketch.build_model)
    geometries = open_geometries(sketch.run, sketch.optim, launch.num_processes)
    strategy = str(sketch.run.activation_checkpointing)
    terms = Terms(
        budget_bytes=budget_bytes,
        strategy=strategy,
        beside=partial(beside_the_step, sketch.optim, model),
        overheads=overheads_of_target(launch.target),
        host_budget_bytes=launch.host_budget_bytes,
        plan_of=partial(plan_blocks, model),
    )

    def candidates_of(geometry: Geometry, loss: str | None) -> list[Candidate]:
        on_size(geometry)
        workload = workload_on_paper(sketch, launch, model, geometry.micro_batch_size, loss)
        plans = plans_to_measure(strategy, workload, device_type=launch.target.device_type, compiles=False)
        measured = measure_on_paper(
            workload, plans, launch.target, autocast_dtype=AUTOCAST_DTYPES[launch.mixed_precision]
        )
        return candidates(terms, measured, geometry, loss)

    return search(geometries, sketch.losses, candidates_of)


def workload_on_paper(
    sketch: Sketch, launch: Launch, model: nn.Module, micro_batch_size: int, loss: str | None
) -> Workload:
    """One micro-batch of a recipe as fake tensors."""
    trained = sketch.trained(model, loss, launch.target.device)
    batch = paper_batch(model, sketch.micro_batch(micro_batch_size))
    return Workload(
        model=model,
        forward=lambda: sketch.loss_of(trained, batch),
        batch=list(batch.values()),
        device=torch.device("cpu"),
        stacks=block_names(find_stacks(model)),
    )
