"""Measure block costs: run a step under the baseline and under each other action, and trace every run block by block.

A run is traced once for its bytes and several times for its seconds, in rounds, so that a slow moment of the machine
meets every action. A step that does not fit without checkpointing is measured in groups: the blocks of one group at a
time, while all others recompute. The costs of a block do not depend on how the others run.

NOTE [ rounds ]
1. In a round the step runs once under each action. Rounds end when the standard error of the step's time is at most
   ``AGREE`` of it under every action. On a machine with nothing else to do, the first ``repetitions`` suffice.
2. There are at most ``MOST_ROUNDS`` times as many, and none is added after ``MOST_S`` by the clock, which groups share:
   on a GPU a step of 25 ms can take 250 ms to be timed. The noise that is left is in the chain, and the planner counts
   it (``core/plans/chain.py``, rule 9).
3. Of a run on several ranks each rank takes the least number, as the forward of a model may wait for the other ranks
   (SyncBatchNorm), and an unequal number of forwards would wait for ever.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from time import perf_counter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from memsave_recipes.core.activations import apply_plan
from memsave_recipes.core.activations.blocks import find_parts
from memsave_recipes.core.activations.offload import unpinned_after
from memsave_recipes.core.activations.streaming import StreamedLayer, ahead_bytes, nothing_ahead, resident_tensors
from memsave_recipes.core.costs.preserve_state import preserve_state, without_layerdrop
from memsave_recipes.core.costs.step_trace import StepTrace, chain_of, most_offloaded_bytes
from memsave_recipes.core.costs.targets import UNKNOWN_HOST, Host
from memsave_recipes.core.costs.trace_events import DeviceInstruments, Meter, Part, StepTracer, storages_in
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans import Action, Plan, Span
from memsave_recipes.core.plans.chain import Chain, allocated_bytes
from memsave_recipes.core.plans.plan import AS_IT_IS, Way, as_they_run

AGREE, MOST_ROUNDS, MOST_S = 0.01, 4, 10.0
"""Of NOTE [ rounds ]."""

LABELS = {"layer_idx", "layer_id", "layer_index", "layer_number", "target_name"}
"""Names under which layers are numbered and named."""
COMPARED = (int, float, str, bool, type(None), torch.dtype, torch.device, FunctionType, BuiltinFunctionType, type)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with what one forward takes: a micro-batch, or several joined.

    Args:
        model: in training mode, on its device, without a plan.
        forward: one forward that ends in a loss, under the precision of the run.
        batch: its input tensors, on the device; those of every micro-batch.
        stacks: the names of its blocks, stack by stack.
        host_bytes: that the model's weights take on the host.
        extra_modules: the names of modules outside of all blocks that are parts of the chain.
        gradients_stay: as of ``StaticMemory``: else there is no memory for all of them.
    """

    model: nn.Module
    forward: Callable[[], Tensor]
    batch: Sequence[Tensor]
    device: torch.device
    stacks: Sequence[Sequence[str]]
    host_bytes: int = 0
    extra_modules: Sequence[str] = ()
    gradients_stay: bool = True

    @cached_property
    def weights_bytes(self) -> int:
        """The bytes of parameters and buffers on the device, and of those that are copied ahead."""
        return self._bytes_of(resident_tensors(self.model))

    @cached_property
    def resident_bytes(self) -> int:
        """The same with the batch: live all the time."""
        return self._bytes_of([*resident_tensors(self.model), *self.batch])

    def _bytes_of(self, tensors: Sequence[Tensor]) -> int:
        """Add up storages, and what is copied ahead."""
        sizes = {StorageWeakRef(storage).cdata: storage.nbytes() for storage in storages_in(tensors)}
        return allocated_bytes(sizes.values(), self.device) + ahead_bytes(self.model, self.device)


