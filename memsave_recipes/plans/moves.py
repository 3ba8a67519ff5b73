"""The plans of a chain as paths: a *move* runs the next blocks under one action, a path of moves is a plan.

NOTE [ all that the future needs to know ]
1. Whether a move fits depends on the moves before it through two figures alone, the ``Load``: ``HELD``, the bytes that
   earlier blocks hold until their backward, and ``WITH_STATE``, the same with all of the *current state* (what flows
   into the next block) counted in. The state may be held already, in whole or in part, and each storage counts once.
2. What else lives beside them while the move runs, forward and backward, depends on the move alone. The gradients of
   parameters that live in its backward are those of all later blocks, whatever the plan.
3. Every figure after a move grows with the figures before it. So of two paths to one block, the one that adds no more
   seconds and is no larger in either figure is as good in every continuation: the other can be dropped, and the best
   path is still found.
4. Seconds are counted in whole ticks, a billionth of plain's forward: then sums of the same seconds in another order
   are equal, and ties are seen as ties.
"""

from typing import NamedTuple, TypeAlias

from memsave_recipes.plans.chain import Chain, Option
from memsave_recipes.plans.plan import Action

HELD, WITH_STATE = 0, 1

Load: TypeAlias = tuple[int, int]
"""The two figures of the NOTE, ``load[HELD] <= load[WITH_STATE]``, in bytes beside what is there all the time."""

EMPTY: Load = (0, 0)
"""Before the first block, whose input is the batch and resident."""


class Move(NamedTuple):
    """The blocks from some position up to ``stop`` under ``action``. All ``*_bytes`` are to be added to a load.

    In the load behind the move, ``HELD`` is ``held_bytes`` more than ``load[held_from]`` before it, and ``WITH_STATE``
    is ``with_state_bytes`` more than ``load[with_state_from]``. The move needs ``beside_held_bytes`` beside
    ``load[HELD]``, and at another moment ``beside_state_bytes`` beside ``load[WITH_STATE]``.
    """

    stop: int
    action: Action
    added: int  # ticks
    held_from: int
    held_bytes: int
    with_state_from: int
    with_state_bytes: int
    beside_held_bytes: int
    beside_state_bytes: int

    def after(self, load: Load) -> Load:
        """The load behind it."""
        return load[self.held_from] + self.held_bytes, load[self.with_state_from] + self.with_state_bytes

    def peak_bytes(self, load: Load) -> int:
        """The most that lives while it runs."""
        return max(load[HELD] + self.beside_held_bytes, load[WITH_STATE] + self.beside_state_bytes)


Moves: TypeAlias = list[list[Move]]
"""The moves that begin at each block of a chain."""


def moves_of(chain: Chain) -> Moves:
    """Every move of every plan: O(blocks^2) of them."""
    sizes = _Sizes(chain)
    return [
        [_by_itself(sizes, position, option) for option in block.options] + _recomputations(sizes, position)
        for position, block in enumerate(chain.blocks)
    ]


def tick_s(chain: Chain) -> float:
    """The seconds of a tick, the unit of ``Move.added``."""
    return 1e-9 * sum(block.forward_s for block in chain.blocks) or 1e-9


class _Sizes:
    """Sums along a chain: the bytes of each state, and of the gradients alive in each block's backward."""

    def __init__(self, chain: Chain) -> None:
        self.blocks = chain.blocks
        self.span_bytes = chain.span_bytes
        self.tick_s = tick_s(chain)
        self.states = [0]  # of the input of every block, and of the last output; the batch is resident
        for block in chain.blocks:
            self.states.append(block.output_bytes + (self.states[-1] if block.passes_input else 0))
        self.gradients = [0]  # made by the blocks behind each one
        for block in reversed(chain.blocks[1:]):
            self.gradients.append(self.gradients[-1] + chain.new_gradients_bytes(block))
        self.gradients.reverse()

    def ticks(self, seconds: float) -> int:
        """Seconds in whole ticks."""
        return round(seconds / self.tick_s)


def _by_itself(sizes: _Sizes, position: int, option: Option) -> Move:
    block = sizes.blocks[position]
    output, gradient = block.output_bytes, sizes.states[position + 1]
    # Holding an output that the input passes into is holding the input.
    holds_input = option.saves_input or (option.saves_output and block.passes_input)
    held = option.saved_bytes + (output if option.saves_output else 0)
    backward = held + gradient + option.backward_rise_bytes + sizes.gradients[position]
    forward = option.forward_rise_bytes
    return Move(
        stop=position + 1,
        action=option.action,
        added=sizes.ticks(option.added_s),
        held_from=WITH_STATE if holds_input else HELD,
        held_bytes=held,
        with_state_from=WITH_STATE if holds_input or block.passes_input else HELD,
        with_state_bytes=option.saved_bytes + output,
        beside_held_bytes=0 if holds_input else backward,
        beside_state_bytes=max(forward, backward) if holds_input else forward,
    )


def _recomputations(sizes: _Sizes, start: int) -> list[Move]:
    """The spans that recompute from ``start`` on: 1, 2, ... blocks of its stack. They hold all of their input."""
    moves: list[Move] = []
    stack = sizes.blocks[start].stack
    passed = sizes.states[start]  # bytes of the span's input in the state behind it
    rebuilt = EMPTY  # by the recomputation, beside the span's input
    recompute = backward = 0
    added = 0
    for position in range(start, len(sizes.blocks)):
        block = sizes.blocks[position]
        if stack is None or block.stack != stack:
            break
        keep = _by_itself(sizes, position, block.option(Action.KEEP))
        recompute = max(recompute, rebuilt[WITH_STATE] + block.option(Action.KEEP).forward_rise_bytes)
        backward = max(backward, keep.peak_bytes(rebuilt))
        rebuilt = keep.after(rebuilt)
        added += sizes.ticks(block.forward_s)
        passed = passed if block.passes_input else 0
        state = sizes.states[position + 1]
        moves.append(
            Move(
                stop=position + 1,
                action=Action.RECOMPUTE,
                added=added,
                held_from=WITH_STATE,
                held_bytes=sizes.span_bytes,
                with_state_from=WITH_STATE,
                with_state_bytes=sizes.span_bytes + state - passed,
                beside_held_bytes=0,
                beside_state_bytes=sizes.span_bytes + max(backward, recompute + state + sizes.gradients[position]),
            )
        )
    return moves
