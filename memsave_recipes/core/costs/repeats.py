"""Layers that are alike are traced once: the trace of a step of all layers, from a step of some.

Notes: ``docs/design/costs.md``.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count, groupby
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from memsave_recipes.core.activations.arguments import split_call
from memsave_recipes.core.activations.block_state import replaced
from memsave_recipes.core.activations.micro_batches import tensors_in
from memsave_recipes.core.costs.block_costs import Workload, way_of
from memsave_recipes.core.costs.step_trace import StepTrace
from memsave_recipes.core.costs.trace_events import Ends, Part, Reading, Storages
from memsave_recipes.core.plans import Action, Plan, Span

FIRST, FIRST_IF_OFFLOADED, LAST = 2, 3, 2
"""Layers at the ends of a list that are always traced. While one offloads, the copies of the one before are awaited."""


class Irregular(Exception):
    """Layers of this model cannot be left out: rule 5 of NOTE [ layers that are alike ]."""


@dataclass(frozen=True)
class Period:
    """The layers of a period, those that are left out behind them, and the first one that is traced again."""

    traced: tuple[str, ...]
    left_out: tuple[str, ...]
    behind: str

    @property
    def copies(self) -> int:
        """How many periods are left out."""
        return len(self.left_out) // len(self.traced)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each layer that is left out, with the one that is like it."""
        return [(name, self.traced[at % len(self.traced)]) for at, name in enumerate(self.left_out)]


@dataclass(frozen=True)
class Repeats:
    """The periods of a model's lists of layers."""

    periods: tuple[Period, ...]
    """Those inside another one before it."""

    @cached_property
    def like(self) -> dict[str, str]:
        """For each layer that is left out, by name, one that is traced and is like it."""
        found: dict[str, str] = {}
        for period in self.periods:
            found |= {name: found.get(like, like) for name, like in period.pairs}
        return found

    def shorten(self, names: Sequence[str]) -> list[str]:
        """Return ``names`` without the layers that are left out."""
        return [name for name in names if name not in self.like]

    def shorten_plan(self, plan: Plan) -> Plan:
        """Return a plan with all blocks under one action, for those that are traced.

        Raises:
            ValueError: ``plan`` recomputes blocks and has no other action for them: ``full``, ``every:K``,
                ``segments:K``. Costs of these follow from those of ``none``.
        """
        action, ratio = way_of(plan)
        if plan.recomputed and action is Action.KEEP:
            raise ValueError(f"plan is {plan.strategy}, whose blocks recompute: take none, whose costs say the same")
        blocks = tuple(self.shorten(plan.blocks))
        spans = tuple(Span(start=at, stop=at + 1, action=action, ratio=ratio) for at in range(len(blocks)))
        return replace(plan, blocks=blocks, spans=spans)


def find_repeats(
    workload: Workload, plans: Sequence[Plan], kinds: Callable[[tuple[str, ...]], Sequence[Hashable]]
) -> Repeats:
    """Find the layers of ``workload`` that need no trace of their own under ``plans``.

    Args:
        kinds: ``kinds_of`` the model.
    """
    least = FIRST_IF_OFFLOADED if any(plan.offloads for plan in plans) else FIRST
    names = [name for stack in workload.stacks for name in stack]
    lists = [tuple(group) for _, group in groupby(names, key=lambda name: name.rpartition(".")[0])]
    return Repeats(tuple(period for layers in lists if (of := kinds(layers)) for period in _periods(layers, of, least)))


def _periods(names: Sequence[str], kinds: Sequence[Hashable], least: int) -> Iterator[Period]:
    """Yield the periods by rule 2 of the NOTE."""
    first, begin, end = _longest(kinds, least)
    for section in (range(first), range(first, begin), range(end, len(names))):
        for _, run in groupby(section, key=kinds.__getitem__):
            inside = [at for at in [*run][1:-1] if least <= at < len(names) - LAST]
            if len(inside) > 1:
                traced, *left_out = (names[at] for at in inside)
                yield Period((traced,), tuple(left_out), names[inside[-1] + 1])
    if begin < end:
        yield Period(tuple(names[first:begin]), tuple(names[begin:end]), names[end])