@dataclass(frozen=True)
class Measurement:
    """A step as it was traced under several plans.

    Args:
        kinds: of its blocks by ``kinds_of``; those that are alike share their seconds.
    """

    workload: Workload
    traces: list[tuple[Plan, StepTrace]]
    kinds: Mapping[str, Hashable] = field(default_factory=dict)
    _chains: dict[Hashable, Chain] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def running(self) -> dict[str, bool]:
        """Those of ``StepTrace``."""
        return self.traces[0][1].running

    def chain(self, *, offload: Collection[Action] = (), tiles: bool = False, saves_part: bool = False) -> Chain:
        """Make the chain of the model's blocks, with an option for each action that was measured.

        Args:
            offload: the actions to the host that blocks may take; with any, ``resident_bytes`` includes the most that
                one of them moves twice.
            tiles: whether MLPs may run in tiles.
            saves_part: whether compiled blocks may save a part.
        """
        key = frozenset(offload), tiles, saves_part
        if key not in self._chains:
            self._chains[key] = self._chain(*key)
        return self._chains[key]

    def _chain(self, offload: Collection[Action], tiles: bool, saves_part: bool) -> Chain:
        traces = {
            way_of(plan): trace
            for plan, trace in self.traces
            if not set(plan.offloads) - set(offload)
            and (tiles or plan.mlp_tile_tokens is None)
            and (saves_part or not plan.ratios)
        }
        chain = chain_of(
            traces,
            stack_of={name: number for number, names in enumerate(self.workload.stacks) for name in names},
            resident_bytes=self.workload.resident_bytes,
            device=self.workload.device,
            compiled=self.traces[0][0].compiled,
            kinds=self.kinds,
            num_parts=self._num_parts,
        )
        sizes = (plan.micro_batch_size for plan, _ in self.traces if plan.micro_batch_size is not None)
        of_tiles = (plan.mlp_tile_tokens for plan, _ in self.traces if plan.mlp_tile_tokens is not None)
        return replace(
            chain,
            micro_batch_size=next(sizes, None),
            mlp_tile_tokens=next(of_tiles, None),
            host_bytes=self.workload.host_bytes,
        )

    @cached_property
    def _num_parts(self) -> dict[str, int]:
        modules = dict(self.workload.model.named_modules())
        found = {name: len(find_parts(modules[name])) for name in self.running if name in modules}
        return {name: count for name, count in found.items() if count}

    def chain_under(self, plan: Plan) -> Chain:
        """Make the chain with the actions of ``plan``.

        Raises:
            InputError: the model could not run under one of them.
        """
        measured = {way_of(one) for one, _ in self.traces}
        if not all(span.action.kind.is_joint or span.way in measured for span in plan.spans):
            raise InputError(f"strategy {plan.strategy}: the blocks of this model cannot run under it; use full")
        return self.chain(offload=plan.offloads, tiles=plan.mlp_tile_tokens is not None, saves_part=bool(plan.ratios))


def num_runs(plans: Sequence[Plan]) -> int:
    """Return how many forwards and backwards ``measure`` takes on a device at most."""
    return len(plans) * (2 + MOST_ROUNDS * DeviceInstruments.repetitions)


def measure(
    workload: Workload,
    plans: Sequence[Plan],
    *,
    instruments: DeviceInstruments | None = None,
    host: Host = UNKNOWN_HOST,
    on_run: Callable[[], Any] = lambda: None,
    most_s: float = MOST_S,
    idle: Collection[nn.Module] = (),
) -> Measurement:
    """Run the step under each of ``plans`` that the model can run under.

    Leaves no trace in the model, its gradients and the random numbers.

    Args:
        plans: the first keeps everything; each of the others has all blocks under one other action.
        instruments: by default those of the device. ``FakeInstruments`` read a model of fake tensors, which is made and
            run under ``torch._subclasses.FakeTensorMode``.
        host: where offloaded tensors take more than it has, offloading is no option.
        on_run: is called after every run, and for every run that was not needed.
        most_s: after so many seconds no round is added: rule 2 of NOTE [ rounds ].
        idle: modules that do not run.

    Raises:
        InputError: the model does not run its blocks once each, stack after stack. The stacks may run in another order
            than they are registered; those of which no block runs are left out of the measurement.
    """
    instruments = instruments or DeviceInstruments(workload.device)
    device = workload.device
    with preserve_state(workload.model, device, idle=idle), without_layerdrop(workload.model), unpinned_after(device):
        traces: dict[_Run, StepTrace] = {}
        for plan in plans:
            if not _fits(host, plan, traces):
                continue
            run = _Run(workload, plan, instruments, on_run)
            try:
                traces[run] = run.trace()
            except InputError:  # the model cannot run under this action, so it is no option
                if plan is plans[0]:
                    raise
        running = next(iter(traces.values())).running
        expected = [name for names in as_they_run(workload.stacks, running) or workload.stacks for name in names]
        for trace in traces.values():
            _check_order(trace.parts, expected)
        _time_in_rounds(traces, expected, most_s)
    kinds = _kinds_of_all(workload) if instruments.repetitions else {}
    return Measurement(workload, [(run.plan, trace) for run, trace in traces.items()], kinds)


