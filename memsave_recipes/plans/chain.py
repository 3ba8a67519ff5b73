"""A chain: the seconds and bytes of every block of a model, the input of the simulator and the solver.

The name is that of Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains"
(https://arxiv.org/abs/1911.13214). ``profiling`` makes a chain from a measured step, ``estimate`` from a simulated one.

NOTE [ the figures of a chain ]
1. The blocks stand in the order in which they run and cover the *whole* forward, the loss included. Parts that no plan
   decides about (embeddings before the layers, pooling between two stacks, head and loss) are blocks with
   ``stack=None``. So the input of a block is the output of the block before, and the input of the first is the batch.
2. Bytes are those of storages, each counted once, as the device's allocator counts them (``allocated_bytes``).
   Parameters, buffers, optimizer state and the batch are ``resident_bytes`` and appear nowhere else, also where a block
   saves them or hands them on.
3. ``output_bytes``: the storages that leave the block and are not among its inputs. A view has 0 and ``passes_input``;
   a layer of a dense block has its one new feature map and ``passes_input``, as the older maps leave it too.
4. ``saved_bytes``: saved for backward *besides* input and output. Whether it saves these is ``saves_input`` (a
   convolution does) and ``saves_output`` (a ReLU does). So a map that one block saves as its output and the next as its
   input counts once.
5. ``forward_transient_bytes``: the highest live bytes in its forward, with gradients on, less the live bytes when it
   began (its input and its ``beside_bytes`` live then: arguments besides the state, that the baseline does not save).
   Output, saved bytes and workspaces are in it.
   ``until_saved_bytes`` are the same up to the last tensor that it saves: there a second run ends, as torch stops it.
6. ``backward_transient_bytes``: the highest live bytes in its backward less the live bytes when that began. Live then:
   its saved tensors, and the gradient of its output, taken to be as large as all that leaves the block. The transient
   includes the gradient of its input, the gradients of its parameters (as if there were none before), their
   temporaries, workspaces, and the tensors that an option brings back. It is less by ``accumulated_bytes`` where
   there are gradients of an earlier micro-batch, as each new one is gone when it has been added to them.
7. ``gradient_bytes``: the parameter gradients that are there after its backward and were not before. A tied weight
   counts where its gradient is born: in the later of its blocks. ``tied_gradient_bytes`` of them wait there for the
   gradient of the earlier use, even where the gradients of an earlier micro-batch are there already.
8. ``untracked_bytes``: the live bytes when its backward first reads what it saved that rule 6 does not name: the loss,
   the gradient of an argument that all layers share, that of its output in another dtype. They are in the transient of
   its backward, and live while its span runs again, which that reading starts.
   ``variables_bytes``: likewise when its forward begins, what variables of the model hold.
9. A storage that several blocks save (a mask, rotary tables) is in the ``saved_bytes`` of the block that makes it, and
   in no other's.
10. Measured seconds have a noise: the standard error of the figure, 0 where seconds are computed. The solver adds it to
   the seconds that a plan adds, block by block, as if all of them were too low. So a plan is chosen where it is surely
   no slower than another one; keeping everything, which adds nothing, wins every tie.
11. The option ``RECOMPUTE_NESTED`` of a block is that of one by itself, of which the second run goes part by part where
   it has parts. In a span of several blocks each of them has these costs in its last run.
"""

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from memsave_recipes.plans.plan import Action

ALLOCATION_BYTES = 512
"""CUDA's caching allocator rounds requests up to multiples of it (``kMinBlockSize``, CUDACachingAllocator.h)."""


