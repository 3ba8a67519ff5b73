"""A training step under a plan beside the plain one: everything it leaves behind, bit for bit, and what it kept."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from zoo.architectures import Model, mean_loss

from memsave_recipes.core.activations import apply_plan, block_names, find_stacks
from memsave_recipes.core.costs.block_costs import Workload, measure
from memsave_recipes.core.costs.trace_events import DeviceInstruments
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner import StaticMemory, make_plan
from memsave_recipes.core.planner.budget import forecast, least_memory, plans_to_measure
from memsave_recipes.core.plans import Action, Plan

IDENTICAL = "identical"
NO_EFFECT = "no effect"
PARTS_KEPT = "parts kept"
STRATEGIES = ("full", "segments:2", "selective", "budget:bitwise")
MOST_KEPT = 0.95  # of the bytes that plain saves; a budget bounds the peak, for which one layer may be enough
NO_STATE = StaticMemory(state_bytes=0)


@dataclass(frozen=True)
class Step:
    """What a training step left behind, what autograd saved for its backward, and how many modules it called."""

    results: dict[str, Tensor | None]
    saved_bytes: int
    num_calls: int


def plain_steps(architecture: Model) -> list[Step]:
    """Without a plan, a step for each of its seeds."""
    return [step(architecture, seed, None) for seed in architecture.seeds]


def verdict(architecture: Model, strategy: str, plain: list[Step]) -> str:
    """``identical``, ``no effect``, or ``parts kept``, ``refused``, ``wrong``, ``traceback``, each with its words.

    Args:
        plain: the ``plain_steps`` of the architecture.
    """
    torch.manual_seed(3)
    try:
        plan = plan_of(architecture, strategy)
        planned = [step(architecture, seed, plan) for seed in architecture.seeds]
    except InputError as refusal:
        return f"refused: {refusal}"
    except Exception as error:
        return f"traceback: {type(error).__name__}: {error}"
    for one, other in zip(plain, planned, strict=True):
        if differing := differences(one, other):
            return f"wrong: {len(differing)} of {len(one.results)}, {differing[0]}"
    most_kept = 1.0 if strategy.startswith("budget") else MOST_KEPT
    if _has_effect(plain, planned, plan, most_kept):
        return IDENTICAL
    return f"{PARTS_KEPT}: {plan.describe()}" if "all of " in plan.describe() else NO_EFFECT


def differences(one: Step, other: Step) -> list[str]:
    """The names of the results that are not equal bit for bit."""
    return [name for name, tensor in one.results.items() if not _equal(other.results[name], tensor)]


def _has_effect(plain: list[Step], planned: list[Step], plan: Plan, most_kept: float) -> bool:
    """Whether blocks ran again, where the backward comes to them, and ``most_kept`` of the bytes were saved at most."""
    plain_calls, calls = (sum(step.num_calls for step in steps) for steps in (plain, planned))
    plain_bytes, saved_bytes = (sum(step.saved_bytes for step in steps) for steps in (plain, planned))
    ran_again = calls > plain_calls or not _has_gradients(plain, plan)
    return ran_again and saved_bytes < plain_bytes and saved_bytes <= most_kept * plain_bytes


def _has_gradients(plain: list[Step], plan: Plan) -> bool:
    """Whether the backward comes to a block that does not keep its activations."""
    kept = plan.blocks_under(Action.KEEP)
    prefixes = tuple(f"gradient of {block}." for block in plan.blocks if block not in kept)
    return any(tensor is not None for one in plain for name, tensor in one.results.items() if name.startswith(prefixes))


def plan_of(architecture: Model, strategy: str) -> Plan:
    """The plan of ``strategy``; of ``budget``, for the middle between what plain and what the least takes, or that.

    Raises:
        InputError: a refusal, also of a budget below the peak of plain where no plan lowers this peak.
    """
    model, batch = architecture.build(), architecture.batch()
    stacks = block_names(find_stacks(model))
    if not strategy.startswith("budget") or not stacks:
        return make_plan(model, batch, strategy=strategy, budget_gib=1.0, loss_fn=mean_loss)
    workload = Workload(
        model=model,
        forward=lambda: mean_loss(model(**batch)),
        batch=[value for value in batch.values() if isinstance(value, Tensor)],
        device=torch.device("cpu"),
        stacks=stacks,
    )
    plans = plans_to_measure(strategy, workload)
    measurement = measure(workload, plans, instruments=DeviceInstruments(workload.device, repetitions=1))
    least = least_memory(measurement, NO_STATE)
    saved_bytes = max(0, least.baseline_peak_bytes - least.peak.total_bytes)
    needed_bytes = least.reserve_bytes + least.peak.total_bytes
    middle = forecast(measurement, needed_bytes + saved_bytes // 2, NO_STATE).plan
    if _recomputes(middle):
        return middle
    lowest = forecast(measurement, needed_bytes, NO_STATE).plan  # where the reserve is most of what is saved
    return lowest if _recomputes(lowest) else forecast(measurement, needed_bytes - 1, NO_STATE).plan


def _recomputes(plan: Plan) -> bool:
    return len(plan.blocks_under(Action.KEEP)) < len(plan.blocks)


def step(architecture: Model, seed: int, plan: Plan | None) -> Step:
    """One forward and backward of the architecture as it is built; ``None`` is no plan at all."""
    model, batch = architecture.build(), architecture.batch()
    torch.manual_seed(seed)
    np.random.seed(seed)  # SpecAugment and random attention draw from it
    handle = apply_plan(model, plan) if plan else nullcontext()
    with handle, _counting_calls(model) as calls, _counting_saved(model) as saved:
        loss = mean_loss(model(**batch))
        loss.backward()
    results: dict[str, Tensor | None] = {"loss": loss.detach(), "random state": torch.get_rng_state()}
    results |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    results |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    return Step(results, sum(saved.values()), len(calls))


def _equal(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return torch.equal(ours, theirs)


@contextmanager
def _counting_calls(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Every call of a module that has none inside; torch ends a recomputation inside the last one."""
    calls: list[nn.Module] = []
    leaves = [module for module in model.modules() if not any(module.children())]
    handles = [leaf.register_forward_pre_hook(lambda module, _: calls.append(module)) for leaf in leaves]
    yield calls
    for handle in handles:
        handle.remove()


@contextmanager
def _counting_saved(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of the storages that autograd saves beside the parameters, by their address; the tensors stay alive."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