def _time_in_rounds(traces: dict["_Run", StepTrace], expected: Sequence[str], most_s: float) -> None:
    """Time every run until the figures agree: NOTE [ rounds ]."""
    instruments, on_run = next((run.instruments, run.on_run) for run in traces)
    least, most = instruments.repetitions, MOST_ROUNDS * instruments.repetitions
    end = perf_counter() + most_s
    for number in range(most):
        if number >= least and (perf_counter() >= end or _are_known(list(traces.values()))):
            for _ in range((most - number) * len(traces)):
                on_run()
            break
        for run, trace in traces.items():
            parts, seconds = run.timed()
            _check_order(parts, expected)
            trace.seconds.append(seconds)


def _are_known(traces: Sequence[StepTrace]) -> bool:
    """Return whether no further round is needed, or none may follow on one of several ranks."""
    steps = [trace.step for trace in traces]
    agree = all(step.noise_s <= AGREE * step.time_s for step in steps)
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    return agree or (grouped and torch.distributed.get_world_size() > 1)


def _kinds_of_all(workload: Workload) -> dict[str, Hashable]:
    """Return ``kinds_of`` the blocks in lists whose layers can be compared."""
    names = [name for stack in workload.stacks for name in stack]
    lists = [list(group) for _, group in groupby(names, key=lambda name: name.rpartition(".")[0])]
    found = [(layers, kinds_of(workload.model, layers)) for layers in lists]
    return {name: kind for layers, kinds in found if kinds for name, kind in zip(layers, kinds, strict=True)}


def kinds_of(model: nn.Module, names: Sequence[str]) -> list[Hashable]:
    """Return a value for each layer of a list, equal for those that are alike; none if a block shares its weights.

    Two layers are alike if they have the same class, the same modules inside with the same settings, and parameters and
    buffers of the same shapes, dtypes and ``requires_grad``; and if every entry of the configuration with a value for
    each layer (``layer_types``) has the same one for both. Their numbers (``layer_idx``) may differ.
    """
    try:
        layers = [model.get_submodule(name) for name in names]
    except AttributeError:
        return []
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    if any(uses[id(parameter)] > 1 for layer in layers for parameter in layer.parameters()):
        return []
    of_each = [
        entry
        for entry in _values_of(getattr(model, "config", None))
        if isinstance(entry, list | tuple) and len(entry) == len(layers)
    ]
    setups = [
        tuple((name, type(module), _settings(module)) for name, module in layer.named_modules()) for layer in layers
    ]
    return [(setup, *(_comparable(entry[at]) for entry in of_each)) for at, setup in enumerate(setups)]


def _values_of(config: Any) -> Iterable[Any]:
    """Yield those of a configuration: an object, also one with slots, a mapping or a named tuple."""
    if isinstance(config, Mapping):
        return config.values()
    if isinstance(config, tuple):
        return config
    slots = [name for kind in type(config).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(config, "__dict__", {}).values(), *(getattr(config, name, None) for name in slots)]


def _settings(module: nn.Module) -> Hashable:
    tensors = [(name, _form(tensor)) for name, tensor in (*module._parameters.items(), *module._buffers.items())]
    return _comparable(vars(module)), tuple(tensors)


def _form(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)


def _comparable(value: Any) -> Hashable:
    """Make ``value`` something to compare; what has no values to compare is equal to itself alone."""
    if isinstance(value, COMPARED):
        return value
    if isinstance(value, list | tuple | set):
        return tuple(map(_comparable, value))
    if isinstance(value, dict):
        own = {name: one for name, one in value.items() if name not in LABELS}
        return tuple((name, _comparable(one)) for name, one in own.items() if not isinstance(one, nn.Module | Tensor))
    if isinstance(value, StreamedLayer):
        return StreamedLayer, value.names
    if isinstance(value, partial):
        return value.func, _comparable(value.args), _comparable(value.keywords)
    return _form(value) if isinstance(value, Tensor) else id(value)


def _fits(host: Host, plan: Plan, traces: dict["_Run", StepTrace]) -> bool:
    """Return whether the host has memory for all that ``plan`` moves, by the trace of the baseline, the first plan."""
    if not plan.offloads or host.budget_bytes is None:  # and an offloading plan may be the first
        return True
    return host.holds(most_offloaded_bytes(next(iter(traces.values())), way_of(plan)[0]))


def way_of(plan: Plan) -> Way:
    """Return the action that all blocks of ``plan`` are under, or all but those that recompute, with its ratio."""
    return next((span.way for span in plan.spans if span.action is not Action.RECOMPUTE), AS_IT_IS)