def allocated_bytes(sizes: Iterable[int], *, on_cpu: bool) -> int:
    """The bytes that an allocator counts for tensors of these sizes: on an accelerator, in whole blocks each."""
    return sum(sizes) if on_cpu else ALLOCATION_BYTES * sum(-(-size // ALLOCATION_BYTES) for size in sizes)


@dataclass(frozen=True, kw_only=True)
class BlockOption:
    """One way to run a block by itself; rules 4 to 6 of the NOTE define the bytes.

    Args:
        action: ``KEEP``, or another one that a plan may give to a single block.
        added_s: seconds that a step takes longer than with ``KEEP``; below 0 where it is faster.
        noise_s: of ``added_s``; rule 10 of the NOTE.
        saved_bytes: saved on the device besides input and output.
        saves_input, saves_output: whether it holds its input, its output.
        forward_transient_bytes, backward_transient_bytes: the peaks of its forward and backward above their start.
        accumulated_bytes: by which the latter is less under accumulation.

    Raises:
        ValueError: a figure that no measurement gives.
    """

    action: Action
    added_s: float = 0.0
    noise_s: float = 0.0
    saved_bytes: int
    saves_input: bool
    saves_output: bool
    forward_transient_bytes: int
    backward_transient_bytes: int
    accumulated_bytes: int = 0

    def __post_init__(self) -> None:
        _check_not_negative(self, "noise_s", "saved_bytes", "forward_transient_bytes", "backward_transient_bytes")
        _check_not_negative(self, "accumulated_bytes")
        if self.action is Action.RECOMPUTE:
            raise ValueError("RECOMPUTE is no option: its costs follow from those of KEEP")
        if not math.isfinite(self.added_s) or (self.action is Action.KEEP and self.added_s):
            raise ValueError(f"added_s of {self.action.value} cannot be {self.added_s}")


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """The costs of one block.

    Args:
        name: as in ``Plan.blocks``; of a block without a stack, any name that people understand.
        stack: the number of its stack, which no span leaves; ``None`` if it is always kept.
        forward_s, backward_s: seconds of its forward and its backward when kept.
        forward_noise_s, backward_noise_s: of these; rule 10 of the NOTE.
        output_bytes, passes_input: rule 3 of the NOTE.
        gradient_bytes, tied_gradient_bytes: rule 7 of the NOTE.
        beside_bytes, until_saved_bytes: rule 5 of the NOTE; without the second, all of its forward.
        untracked_bytes, variables_bytes: rule 8 of the NOTE.
        options: ``KEEP``, and the other actions of a single block. A block with a stack can also ``RECOMPUTE``.

    Raises:
        ValueError: a figure that no measurement gives, no ``KEEP``, or two options with one action.
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
    beside_bytes: int = 0
    until_saved_bytes: int | None = None
    untracked_bytes: int = 0
    variables_bytes: int = 0
    options: tuple[BlockOption, ...]

    def __post_init__(self) -> None:
        _check_not_negative(self, "forward_s", "backward_s", "output_bytes", "gradient_bytes", "tied_gradient_bytes")
        _check_not_negative(self, "forward_noise_s", "backward_noise_s", "beside_bytes", "untracked_bytes")
        _check_not_negative(self, "variables_bytes")
        if self.until_saved_bytes is not None:
            _check_not_negative(self, "until_saved_bytes")
        actions = [option.action for option in self.options]
        if Action.KEEP not in actions or len(set(actions)) < len(actions):
            raise ValueError(f"{self.name} needs the option KEEP, and each option once")
        if self.stack is None and len(actions) > 1:
            raise ValueError(f"{self.name} has no stack, so it can only be kept")

    @property
    def last_of_span_bytes(self) -> int:
        """The transient of its second run where it is the last block of a span."""
        whole = self.option(Action.KEEP).forward_transient_bytes
        return whole if self.until_saved_bytes is None else min(whole, self.until_saved_bytes)

    @property
    def accumulating(self) -> "BlockCosts":
        """The same in a later micro-batch, whose gradients are added to those of an earlier one as they are made."""
        options = (
            replace(one, backward_transient_bytes=max(0, one.backward_transient_bytes - one.accumulated_bytes))
            for one in self.options
        )
        return replace(self, options=tuple(options))

    def option(self, action: Action) -> BlockOption:
        """Its costs under ``action``.

        Raises:
            ValueError: the chain has none for it.
        """
        for option in self.options:
            if option.action is action:
                return option
        raise ValueError(f"the chain has no costs of {action.value} for {self.name}")


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A model's blocks with their costs, and the memory that no block accounts for.

    Args:
        blocks: in the order of the forward; rule 1 of the NOTE.
        resident_bytes: parameters, buffers, optimizer state, batch: there all the time.
        gradients_resident: whether the parameter gradients of an earlier micro-batch are there from the start, as
            under accumulation. They are not in ``resident_bytes`` in either case.
        optimizer_bytes: temporaries of the optimizer's update, besides parameters, gradients and its state.
        span_bytes: held by each span that recomputes besides its input until its backward is done, and once more while
            it runs again: the state of the random number generator, 5,056 bytes where the CPU is the device and 0
            elsewhere, as it stays on the host.
        beside_bytes: of all blocks, each storage once: masks and positions, say. Held where any block runs twice.
        compiled_memory_ratio: of the plan that the options ``COMPILE`` were measured under, if there are any.
        micro_batch_size, mlp_tile_tokens: likewise of actions in micro-batches and of those with tiles.
        noise_s: of the seconds of all blocks together; rule 10 of the NOTE. Less than the sum over the blocks, whose
            errors differ.
        host_bytes: pinned all the time: frozen weights that are streamed from there.
        nested: whether spans may recompute block by block in their second run.

    Raises:
        ValueError: no blocks, a negative figure, or a stack whose blocks are not neighbours.
    """

    blocks: tuple[BlockCosts, ...]
    resident_bytes: int
    gradients_resident: bool = False
    optimizer_bytes: int = 0
    span_bytes: int = 0
    beside_bytes: int = 0
    compiled_memory_ratio: float | None = None
    micro_batch_size: int | None = None
    mlp_tile_tokens: int | None = None
    noise_s: float = 0.0
    host_bytes: int = 0
    nested: bool = False

    def __post_init__(self) -> None:
        _check_not_negative(self, "resident_bytes", "optimizer_bytes", "span_bytes", "beside_bytes", "noise_s")
        if not self.blocks:
            raise ValueError("a chain needs at least one block")
        if self.beside_bytes < max(block.beside_bytes for block in self.blocks):
            raise ValueError(f"beside_bytes of a block cannot be more than {self.beside_bytes}, those of all")
        stacks = [block.stack for block in self.blocks]
        starts = [stack for i, stack in enumerate(stacks) if stack is not None and (i == 0 or stacks[i - 1] != stack)]
        if len(set(starts)) < len(starts):
            raise ValueError("the blocks of a stack must be neighbours in the chain")

    @property
    def decided(self) -> tuple[int, ...]:
        """The positions of the blocks that a plan decides about."""
        return tuple(position for position, block in enumerate(self.blocks) if block.stack is not None)

    @property
    def decided_names(self) -> tuple[str, ...]:
        """Their names: the ``blocks`` of a plan for this chain."""
        return tuple(self.blocks[position].name for position in self.decided)

    @property
    def static_bytes(self) -> int:
        """``resident_bytes``, with the parameter gradients where these are resident."""
        return self.resident_bytes + (self.all_gradients_bytes if self.gradients_resident else 0)

    def new_gradients_bytes(self, *blocks: BlockCosts) -> int:
        """The parameter gradients that the backward of ``blocks`` leaves behind: rule 7 of the NOTE."""
        if self.gradients_resident:
            return sum(block.tied_gradient_bytes for block in blocks)
        return sum(block.gradient_bytes for block in blocks)

    def nested_option(self, position: int) -> BlockOption:
        """Of a block in a nested span: as it was measured, else that of a block which recomputes by itself."""
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
                block.last_of_span_bytes + block.untracked_bytes + self.span_bytes,
                rebuilt_bytes + keep.backward_transient_bytes,
            ),
        )

    @property
    def all_gradients_bytes(self) -> int:
        """The parameter gradients of all blocks."""
        return sum(block.gradient_bytes for block in self.blocks)


def _check_not_negative(costs: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(costs, name) < math.inf:
            raise ValueError(f"{name} cannot be {getattr(costs, name)}")
