"""A training step under a plan beside the plain one: everything it leaves behind, bit for bit, and what it kept."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from zoo.architectures import Architecture, Batch, mean_loss

from memsave_recipes.activations import apply_plan, block_names, find_stacks
from memsave_recipes.errors import InputError
from memsave_recipes.planner import StaticMemory, make_plan
from memsave_recipes.planner.budget import least_memory, plans_to_measure
from memsave_recipes.plans import Plan
from memsave_recipes.profiling.block_costs import Workload, measure
from memsave_recipes.profiling.trace_events import DeviceInstruments
from memsave_recipes.text import GIB

IDENTICAL = "identical"
LEAST_EFFECT = 0.95  # of the bytes that plain saves: a plan that keeps more than that has done nothing
NO_STATE = StaticMemory(state_bytes=0)


@dataclass(frozen=True)
class Step:
    """What a training step left behind, what autograd saved for its backward, and how many modules it called."""

    results: dict[str, Tensor | None]
    saved_bytes: int
    num_calls: int


def verdict(architecture: Architecture, strategy: str) -> str:
    """``identical``, ``refused: ...`` with the reason, or what is wrong."""
    torch.manual_seed(3)
    try:
        plan = plan_of(architecture, strategy)
        pairs = [(step(architecture, seed, None), step(architecture, seed, plan)) for seed in architecture.seeds]
    except InputError as refusal:
        return f"refused: {refusal}"
    except Exception as error:
        return f"traceback: {type(error).__name__}: {error}"
    for plain, planned in pairs:
        if differing := [name for name, tensor in plain.results.items() if not _equal(planned.results[name], tensor)]:
            return f"wrong: {len(differing)} of {len(plain.results)}, {differing[0]}"
    return IDENTICAL if _has_effect(pairs) else "no effect"


def _has_effect(pairs: list[tuple[Step, Step]]) -> bool:
    """Whether something ran again, and less was saved."""
    plain_calls, calls = (sum(pair[index].num_calls for pair in pairs) for index in range(2))
    plain_bytes, saved_bytes = (sum(pair[index].saved_bytes for pair in pairs) for index in range(2))
    return calls > plain_calls and saved_bytes <= LEAST_EFFECT * plain_bytes


def plan_of(architecture: Architecture, strategy: str) -> Plan:
    """The plan of ``strategy``; of ``budget``, for the middle between what plain and what the least takes."""
    model, batch = architecture.build(), architecture.batch()
    if not strategy.startswith("budget"):
        return make_plan(model, batch, strategy=strategy, loss_fn=mean_loss)
    budget_gib = _middle_bytes(model, batch, strategy) / GIB
    options = {"budget_gib": budget_gib, "loss_fn": mean_loss, "static": NO_STATE}
    return make_plan(model, batch, strategy=strategy, **options)


def _middle_bytes(model: nn.Module, batch: Batch, strategy: str) -> float:
    workload = Workload(
        model=model,
        forward=lambda: mean_loss(model(**batch)),
        batch=[value for value in batch.values() if isinstance(value, Tensor)],
        device=torch.device("cpu"),
        stacks=block_names(find_stacks(model)),
    )
    plans = plans_to_measure(strategy, workload, device_type="cpu")
    measurement = measure(workload, plans, instruments=DeviceInstruments(workload.device, repetitions=1))
    least = least_memory(measurement, NO_STATE)
    return least.reserve_bytes + (least.peak.total_bytes + least.baseline_peak_bytes) / 2


def step(architecture: Architecture, seed: int, plan: Plan | None) -> Step:
    """One forward and backward of the architecture as it is built; ``None`` is no plan at all."""
    model, batch = architecture.build(), architecture.batch()
    torch.manual_seed(seed)
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
    """Every call of a module that has none inside."""
    calls: list[nn.Module] = []
    leaves = [module for module in model.modules() if not any(module.children())]
    handles = [leaf.register_forward_hook(lambda module, *_: calls.append(module)) for leaf in leaves]
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
