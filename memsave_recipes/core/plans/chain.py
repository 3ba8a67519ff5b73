"""A chain: the seconds and bytes of every block of a model, the input of the simulator and the solver.

The name is that of Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains"
(https://arxiv.org/abs/1911.13214). ``StaticMemory`` is what a step needs beside its chain. "Rule" means a rule of
NOTE [ the figures of a chain ].

Notes: ``docs/design/plans.md``.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from memsave_recipes.core.plans.plan import Action

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALLOCATION_BYTES = 512
"""CUDA's caching allocator rounds requests up to multiples of it (``kMinBlockSize``, CUDACachingAllocator.h)."""


def allocated_bytes(sizes: Iterable[int], device: torch.device) -> int:
    """Return the bytes that an allocator counts for tensors of these sizes; an accelerator's rounds each one up."""
    if device.type == "cpu":
        return sum(sizes)
    return ALLOCATION_BYTES * sum(-(-size // ALLOCATION_BYTES) for size in sizes)


@dataclass(frozen=True, kw_only=True)
class BlockOption:
    """The costs of a block under one action by itself; rules 4 to 6 define the bytes.

    Args:
        action: ``KEEP``, or another one that a plan may give to a single block.
        ratio: as in ``Span``.
        added_s: seconds by which a step is slower than under ``KEEP``; below 0 if it is faster.
        noise_s: the noise of ``added_s``: rule 9.
    """

    action: Action
    ratio: float | None = None
    added_s: float = 0.0
    noise_s: float = 0.0
    saved_bytes: int
    saves_input: bool
    saves_output: bool
    forward_transient_bytes: int
    backward_transient_bytes: int
    accumulated_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """The costs of one block; rules 3, 5, 7 and 8 define the bytes.

    Args:
        name: as in ``Plan.blocks``; a block without a stack has any name that people understand.
        stack: the number of its stack, which no span leaves; ``None`` if the block is always kept.
        forward_s, backward_s: seconds of its forward and its backward under ``KEEP``.
        until_saved_bytes: ``None`` if a second run does not stop before the end of its forward.
        has_backward: ``False`` if it ``is_frozen``, or no loss depends on its output. Then it never runs again, and
            what it saves is there until the forward ends.
        options: ``KEEP``, and the other actions of a single block. A block with a stack can also ``RECOMPUTE``.
    """

    name: str
    stack: int | None
    forward_s: float
    backward_s: float
    forward_noise_s: float = 0.0
    backward_noise_s: float = 0.0
    output_bytes: int
    passes_input: bool = False
    gradient_bytes: int
    tied_gradient_bytes: int = 0
    extra_args_bytes: int = 0
    until_saved_bytes: int | None = None
    untracked_bytes: int = 0
    variables_bytes: int = 0
    has_backward: bool = True
    options: tuple[BlockOption, ...]

    @property
    def is_frozen(self) -> bool:
        """Whether it saves nothing, as nothing trains in it or before it."""
        return not (self.has_backward or self.option(Action.KEEP).saved_bytes)

    @property
    def until_last_saved_bytes(self) -> int:
        """The transient up to its last saved tensor: of a first run that saves nothing, and where the second stops."""
        whole = self.option(Action.KEEP).forward_transient_bytes
        return whole if self.until_saved_bytes is None else min(whole, self.until_saved_bytes)

    @property
    def accumulating(self) -> "BlockCosts":
        """The same in a later micro-batch, whose gradients are added to earlier ones as they are made: rule 6."""
        options = (
            replace(one, backward_transient_bytes=max(0, one.backward_transient_bytes - one.accumulated_bytes))
            for one in self.options
        )
        return replace(self, options=tuple(options))

    def option(self, action: Action, ratio: float | None = None) -> BlockOption:
        """Return its costs under ``action``.

        Raises:
            ValueError: the chain has none for it.
        """
        for option in self.options:
            if option.action is action and option.ratio == ratio:
                return option
        raise ValueError(f"the chain has no costs of {action.value} for {self.name}")


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A model's blocks with their costs, and the memory that no block accounts for.

    Args:
        blocks: in the order of the forward: rule 1.
        resident_bytes: parameters, buffers, optimizer state, batch: rule 2.
        gradients_resident: whether the parameter gradients of an earlier micro-batch are there from the start, as
            under accumulation. They are not in ``resident_bytes`` in either case.
        optimizer_bytes: temporaries of the optimizer's update, besides parameters, gradients and its state.
        span_bytes: the random state that a span that recomputes holds until its backward is done, and another one
            during its second run. Both are in host memory, so it is 0 unless the device is the CPU.
        extra_args_bytes: those of all blocks (masks and positions, say), each storage once. They are held if any block
            runs twice.
        compiled: whether the layers are compiled.
        micro_batch_size, mlp_tile_tokens: those of options in micro-batches or with tiles, if there are any.
        noise_s: the noise of all blocks together; less than the sum of theirs, as their errors differ.
        host_bytes: memory of the host that is pinned all the time, for frozen weights that are streamed from it.
        nested: whether plans may have ``RECOMPUTE_NESTED`` spans.
    """

    blocks: tuple[BlockCosts, ...]
    resident_bytes: int
    gradients_resident: bool = False
    optimizer_bytes: int = 0
    span_bytes: int = 0
    extra_args_bytes: int = 0
    compiled: bool = False
    micro_batch_size: int | None = None
    mlp_tile_tokens: int | None = None
    noise_s: float = 0.0
    host_bytes: int = 0
    nested: bool = False

    @cached_property
    def decided(self) -> tuple[int, ...]:
        """The positions of the blocks that a plan decides about."""
        return tuple(position for position, block in enumerate(self.blocks) if block.stack is not None)

    @property
    def decided_names(self) -> tuple[str, ...]:
        """The names of the blocks that a plan decides about: ``Plan.blocks`` of a plan for this chain."""
        return tuple(self.blocks[position].name for position in self.decided)

    @property
    def static_bytes(self) -> int:
        """``resident_bytes``, with the parameter gradients where these are resident."""
        return self.resident_bytes + (self.all_gradients_bytes if self.gradients_resident else 0)

    @property
    def states_bytes(self) -> list[int]:
        """The bytes of every block's input (the first has 0, as the batch is resident), and of the last output."""
        states = [0]
        for block in self.blocks:
            states.append(block.output_bytes + (states[-1] if block.passes_input else 0))
        return states

    def new_gradients_bytes(self, *blocks: BlockCosts) -> int:
        """Return the bytes of parameter gradients that the backward of ``blocks`` leaves behind: rule 7."""
        if self.gradients_resident:
            return sum(block.tied_gradient_bytes for block in blocks)
        return sum(block.gradient_bytes for block in blocks)

    def nested_option(self, position: int) -> BlockOption:
        """Return the costs of a block in a nested span: the measured ones, or those of recomputing by itself."""
        block = self.blocks[position]
        keep = block.option(Action.KEEP)
        with suppress(ValueError):
            return block.option(Action.RECOMPUTE_NESTED)
        rebuilt_bytes = keep.saved_bytes + (block.output_bytes if keep.saves_output else 0)
        return BlockOption(
            action=Action.RECOMPUTE_NESTED,
            added_s=block.forward_s,
            noise_s=block.forward_noise_s,
            saved_bytes=self.span_bytes,
            saves_input=True,
            saves_output=False,
            forward_transient_bytes=keep.forward_transient_bytes,
            backward_transient_bytes=max(
                block.until_last_saved_bytes + block.untracked_bytes + self.span_bytes,
                rebuilt_bytes + keep.backward_transient_bytes,
            ),
        )

    @property
    def all_gradients_bytes(self) -> int:
        """The parameter gradients of all blocks."""
        return sum(block.gradient_bytes for block in self.blocks)


@dataclass(frozen=True, kw_only=True)
class StaticMemory:
    """The static memory of a step that a measured chain lacks: optimizer state, DDP's buckets, sums of gradients.

    Args:
        state_bytes: optimizer state that stays on the device, with an average of the weights.
        buckets_bytes: DDP's gradient buckets.
        sums_bytes: sums of earlier gradients that are there when a micro-batch begins: ``GradientSums``; shards of
            gradients, if each micro-batch is reduced; or earlier gradients on their way to the host.
        exchange_bytes: ``GradientSums.exchanged_bytes``.
        gradients_resident: whether the gradients of an earlier micro-batch exist when a micro-batch begins.
        gradients_stay: whether a parameter's gradient outlives the backward of its block. One that is copied into a
            bucket of DDP, or used by an optimizer in the backward, does not.
        leaving_bytes: for gradients that are copied to the host or used up as they are made: the most that is there at
            a time, besides the newest one and ``sums_bytes``. ``None`` for other gradients, also if DDP takes them.
        optimizer_bytes: temporaries of the optimizer's update, with state that visits the device for it; or what ranks
            exchange just before it.
        in_backward: the same for each parameter that is stepped in the backward, by its name.
        losses_bytes: the losses and norms of steps until they are logged.
        remote_bytes: weights that other ranks hold.
        host_bytes: memory of the host for the optimizer, for what waits there or is stepped there.
        awaited_bytes: copied between host and device in a step while the device waits.
        updated_bytes: read and written by the host when it steps.
        updates_in_backward: whether the host steps beside the backward.
        device_updated_bytes: read and written by the device to clip the gradients and to step.
        adding_bytes: read and written by the device to add the gradients of a further micro-batch.
    """

    state_bytes: int = 0
    buckets_bytes: int = 0
    sums_bytes: int = 0
    exchange_bytes: int = 0
    gradients_resident: bool = False
    gradients_stay: bool = True
    leaving_bytes: int | None = None
    optimizer_bytes: int = 0
    in_backward: Mapping[str, int] = field(default_factory=dict)
    losses_bytes: int = 0
    remote_bytes: int = 0
    host_bytes: int = 0
    awaited_bytes: int = 0
    updated_bytes: int = 0
    updates_in_backward: bool = False
    device_updated_bytes: int = 0
    adding_bytes: int = 0

    @property
    def communication_bytes(self) -> int:
        """Buffers of DDP and between ranks."""
        return self.buckets_bytes + self.exchange_bytes

    @property
    def added_bytes(self) -> int:
        """The bytes that are there all the time, besides gradients."""
        return self.state_bytes + self.communication_bytes + self.sums_bytes + self.losses_bytes

    def added_to(self, chain: Chain) -> Chain:
        """Return ``chain`` with this memory in it."""
        leave = self.leaving_bytes is not None
        blocks = chain.blocks
        if leave:
            blocks = self._leaving(blocks)
        elif not self.gradients_stay:
            blocks = tuple(replace(block, gradient_bytes=0) for block in blocks)
        stacks = tuple(f"{name}." for name in chain.decided_names)
        return replace(
            chain,
            blocks=tuple(self._stepping(block, stacks) for block in blocks),
            resident_bytes=chain.resident_bytes - self.remote_bytes + self.added_bytes,
            gradients_resident=self.gradients_resident or not (self.gradients_stay or leave),
            optimizer_bytes=self.optimizer_bytes,
            host_bytes=chain.host_bytes + self.host_bytes,
        )

    def _leaving(self, blocks: Sequence[BlockCosts]) -> tuple[BlockCosts, ...]:
        """Return ``blocks`` with at most ``leaving_bytes`` of gradients at a time, besides those of tied weights."""
        free_bytes, found = self.leaving_bytes or 0, []
        for block in reversed(blocks):
            stays = min(block.gradient_bytes - block.tied_gradient_bytes, free_bytes)
            pairs = zip(block.options, block.accumulating.options, strict=True)
            peaks = [(one, one.backward_transient_bytes, low.backward_transient_bytes + stays) for one, low in pairs]
            options = tuple(replace(one, backward_transient_bytes=min(high, low)) for one, high, low in peaks)
            found.append(replace(block, options=options, gradient_bytes=stays + block.tied_gradient_bytes))
            free_bytes -= stays
        return tuple(reversed(found))

    def _stepping(self, block: BlockCosts, stacks: tuple[str, ...]) -> BlockCosts:
        """Return ``block`` with the largest update of a parameter added to the peak of its backward.

        Args:
            stacks: the prefixes of the names of parameters in blocks of stacks.
        """
        own = () if block.stack is None else (f"{block.name}.",)  # without a stack: all parameters outside of stacks
        sizes = (size for name, size in self.in_backward.items() if name.startswith(own or stacks) is bool(own))
        largest = max(sizes, default=0)
        options = (replace(o, backward_transient_bytes=o.backward_transient_bytes + largest) for o in block.options)
        return replace(block, options=tuple(options)) if largest else block
