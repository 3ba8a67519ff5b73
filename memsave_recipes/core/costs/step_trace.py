"""The chain of a model from traces of its step.

Notes: ``docs/design/costs.md``.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import hypot, sqrt
from statistics import fmean, median
from typing import NamedTuple

import torch

from memsave_recipes.core.activations.offload import SMALLEST_BYTES
from memsave_recipes.core.costs.trace_events import Ends, Part, Reading, Storages
from memsave_recipes.core.plans.chain import BlockCosts, BlockOption, Chain
from memsave_recipes.core.plans.plan import AS_IT_IS, Action, Way
from memsave_recipes.core.plans.simulate import keep_all, timeline, with_pinning

RANDOM_STATE_BYTES = 5056  # of the CPU's generator; every checkpoint keeps it, on the host whatever the device is
MIN_ADDED = 0.01  # of a block's forward: running an operator twice is not faster, whatever the clock says
MIN_RUNS = 3  # to tell a noise from


@dataclass(frozen=True)
class StepTrace:
    """A step under one action: its parts, the bytes at its boundaries, and the seconds between them, run by run.

    ``variables_bytes`` are those of rule 5 of NOTE [ the parts of a step ].
    """

    parts: list[Part]
    ends: Ends
    memory: list[Reading]
    seconds: list[list[float]]
    variables_bytes: int = 0

    @property
    def running(self) -> dict[str, bool]:
        """The names of the blocks that ran, and whether a backward may come to each: a later one need not read it."""
        return {part.block: part.needs_gradient for part in self.parts if part.block is not None}

    @property
    def step(self) -> "Seconds":
        """The seconds of the whole step."""
        return Seconds.of([[sum(run) for run in self.seconds]])


class Seconds(NamedTuple):
    """A time and its noise: rule 3 of the NOTE."""

    time_s: float
    noise_s: float

    @classmethod
    def of(cls, alike: Sequence[Sequence[float]]) -> "Seconds":
        """Pool the seconds of blocks that are alike, of each one run by run."""

        def time_s(runs: Sequence[int]) -> float:
            faster = [sorted(block[run] for run in runs)[: (len(runs) + 1) // 2] for block in alike]
            return median(map(fmean, faster))

        num_runs = len(alike[0])
        return cls(time_s(range(num_runs)), _standard_error(time_s, num_runs))


def _standard_error(figure: Callable[[Sequence[int]], float], num_runs: int) -> float:
    """Leave out each run of a figure in turn; 0 where the runs are too few to say."""
    if num_runs < MIN_RUNS:
        return 0.0
    without_one = [figure([run for run in range(num_runs) if run != left_out]) for left_out in range(num_runs)]
    mean = fmean(without_one)
    return sqrt((num_runs - 1) / num_runs * sum((value - mean) ** 2 for value in without_one))


def chain_of(
    traces: dict[Way, StepTrace],
    *,
    stack_of: dict[str, int],
    resident_bytes: int,
    device: torch.device,
    compiled: bool,
    kinds: Mapping[str, Hashable],
    num_parts: Mapping[str, int],
) -> Chain:
    """Make the chain of a step that was traced under ``KEEP`` and under other actions.

    Args:
        stack_of: the number of the stack of every block.
        compiled: whether the layers computed compiled.
        device: of the step; on a CPU the state of the random number generator counts, which lives there.
        kinds: a value for each block, equal for those that are alike; of blocks without one only the bytes count.
        num_parts: of blocks that recompute part by part; each part has a checkpoint of its own.
    """
    random_state_bytes = RANDOM_STATE_BYTES if device.type == "cpu" else 0
    baseline = traces[AS_IT_IS]
    extra_args = _extra_args(baseline.parts)
    if offloaded := {way: trace for way, trace in traces.items() if way[0].kind.on_host}:
        for way, trace in offloaded.items():
            parts = list(_with_storages_left_on_device(way[0], trace.parts, baseline.parts))
            traces = {**traces, way: replace(trace, parts=parts)}
        resident_bytes += 2 * max(_most_moved_bytes(action, baseline.parts) for action, _ in offloaded)
    between = {way: _saved_between_blocks(trace.parts) for way, trace in traces.items()}
    in_part = (num_bytes for (action, _), num_bytes in between.items() if action is Action.COMPILE)
    resident_bytes += max([between[AS_IT_IS], *in_part]) - between[AS_IT_IS]
    chains = {
        way: _chain_under_one_action(
            run,
            stack_of,
            kinds,
            checkpoint_bytes=random_state_bytes if way[0].kind.runs_twice else 0,
            num_parts=num_parts if way[0] is Action.RECOMPUTE_NESTED else {},
            extra_args_bytes=sum(extra_args.values()) if way[0].kind.runs_twice else 0,
        )
        for way, run in traces.items()
    }
    kept = chains.pop(AS_IT_IS)
    blocks = _without_extra_args(kept.blocks, baseline.parts, extra_args)
    for way, chain in chains.items():
        by_name = {block.name: block for block in chain.blocks}
        for position in kept.decided:
            block = blocks[position]
            option = _option(way, by_name[block.name], kept.blocks[position])
            variables_bytes = max(0, baseline.variables_bytes - traces[way].variables_bytes)
            option = replace(option, forward_transient_bytes=option.forward_transient_bytes + variables_bytes)
            blocks[position] = replace(block, options=(*block.options, option))
    return replace(
        kept,
        blocks=tuple(blocks),
        resident_bytes=resident_bytes,
        span_bytes=random_state_bytes,
        extra_args_bytes=sum(extra_args.values()),
        compiled=compiled,
        noise_s=baseline.step.noise_s,
    )


def _option(way: Way, block: BlockCosts, kept: BlockCosts) -> BlockOption:
    """Return the option ``way`` of a block, measured with all blocks under it."""
    action, ratio = way
    added_s = block.forward_s + block.backward_s - kept.forward_s - kept.backward_s
    if action is not Action.COMPILE:
        added_s = max(added_s, MIN_ADDED * kept.forward_s)
    noise_s = hypot(*(noise for one in (block, kept) for noise in (one.forward_noise_s, one.backward_noise_s)))
    return replace(block.option(Action.KEEP), action=action, ratio=ratio, added_s=added_s, noise_s=noise_s)


def _without_extra_args(blocks: Sequence[BlockCosts], parts: Sequence[Part], extra_args: Storages) -> list[BlockCosts]:
    """Take the storages ``extra_args`` out of the transients of the blocks under ``KEEP``."""
    less = []
    for block, part in zip(blocks, parts, strict=True):
        taken = sum(size for storage, size in extra_args.items() if storage in part.extra_args)
        (option,) = block.options
        bytes_without = max(0, option.forward_transient_bytes - taken)
        until_saved = max(0, (block.until_saved_bytes or 0) - taken)
        kept = replace(option, forward_transient_bytes=bytes_without)
        less.append(replace(block, extra_args_bytes=taken, until_saved_bytes=until_saved, options=(kept,)))
    return less


def _chain_under_one_action(
    trace: StepTrace,
    stack_of: dict[str, int],
    kinds: Mapping[str, Hashable],
    *,
    checkpoint_bytes: int,
    num_parts: Mapping[str, int],
    extra_args_bytes: int,
) -> Chain:
    """Make a chain as if the action were to keep: with no other option, nothing resident but ``extra_args_bytes``.

    Args:
        checkpoint_bytes: that every block under it holds besides tensors, and each of its ``num_parts``.
        extra_args_bytes: that all of them together hold.
    """
    parts = trace.parts
    described = zip(parts, _attributed(parts), _names(parts), _stacks(parts, stack_of), strict=True)
    checkpoints = [checkpoint_bytes * (1 + num_parts.get(part.block, 0)) if part.block else 0 for part in parts]
    blocks = tuple(
        _without_transients(part, sum(own.values()) + of_checkpoints, name, stack)
        for of_checkpoints, (part, own, name, stack) in zip(checkpoints, described, strict=True)
    )
    chain = _with_transients(Chain(blocks=blocks, resident_bytes=extra_args_bytes), trace)
    return replace(chain, blocks=tuple(_with_seconds(chain.blocks, trace, kinds)))


def _without_transients(part: Part, saved_bytes: int, name: str, stack: int | None) -> BlockCosts:
    new = part.outputs.keys() - part.inputs.keys()
    option = BlockOption(
        action=Action.KEEP,
        saved_bytes=saved_bytes,
        saves_input=bool(part.saved.keys() & part.inputs.keys()),
        saves_output=bool(part.saved.keys() & new),
        forward_transient_bytes=0,
        backward_transient_bytes=0,
        accumulated_bytes=part.accumulated_bytes,
    )
    return BlockCosts(
        name=name,
        stack=stack,
        forward_s=0.0,
        backward_s=0.0,
        output_bytes=sum(part.outputs[storage] for storage in new),
        passes_input=bool(part.outputs.keys() & part.inputs.keys()),
        gradient_bytes=part.gradient_bytes,
        tied_gradient_bytes=part.tied_gradient_bytes,
        has_backward=part.backward is not None,
        options=(option,),
    )


def _with_storages_left_on_device(action: Action, offloaded: Sequence[Part], kept: Sequence[Part]) -> Iterator[Part]:
    """Add small storages, and an output that the block saves itself: rule 4 of the NOTE."""
    for part, baseline, own in zip(offloaded, kept, _attributed(kept), strict=True):
        if part.block is None:
            yield part
        elif action.kind.on_host == "input":
            stays = _inputs_left_on_device(part)
            inner = {-abs(s) - 1: size for s, size in stays.items()} if action.kind.in_sublayers else {}
            yield replace(part, saved=part.saved | stays | inner)
        else:
            saves_output = baseline.saved.keys() & (baseline.outputs.keys() - baseline.inputs.keys())
            stays = {-storage: size for storage, size in own.items() if size < SMALLEST_BYTES}
            stays |= part.outputs if saves_output else {}
            stays |= _inputs_left_on_device(part) if baseline.saved.keys() & baseline.inputs.keys() else {}
            yield replace(part, saved=part.saved | stays)


def _inputs_left_on_device(part: Part) -> Storages:
    """Return small ones, and those that autograd did not make; where others move, as if the block had made them."""
    stays = {s: size for s, size in part.inputs.items() if size < SMALLEST_BYTES or s in part.leaves}
    return stays if len(stays) == len(part.inputs) else {-storage: size for storage, size in stays.items()}


def most_offloaded_bytes(baseline: StepTrace, action: Action) -> int:
    """Return the most of the host's memory that all blocks may pin under ``action``, by their trace under ``KEEP``."""
    copied: Storages = {}
    for part in baseline.parts:
        if part.block is not None:
            copied |= part.inputs if action.kind.on_host == "input" else part.saved
            copied |= {-storage: size for storage, size in part.inputs.items()} if action.kind.in_sublayers else {}
    return with_pinning(sum(size for size in copied.values() if size >= SMALLEST_BYTES))


