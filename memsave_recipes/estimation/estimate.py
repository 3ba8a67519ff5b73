"""Estimate a step on a target device: a model without weights, a batch without values, simulated copies to the host.

``fake_model`` and ``fake_batch`` make fake tensors: shapes, dtypes and storages with no memory behind them, which
autograd and every operator work on as if they were real. They report the CPU as their device, whatever the target is,
as a torch that was built without CUDA knows no other; ``kernels.py`` puts the target's kernels in place of the CPU's.

Offloading runs the engine of ``activations/offload.py``, with copies that only take time. They travel one after the
other at the rate of the link to the host, in parallel with the operators; waiting for one sets the clock forward to its
end. So transients and added seconds of a block that offloads come from the code that a device runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode

from memsave_recipes.activations.offload import OffloadEngine
from memsave_recipes.activations.spans import RUN
from memsave_recipes.estimation.fake_step import FakeInstruments, SimulatedClock, Workspaces
from memsave_recipes.estimation.kernels import CudaWorkspaces, cuda_kernels
from memsave_recipes.estimation.repeats import Irregular, expanded, find_repeats, left_out
from memsave_recipes.estimation.targets import Target
from memsave_recipes.plans import Action, Plan
from memsave_recipes.profiling.block_costs import Measurement, Workload, measure

M = TypeVar("M", bound=nn.Module)
CPU = torch.device("cpu")


def fake_model(build: Callable[[], M]) -> M:
    """The model of ``build()``, with fake tensors for parameters and buffers; takes no memory and no time for weights.

    Tied weights stay tied, and each tensor keeps its dtype, layout and ``requires_grad``. The model is in the mode that
    ``build`` leaves it in.

    Args:
        build: makes the model on torch's default device, which is ``meta`` inside. It may load a configuration, but no
            weights.
    """
    with torch.device("meta"):
        model = build()
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # constants of a loss, say
    made: dict[int, Tensor] = {}
    for module in model.modules():
        places: list[dict[str, Any]] = [module._parameters, module._buffers, module.__dict__]
        for place in places:
            for name, tensor in place.items():
                if isinstance(tensor, Tensor):
                    place[name] = made.setdefault(id(tensor), _as_fake(tensor, mode))
    return model


def fake_batch(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fake tensors of the shapes and dtypes of ``batch``, for a model that ``fake_model`` made.

    Args:
        batch: real tensors or those of the ``meta`` device; their values do not count.
    """
    return {name: _as_fake(tensor, _fake_mode_of(model)) for name, tensor in batch.items()}


def estimate_on_target(
    workload: Workload, plans: Sequence[Plan], target: Target, *, autocast_dtype: torch.dtype | None = None
) -> Measurement:
    """``measure`` by simulation: one run under each plan, which gives its bytes and its seconds at once.

    ``offload`` is among the plans that a CUDA target can be asked for.

    Args:
        workload: of a model from ``fake_model`` and a batch from ``fake_batch``, ``device`` the CPU; its forward
            needs no autocast of its own.
        plans: as for ``measure``.
        autocast_dtype: of mixed precision (``torch.bfloat16`` for ``bf16``); ``None`` for none.

    Returns:
        A measurement whose workload is on the target's device, so that its chains are those of the target.

    Raises:
        InputError: as ``measure``.
    """

    def forward() -> Tensor:
        # All fake tensors are the CPU's, whatever the target. No cache of weights, as in a run.
        with torch.autocast("cpu", autocast_dtype, enabled=autocast_dtype is not None, cache_enabled=False):
            return workload.forward()

    instruments = FakeInstruments(
        target.rates,
        Workspaces() if target.device_type == "cpu" else CudaWorkspaces(),
        target.allocation_bytes,
        on_host=target.device_type == "cpu",
        clock=(clock := SimulatedClock()),
    )
    on_cpu = replace(workload, forward=forward, device=CPU)
    with _fake_mode_of(workload.model), cuda_kernels(target), simulated_offloading(target, clock):
        measured = _measure(on_cpu, plans, instruments)
    return replace(measured, workload=replace(workload, device=target.device))


def _measure(workload: Workload, plans: Sequence[Plan], instruments: FakeInstruments) -> Measurement:
    """``measure``, with layers that are alike traced once, where the model lets us."""
    repeats = find_repeats(workload, plans)
    if repeats.periods:
        shortened = {repeats.shorten_plan(plan): plan for plan in plans}
        stacks = [repeats.shorten(names) for names in workload.stacks]
        with suppress(Irregular), left_out(workload.model, repeats) as arguments:
            some = measure(
                replace(workload, stacks=stacks), list(shortened), instruments=instruments, on_run=arguments.end_run
            )
            runs = zip(some.traces, arguments.of_runs, strict=True)
            traces = [(shortened[plan], expanded(trace, repeats, shared)) for (plan, trace), shared in runs]
            return Measurement(workload, traces)
    return measure(workload, plans, instruments=instruments)


@contextmanager
def simulated_offloading(target: Target, clock: SimulatedClock) -> Iterator[None]:
    """Inside, blocks under ``OFFLOAD`` copy to the host of a CUDA target; on a CPU they keep everything, as ever."""
    if target.device_type == "cpu":
        yield
        return
    before = RUN[Action.OFFLOAD]
    RUN[Action.OFFLOAD] = OffloadEngine(torch.device("cpu"), SimulatedCopies(clock, target.host_bytes_per_s)).run
    try:
        yield
    finally:
        RUN[Action.OFFLOAD] = before


@dataclass
class SimulatedCopies:
    """``Copies`` that take the time of the link; their event is the second at which they end."""

    clock: SimulatedClock
    bytes_per_s: float
    busy_until: float = 0.0

    def empty_on_host(self, num_bytes: int) -> Any:
        """Host memory, which is not counted: only its length is read."""
        return range(num_bytes)

    def start(self, pairs: list[tuple[Tensor, Tensor]]) -> float:
        """After the copies before them, and the computation so far."""
        num_bytes = sum(len(target) for target, _ in pairs)
        self.busy_until = max(self.busy_until, self.clock.now) + num_bytes / self.bytes_per_s
        return self.busy_until

    def wait(self, event: float) -> None:
        """The computation goes on when they are done."""
        self.clock.now = max(self.clock.now, event)


def _as_fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def _fake_mode_of(model: nn.Module) -> FakeTensorMode:
    parameter = next(model.parameters())
    assert isinstance(parameter, FakeTensor), "a model that fake_model made"
    return parameter.fake_mode
