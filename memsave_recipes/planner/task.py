"""A recipe's training task, and the choice of its plan for a target device by estimates alone.

A ``Task`` is a recipe's model, loss and micro-batch without data or weights. A recipe that ``memsave plan`` can plan
has a function ``task(args)`` next to its ``main``, made of the same functions. ``choose_for_target`` runs it with fake
tensors, so the device need not be here.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memsave_recipes.activations import block_names, find_stacks, plan_blocks
from memsave_recipes.errors import InputError
from memsave_recipes.estimation.estimate import estimate_on_target, fake_batch, fake_model
from memsave_recipes.estimation.targets import Target, find_target, target_of
from memsave_recipes.planner.budget import overheads_of_target, plans_to_measure, static_memory_of, usable_bytes
from memsave_recipes.planner.search import Candidate, Choice, SearchSpace, open_layouts, search
from memsave_recipes.profiling.block_costs import Measurement, Workload
from memsave_recipes.text import GIB
from memsave_recipes.training.arguments import OptimizerArguments, RunArguments
from memsave_recipes.training.batch_layout import BatchLayout
from memsave_recipes.training.batching import Batch

FOLDER_FLAG = "--output_dir"
AUTOCAST_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A recipe's model, loss and micro-batch under its flags.

    Args:
        run, optim: the parsed flags.
        build_model: the model with the blocks: with ``with_weights=True`` as it is trained, else without weights, on
            torch's default device.
        adapt: adds adapters to that model in place; by default it has none.
        trained: the module that the recipe trains, made of the model, one of ``losses`` (``None`` for the flags'
            choice) and the device that it will run on.
        loss_of: the summed loss of a micro-batch under ``trained``'s module.
        micro_batch: a micro-batch of so many samples with the largest shapes of the data; its values are not read.
        takes_adapters: whether ``--lora`` is a flag of the recipe, and off.
        losses: the values of ``--loss`` to compare; ``(None,)`` for a recipe with one loss.
        assumed: assumptions made in place of data, for people.
    """

    run: RunArguments
    optim: OptimizerArguments
    build_model: Callable[..., nn.Module]
    adapt: Callable[[Any], object] = lambda model: model
    trained: Callable[[Any, Any, torch.device], nn.Module] = lambda model, loss, device: model
    loss_of: Callable[[nn.Module, Batch], Tensor]
    micro_batch: Callable[[int], Batch]
    takes_adapters: bool = False
    losses: tuple[str | None, ...] = (None,)
    assumed: tuple[str, ...] = ()

    def planned_model(self) -> nn.Module:
        """The model with its adapters, without weights."""
        model = self.build_model()
        self.adapt(model)
        return model


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The devices that a recipe is to run on.

    Args:
        target: the device of every rank.
        mixed_precision: as for ``accelerate launch``.
        host_budget_bytes: memory of a rank's host for offloading; ``None`` where it is not known.
    """

    target: Target
    num_processes: int = 1
    mixed_precision: str = "no"
    host_budget_bytes: int | None = None

    @classmethod
    def here(cls, num_processes: int, mixed_precision: str) -> "Launch":
        """On the device of this machine.

        Raises:
            InputError: its figures are not known.
        """
        target = find_target("cuda" if torch.cuda.is_available() else "cpu")
        return cls(target=target, num_processes=num_processes, mixed_precision=mixed_precision.replace("fp8", "bf16"))


def read_task(recipe: Path, args: Sequence[str]) -> Task:
    """The task of the recipe in a file under the flags ``args``; ``--output_dir`` may be missing.

    Raises:
        InputError: no such file, no function ``task`` in it, or flags that it refuses.
    """
    task: Callable[[list[str]], Task] | None = getattr(_load(recipe), "task", None)
    if task is None:
        raise InputError(f"{recipe} has no function task(args): docs/planner.md has an example")
    named = any(word.partition("=")[0] == FOLDER_FLAG for word in args)
    return task([*args] if named else [*args, FOLDER_FLAG, "out"])


def _load(recipe: Path) -> object:
    if not os.path.isfile(recipe):  # unlike pathlib, without an error for a text that cannot be a path
        raise InputError(f"RECIPE {recipe} is no file: name one such as recipes/language_modeling.py")
    spec = importlib.util.spec_from_file_location(recipe.stem, recipe)
    if spec is None or spec.loader is None:
        raise InputError(f"RECIPE {recipe} is no Python file")
    try:
        compile(recipe.read_bytes(), str(recipe), "exec")
    except (SyntaxError, ValueError) as error:
        raise InputError(f"RECIPE {recipe} is no Python: {error}") from error
    module = importlib.util.module_from_spec(spec)
    sys.modules[recipe.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def estimate(
    task: Task,
    *,
    target: str | None = "cuda",
    target_memory_gib: float | None = None,
    budget_gib: float | None = None,
    num_processes: int = 1,
    mixed_precision: str = "no",
) -> Choice:
    """The ways to compute a step of ``task``, with memory and time on a device that need not be here.

    No data is read, no weight is made and nothing is run. The micro-batch size and the strategy that ``task.run`` names
    are kept; with ``micro_batch_size="auto"`` and ``activation_checkpointing="budget"`` all of them are compared.

    Args:
        target: ``cpu`` (this one), ``cuda`` (the device that is here, or an A100), or a device such as ``h100``.
        target_memory_gib: memory of that device; with ``target=None`` that of any GPU, at the rates of an A100.
        budget_gib: memory of one device, in GiB, for everything on it. Default: that of ``task.run``, or else 95 % of a
            GPU's memory, and all of a CPU's.
        num_processes: devices, with DDP.
        mixed_precision: ``no``, ``bf16`` or ``fp16``, as for ``accelerate launch``.

    Returns:
        All candidates; ``chosen`` is the fastest that fits, ``None`` where none does.

    Raises:
        InputError: no such target or precision, numbers out of range, contradictions in ``task.run``, or a model
            without blocks for its strategy.
    """
    launch = Launch(
        target=target_of(target, target_memory_gib), num_processes=num_processes, mixed_precision=mixed_precision
    )
    if mixed_precision not in AUTOCAST_DTYPES:
        raise InputError(f"mixed_precision {mixed_precision}: choose one of {', '.join(AUTOCAST_DTYPES)}")
    if num_processes < 1:
        raise InputError(f"num_processes {num_processes}: it must be at least 1")
    gib = budget_gib if budget_gib is not None else task.run.memory_budget_gib
    if gib is not None and not 0 < gib < inf:
        raise InputError(f"budget_gib {gib}: it must be above 0")
    usable = usable_bytes(launch.target.memory_bytes, launch.target.device_type)
    return choose_for_target(task, launch, usable if gib is None else int(gib * GIB))


def choose_for_target(
    task: Task,
    launch: Launch,
    budget_bytes: int,
    *,
    on_size: Callable[[BatchLayout], None] = lambda layout: None,
    candidates: Callable[[SearchSpace, Measurement, BatchLayout, str | None], list[Candidate]] = SearchSpace.candidates,
) -> Choice:
    """All candidates for a recipe on a device, estimated from fake tensors and the vendor's rates.

    A micro-batch size and a strategy that the flags name are kept; otherwise they are searched.

    Args:
        on_size: called with the batch layout that is estimated next.
        candidates: the candidates that follow from the costs of one micro-batch.

    Raises:
        InputError: flags that contradict each other, or a model without blocks for the strategy.
    """
    model = fake_model(task.planned_model)
    layouts = open_layouts(task.run, task.optim, launch.num_processes)
    strategy = str(task.run.activation_checkpointing)
    space = SearchSpace(
        budget_bytes=budget_bytes,
        strategy=strategy,
        static=partial(static_memory_of, task.optim, model, device_type=launch.target.device_type),
        overheads=overheads_of_target(launch.target),
        host_budget_bytes=launch.host_budget_bytes,
        plan_of=partial(plan_blocks, model),
    )

    def candidates_of(layout: BatchLayout, loss: str | None) -> list[Candidate]:
        on_size(layout)
        workload = fake_workload(task, launch, model, layout.micro_batch_size, loss)
        plans = plans_to_measure(strategy, workload, device_type=launch.target.device_type, compiles=False)
        measured = estimate_on_target(
            workload, plans, launch.target, autocast_dtype=AUTOCAST_DTYPES[launch.mixed_precision]
        )
        return candidates(space, measured, layout, loss)

    return search(layouts, task.losses, candidates_of)


def fake_workload(task: Task, launch: Launch, model: nn.Module, micro_batch_size: int, loss: str | None) -> Workload:
    """One micro-batch of a recipe as fake tensors."""
    trained = task.trained(model, loss, launch.target.device)
    batch = fake_batch(model, task.micro_batch(micro_batch_size))
    return Workload(
        model=model,
        forward=lambda: task.loss_of(trained, batch),
        batch=list(batch.values()),
        device=torch.device("cpu"),
        stacks=block_names(find_stacks(model)),
    )