@dataclass(frozen=True, eq=False)
class _Run:
    """The step of a workload under one plan."""

    workload: Workload
    plan: Plan
    instruments: DeviceInstruments
    on_run: Callable[[], Any]

    def trace(self) -> StepTrace:
        """Trace its parts, with the bytes at their boundaries; after a run to warm up, and to compile."""
        if self.instruments.repetitions:
            self.timed()
        with nothing_ahead(self.workload.model), self._tracer(counting=True) as tracer:
            memory = list(tracer.at_boundaries(self.instruments.read_memory(partial(self._step, tracer))))
        self.on_run()
        seconds = [reading.seconds for reading in memory[1:] if reading.seconds is not None]
        return StepTrace(
            parts=tracer.parts,
            ends=tracer.ends,
            memory=memory,
            seconds=[seconds] if seconds else [],
            variables_bytes=tracer.variables_bytes,
        )

    def timed(self) -> tuple[list[Part], list[float]]:
        """Time its parts: return them, and the seconds between their boundaries."""
        with self._tracer(counting=False) as tracer:
            seconds = self.instruments.read_clock(partial(self._step, tracer))
        self.on_run()
        return tracer.parts, seconds

    @contextmanager
    def _tracer(self, *, counting: bool) -> Iterator[StepTracer]:
        tracer = StepTracer(
            self.workload.model,
            self.workload.batch,
            device=self.instruments.device,
            counting=counting,
            frees_gradients=not self.workload.gradients_stay,
            extra_modules=self.workload.extra_modules,
        )
        with apply_plan(self.workload.model, self.plan, watch=tracer.watch):
            yield tracer

    def _step(self, tracer: StepTracer, meter: Meter) -> None:
        tracer.run(self.workload.forward, meter)
        self.workload.model.zero_grad()


def _check_order(parts: Sequence[Part], expected: Sequence[str]) -> None:
    if [part.block for part in parts if part.block is not None] != expected:
        raise InputError(
            f"strategy budget: this model does not run its {len(expected)} blocks once each, in every step and one "
            "stack after the other, so their costs are no chain: use full or every:K"
        )


@dataclass(frozen=True, kw_only=True)
class MeasuredInGroups(Measurement):
    """A step whose blocks were measured group by group; ``traces`` are those of the first group."""

    groups: Sequence[frozenset[str]]
    of_groups: Sequence[Measurement]

    def chain(self, **allowed: Any) -> Chain:
        """Take each block from its group, and the parts between blocks from the first one."""
        chains = [measured.chain(**allowed) for measured in self.of_groups]
        group_of = {name: number for number, names in enumerate(self.groups) for name in names}
        columns = zip(*(chain.blocks for chain in chains), strict=True)
        return replace(
            chains[0],
            blocks=tuple(column[group_of.get(column[0].name, 0)] for column in columns),
            resident_bytes=max(chain.resident_bytes for chain in chains),
            noise_s=max(chain.noise_s for chain in chains),
        )


def measure_in_groups(
    workload: Workload,
    plans: Sequence[Plan],
    num_groups: int,
    *,
    host: Host = UNKNOWN_HOST,
    on_run: Callable[[], Any] = lambda: None,
) -> Measurement:
    """Measure the blocks in ``num_groups`` groups, which takes so many times the runs of ``measure``.

    A group is every ``num_groups``-th block, so that the groups take about as much memory as each other.
    """
    if num_groups == 1:
        return measure(workload, plans, host=host, on_run=on_run)
    names = [name for stack in workload.stacks for name in stack]
    groups = [frozenset(names[first::num_groups]) for first in range(num_groups)]
    of_groups = [[_of_group(plan, group) for plan in plans] for group in groups]
    share = partial(measure, host=host, on_run=on_run, most_s=MOST_S / num_groups)
    found = [share(workload, one) for one in of_groups]
    return MeasuredInGroups(workload, found[0].traces, found[0].kinds, groups=groups, of_groups=found)


def _of_group(plan: Plan, group: frozenset[str]) -> Plan:
    """Return ``plan`` for the blocks of a group; each of the others recomputes by itself."""
    action, ratio = way_of(plan)
    spans = [
        Span(start=start, stop=start + 1, action=action, ratio=ratio)
        if name in group
        else Span(start=start, stop=start + 1, action=Action.RECOMPUTE)
        for start, name in enumerate(plan.blocks)
    ]
    return replace(plan, spans=tuple(spans))