def _longest(kinds: Sequence[Hashable], least: int) -> tuple[int, int, int]:
    """Return where the period in the middle begins, and where those begin and end that are left out behind it.

    Where no period can be left out, all three are the number of layers.
    """
    num_layers = len(kinds)
    for size in range(1, num_layers):
        first = max(least, size)
        begin = first + size
        end = begin + (num_layers - LAST - begin) // size * size
        if end <= begin:
            break
        if all(kinds[at] == kinds[at + size] for at in range(first, num_layers - LAST - size)):
            return first, begin, end
    return num_layers, num_layers, num_layers


@dataclass
class Arguments:
    """The storages of the layers' arguments besides the hidden states, after each run; and the modules in ``unused``.

    The references keep an address from being used again, so that no storage of a later run is taken for an argument.
    """

    references: list[StorageWeakRef] = field(default_factory=list)
    of_runs: list[set[int]] = field(default_factory=list)
    unused: set[nn.Module] = field(default_factory=set)

    def end_run(self) -> None:
        """Keep the storages of the run that has ended."""
        self.of_runs.append({reference.cdata for reference in self.references})


@contextmanager
def left_out(model: nn.Module, repeats: Repeats) -> Iterator[Arguments]:
    """Let the layers of ``repeats`` return their input, in the form in which those before them return theirs.

    Raises:
        Irregular: a layer returns more than a tensor of its input's shape.
    """
    forms: dict[str, type] = {}
    arguments = Arguments()

    def note(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call, state = split_call(module, module.forward, args, kwargs)
        first, *others = output if isinstance(output, tuple) else (output,)
        if len(state) != 1 or others or not isinstance(first, Tensor) or first.shape != state[0].shape:
            raise Irregular(f"{name} returns more than its hidden states")
        forms[name] = type(output)
        tensors = tensors_in((call.args, call.kwargs))
        arguments.references.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)

    def pass_on(module: nn.Module, like: str, *args: Any, **kwargs: Any) -> Any:
        if like not in forms:
            raise Irregular(f"{like} has not run")
        _, state = split_call(module, type(module).forward, args, kwargs)
        return state if forms[like] is tuple else state[0]

    with ExitStack() as undo:
        for name in set(repeats.like.values()):
            hook = model.get_submodule(name).register_forward_hook(partial(note, name), with_kwargs=True)
            undo.callback(hook.remove)
        for name, like in repeats.like.items():
            module = model.get_submodule(name)
            undo.enter_context(replaced(module, "forward", partial(pass_on, module, like)))
            arguments.unused.update(module.modules())
        yield arguments


def expanded(trace: StepTrace, repeats: Repeats, shared: set[int]) -> StepTrace:
    """Make the trace of all layers from that of some: rule 3 of the NOTE.

    Args:
        shared: the storages of the layers' arguments.

    Raises:
        Irregular: the model does something between two layers that are alike.
    """
    for period in repeats.periods:
        trace = _Expansion(trace, period, shared).trace()
    return trace