def _most_moved_bytes(action: Action, parts: Sequence[Part]) -> int:
    """Return what the largest block moves, by the trace under ``KEEP``."""
    own = [{} for _ in parts] if action.kind.on_host == "input" else _attributed(parts)
    moved = [(saved | part.inputs).values() for part, saved in zip(parts, own, strict=True) if part.block]
    return max((sum(size for size in sizes if size >= SMALLEST_BYTES) for sizes in moved), default=0)


def _attributed(parts: Sequence[Part]) -> list[Storages]:
    """Return the storages that each part saves besides its input and output, by rule 1 of the NOTE."""
    own = [{s: size for s, size in p.saved.items() if s not in p.inputs and s not in p.outputs} for p in parts]
    savers = Counter(storage for saved in own for storage in saved)
    extra_args = {storage for part in parts for storage in part.extra_args}
    attributed: list[Storages] = [{} for _ in parts]
    done: set[int] = set()
    for position, saved in enumerate(own):
        for storage, size in saved.items():
            if storage not in done:
                owner = position
                if savers[storage] > 1 or storage in extra_args:  # the part between blocks before it
                    owner = max((at for at in range(position + 1) if parts[at].block is None), default=position)
                attributed[owner][storage] = size
                done.add(storage)
    return attributed


def _extra_args(parts: Sequence[Part]) -> Storages:
    """Return what blocks with a backward take besides their states, where the baseline does not save it."""
    running = [part for part in parts if part.backward is not None]
    extra_args = {s: size for part in running for s, size in part.extra_args.items() if s not in part.inputs}
    saved = {storage for of_part in _attributed(parts) for storage in of_part}
    return {storage: size for storage, size in extra_args.items() if storage not in saved}


def _saved_between_blocks(parts: Sequence[Part]) -> int:
    """Return the bytes that count for no block: more where compiled blocks save masks that they would not keep."""
    return sum(sum(own.values()) for part, own in zip(parts, _attributed(parts), strict=True) if part.block is None)


def _names(parts: Sequence[Part]) -> Iterator[str]:
    names = [part.name for part in parts]
    for position, name in enumerate(names):
        following = next(filter(None, names[position + 1 :]), None)
        if name is not None:
            yield name
        elif following is not None:
            yield f"the part before {following}"
        else:
            yield f"the part after {names[position - 1]}" if position else "the model"


def _stacks(parts: Sequence[Part], stack_of: dict[str, int]) -> Iterator[int | None]:
    """Number the stacks; one goes on while blocks of one of the model's stacks follow each other."""
    number, before = -1, None
    for part in parts:
        current = None if part.block is None else stack_of[part.block]
        number += current is not None and current != before
        yield None if current is None else number
        before = current


def _with_transients(chain: Chain, trace: StepTrace) -> Chain:
    simulated = [point.total_bytes for point in timeline(chain, keep_all(chain))]
    num_parts = len(trace.parts)
    in_backward = reversed(simulated[num_parts:-1])
    moments = zip(simulated[:num_parts], _forwards(trace), _backwards(trace), strict=True)
    blocks: list[BlockCosts] = []
    for block, part, (up, (start, stop), backward) in zip(chain.blocks, trace.parts, moments, strict=True):
        forward_bytes = _peak(trace.memory, start, stop) - up
        backward_bytes = untracked_bytes = 0
        if backward:
            down = next(in_backward)
            backward_bytes = _peak(trace.memory, *backward) - down
            untracked_bytes = trace.memory[backward[0]].live_bytes + part.until_read_bytes - down
        option = replace(
            block.options[0],
            forward_transient_bytes=max(0, forward_bytes),
            backward_transient_bytes=max(0, backward_bytes),
        )
        blocks.append(
            replace(
                block,
                untracked_bytes=max(0, untracked_bytes),
                variables_bytes=max(0, trace.memory[start].live_bytes - up),
                until_saved_bytes=max(0, part.until_saved_bytes - up),
                options=(option,),
            )
        )
    return replace(chain, blocks=tuple(blocks))