class _Expansion:
    """A trace with copies of one period behind it."""

    def __init__(self, trace: StepTrace, period: Period, shared: set[int]) -> None:
        at = {part.block: index for index, part in enumerate(trace.parts) if part.block is not None}
        first, behind = at[period.traced[0]], at[period.behind]
        if behind - first != len(period.traced) or trace.parts[first - 1].block is None:
            raise Irregular(f"a part of the model is between {period.traced[0]} and {period.behind}")
        self.readings, self.ends, self.period = trace.memory, trace.ends, period
        self.variables_bytes = trace.variables_bytes
        self.before, self.parts, self.behind = trace.parts[:first], trace.parts[first:behind], trace.parts[behind:]
        self.forward = self.parts[0].forward, self.behind[0].forward
        self.backward = _backward(self.parts[-1]), _backward(self.before[-1])
        known = shared | {storage for part in self.before for storage in _storages(part)}
        self.own = {storage for part in self.parts for storage in _storages(part)} - known
        self.flowing = dict(zip(self.parts[0].inputs, self.parts[-1].outputs, strict=False))
        if len(self.parts[0].inputs) != 1 or len(self.parts[-1].outputs) != 1:
            raise Irregular(f"{period.traced[0]} takes or returns more than its hidden states")

    def trace(self) -> StepTrace:
        """Return the whole trace."""
        memory = self._memory()
        return StepTrace(
            parts=list(self._all_parts()),
            ends=Ends(*map(self._moved, self.ends)),
            memory=memory,
            seconds=[[reading.seconds or 0.0 for reading in memory[1:]]],
            variables_bytes=self.variables_bytes,
        )

    @property
    def added_bytes(self) -> int:
        """Left behind by the forward of a period."""
        begin, end = self.forward
        return self.readings[end].live_bytes - self.readings[begin].live_bytes

    def _memory(self) -> list[Reading]:
        (begin, end), (down, up), copies = self.forward, self.backward, self.period.copies
        added = self.added_bytes
        freed = self.readings[up].live_bytes - self.readings[down].live_bytes
        memory = self.readings[: end + 1]
        for copy in range(1, copies + 1):
            memory = memory + _raised(self.readings[begin + 1 : end + 1], copy * added)
        memory += _raised(self.readings[end + 1 : down + 1], copies * added)
        for copy in range(copies):
            memory += _raised(self.readings[down + 1 : up + 1], copies * added + copy * freed)
        return memory + _raised(self.readings[down + 1 :], copies * (added + freed))

    def _moved(self, boundary: int) -> int:
        """Return the number of a boundary that is not in a copy."""
        (begin, end), (down, up), copies = self.forward, self.backward, self.period.copies
        return boundary + copies * ((end - begin) * (boundary >= end) + (up - down) * (boundary >= down))

    def _all_parts(self) -> Iterator[Part]:
        yield from map(self._moved_part, [*self.before, *self.parts])
        known = {storage for part in [*self.before, *self.parts, *self.behind] for storage in _storages(part)}
        new = count(min(0, *known) - 1, -1)  # numbers that no storage has
        last: Mapping[int, int] = {}
        for copy in range(self.period.copies):
            own = {storage: next(new) for storage in sorted(self.own)}
            flowing = {taken: last.get(given, given) for taken, given in self.flowing.items()}
            for position, part in enumerate(self.parts):
                name = self.period.left_out[copy * len(self.parts) + position]
                copied = self._copied(part, copy)
                yield _renamed(copied, own | flowing, name, (copy + 1) * self.added_bytes)
            last = own
        given = {storage: last[storage] for storage in self.flowing.values()}
        for part in self.behind:
            if self.own & _storages(part) - given.keys():
                raise Irregular(f"{part.block} takes more of {self.period.traced[-1]} than its hidden states")
            yield _renamed(self._moved_part(part), given, part.block, self.period.copies * self.added_bytes)

    def _moved_part(self, part: Part) -> Part:
        backward = None if part.backward is None else self._moved(part.backward)
        return replace(part, forward=self._moved(part.forward), backward=backward)

    def _copied(self, part: Part, copy: int) -> Part:
        """Return a part of a copy; the backward of the last copy comes first."""
        (begin, end), (down, up), copies = self.forward, self.backward, self.period.copies
        backward = _backward(part) + copies * (end - begin) + (copies - 1 - copy) * (up - down)
        return replace(part, forward=part.forward + (copy + 1) * (end - begin), backward=backward)


def _backward(part: Part) -> int:
    if part.backward is None:
        raise Irregular(f"{part.block} has no backward")
    return part.backward


def _raised(readings: Sequence[Reading], num_bytes: int) -> list[Reading]:
    return [replace(r, live_bytes=r.live_bytes + num_bytes, peak_bytes=r.peak_bytes + num_bytes) for r in readings]


def _storages(part: Part) -> set[int]:
    return {*part.inputs, *part.outputs, *part.saved}


def _renamed(part: Part, names: Mapping[int, int], block: str | None, added_bytes: int) -> Part:
    """Return a part with other storages, of which the readings are so many bytes higher."""

    def rename(storages: Storages) -> Storages:
        return {names.get(storage, storage): num_bytes for storage, num_bytes in storages.items()}

    return replace(
        part,
        block=block,
        until_saved_bytes=part.until_saved_bytes + added_bytes if part.until_saved_bytes else 0,
        inputs=rename(part.inputs),
        outputs=rename(part.outputs),
        saved=rename(part.saved),
        extra_args=rename(part.extra_args),
    )