def _peak(memory: Sequence[Reading], start: int, stop: int) -> int:
    return max((reading.peak_bytes for reading in memory[start + 1 : stop + 1]), default=0)


def _forwards(trace: StepTrace) -> Iterator[tuple[int, int]]:
    """Yield the boundaries of the parts' forwards."""
    yield from pairwise([*(part.forward for part in trace.parts), trace.ends.forward])


def _backwards(trace: StepTrace) -> list[tuple[int, int] | None]:
    """Return the boundaries of the parts' backwards, where they have one."""
    begins = sorted(part.backward for part in trace.parts if part.backward is not None)
    ends = dict(pairwise([*begins, trace.ends.backward]))
    return [None if part.backward is None else (part.backward, ends[part.backward]) for part in trace.parts]


def _with_seconds(
    blocks: Sequence[BlockCosts], trace: StepTrace, kinds: Mapping[str, Hashable]
) -> Iterator[BlockCosts]:
    alike = [
        (b.stack is None and b.name, kinds.get(b.name), b.output_bytes, b.gradient_bytes, b.options[0].saved_bytes)
        for b in blocks
    ]
    forward = _pooled(alike, [_seconds(trace, moment) for moment in _forwards(trace)])
    backward = _pooled(alike, [_seconds(trace, moment) for moment in _backwards(trace)])
    for block, up, down in zip(blocks, forward, backward, strict=True):
        yield replace(
            block,
            forward_s=up.time_s,
            backward_s=down.time_s,
            forward_noise_s=up.noise_s,
            backward_noise_s=down.noise_s,
        )


def _seconds(trace: StepTrace, moment: tuple[int, int] | None) -> list[float]:
    """Add up the seconds of a moment run by run; 0 where a part has no backward."""
    start, stop = moment or (0, 0)
    return [sum(run[start:stop], start=0.0) for run in trace.seconds]


def _pooled(alike: Sequence[Hashable], seconds: Sequence[list[float]]) -> list[Seconds]:
    """Return the seconds of each block; ``alike`` has equal values for those that share theirs."""
    pools: dict[Hashable, list[list[float]]] = defaultdict(list)
    for key, of_block in zip(alike, seconds, strict=True):
        pools[key].append(of_block)
    found = {key: Seconds.of(of_blocks) for key, of_blocks in pools.items()}
    return [found[key] for key in alike]
