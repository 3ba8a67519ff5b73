"""A plan: one action for every block of a model, as frozen data in JSON; and the plans that have a name.

Blocks stand in the order of the forward. A *span* is a run of neighbouring blocks with one action: the blocks of a
``RECOMPUTE`` span keep only the input of the span and run again, together, in the backward (Chen et al. 2016,
"Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174). Those of a ``RECOMPUTE_NESTED``
span keep no more in that second run than the input of each block, and run a third time, one by one (section 4.3 of the
same paper, with two levels). A plan never touches a model: ``memsave_recipes.activations.apply_plan`` does.

The strategies of ``--activation_checkpointing`` that need no measurement are here, too. ``segments:K`` is the method of
``torch.utils.checkpoint.checkpoint_sequential`` (https://pytorch.org/docs/stable/checkpoint.html): every segment but
the last keeps its input alone and recomputes as a whole. The last segment is kept, since its backward comes first and
recomputing it would free nothing; so ``segments:1`` is the baseline, training without checkpointing. Torch's last
segment takes the whole remainder; here sizes differ by at most one block.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import accumulate, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from memsave_recipes.errors import InputError

if TYPE_CHECKING:
    from memsave_recipes.plans.simulate import Prediction

FORMAT_VERSION = 1
STRATEGY = re.compile(r"[\w :.,+-]{1,100}")  # of a file: tables and lines show it as it stands there


class Action(StrEnum):
    """On the activations of a span, between its forward and its backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    SELECT_OPS = "select_ops"
    OFFLOAD = "offload"
    RECOMPUTE_OFFLOAD = "recompute_offload"
    COMPILE = "compile"
    IN_MICRO_BATCHES = "in_micro_batches"
    IN_MICRO_BATCHES_OFFLOAD = "in_micro_batches_offload"
    RECOMPUTE_TILED = "recompute_tiled"
    RECOMPUTE_TILED_OFFLOAD = "recompute_tiled_offload"
    RECOMPUTE_NESTED = "recompute_nested"


JOINT = (Action.RECOMPUTE, Action.RECOMPUTE_NESTED)
"""Actions under which the blocks of a span run again together, from the input of the first."""

OF_MICRO_BATCHES = {
    Action.RECOMPUTE: Action.IN_MICRO_BATCHES,
    Action.RECOMPUTE_OFFLOAD: Action.IN_MICRO_BATCHES_OFFLOAD,
}
"""Actions under which a block recomputes some samples at a time, each by itself, by what it does for all at once."""

INPUT_OFFLOADING = (Action.RECOMPUTE_OFFLOAD, Action.IN_MICRO_BATCHES_OFFLOAD, Action.RECOMPUTE_TILED_OFFLOAD)
"""Actions under which the input of a block waits in host memory."""

IN_SUBLAYERS = (Action.RECOMPUTE_TILED_OFFLOAD,)
"""Actions under which attention and MLP of a layer start again from an input each, where the layer has such parts."""

OFFLOADING = (Action.OFFLOAD, *INPUT_OFFLOADING)
"""Actions under which tensors of a block wait in host memory: those that it saves, or its input alone."""

TILED = (Action.RECOMPUTE_TILED, Action.RECOMPUTE_TILED_OFFLOAD)
"""Actions under which the MLP of a block takes some tokens at a time."""

WITHIN_ROUNDING = (Action.COMPILE, *OF_MICRO_BATCHES.values(), *TILED)
"""Actions under which gradients are sums in another order than without checkpointing."""

IN_WORDS = {
    Action.SELECT_OPS: "recompute their cheap operators",
    Action.OFFLOAD: "offloaded to the host",
    Action.RECOMPUTE_OFFLOAD: "recomputed, their inputs offloaded to the host",
    Action.COMPILE: "compiled (equal to plain within rounding, not bitwise)",
    Action.IN_MICRO_BATCHES: "recomputed in micro-batches of {size} (equal to plain within rounding, not bitwise)",
    Action.IN_MICRO_BATCHES_OFFLOAD: (
        "recomputed in micro-batches of {size}, their inputs offloaded to the host (equal to plain within rounding, "
        "not bitwise)"
    ),
    Action.RECOMPUTE_TILED: (
        "recomputed, their MLPs in tiles of {tile} tokens (equal to plain within rounding, not bitwise)"
    ),
    Action.RECOMPUTE_TILED_OFFLOAD: (
        "recomputed in tiles of {tile} tokens, attention and MLP each from an input on the host (equal to plain within "
        "rounding, not bitwise)"
    ),
    Action.RECOMPUTE_NESTED: "recomputed in spans, and once more block by block",
}
"""The words of ``Plan.describe`` for blocks under an action; ``{size}`` is the plan's ``micro_batch_size``, ``{tile}``
its ``mlp_tile_tokens``."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Blocks ``start`` to ``stop - 1``, treated together."""

    start: int
    stop: int
    action: Action

    def __post_init__(self) -> None:
        if not (type(self.start) is type(self.stop) is int and 0 <= self.start < self.stop):
            raise ValueError(f"a span needs 0 <= start < stop, not {self.start}..{self.stop}")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An action for every block of a model.

    Args:
        strategy: the name that made the plan, such as ``segments:2``.
        blocks: the name of every block, in the order of the forward.
        spans: cover all blocks once, in order.
        compiled_memory_ratio: the part of its activations that a compiled block may save, from 0 to 1; for plans that
            compile, and for no others.
        micro_batch_size: the samples that a block in micro-batches takes at once; for plans with such blocks, and for
            no others.
        mlp_tile_tokens: the tokens that an MLP of a block under ``TILED`` actions takes at once; for plans with such
            blocks, and for no others.
        prediction: the memory and time of a step, where ``make_plan`` has measured one. It is no part of what is
            compared or written.

    Raises:
        ValueError: the spans leave a block out or name one twice, or the ratio or a size does not go with them.
    """

    strategy: str
    blocks: tuple[str, ...]
    spans: tuple[Span, ...]
    compiled_memory_ratio: float | None = None
    micro_batch_size: int | None = None
    mlp_tile_tokens: int | None = None
    prediction: "Prediction | None" = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        borders = [0, *(span.stop for span in self.spans)]
        if [span.start for span in self.spans] != borders[:-1] or borders[-1] != len(self.blocks):
            raise ValueError(f"the spans of a plan must cover its {len(self.blocks)} blocks once and in order")
        ratio = self.compiled_memory_ratio
        if (ratio is None) is bool(self.blocks_under(Action.COMPILE)) or not 0 <= (ratio or 0) <= 1:
            raise ValueError(f"compiled_memory_ratio is {ratio}: plans that compile need one from 0 to 1, others none")
        size = self.micro_batch_size
        if (size is None) is any(map(self.blocks_under, OF_MICRO_BATCHES.values())) or (size is not None and size < 1):
            raise ValueError(f"micro_batch_size is {size}: plans in micro-batches need one of at least 1, others none")
        tile = self.mlp_tile_tokens
        if (tile is None) is any(map(self.blocks_under, TILED)) or (tile is not None and tile < 1):
            raise ValueError(f"mlp_tile_tokens is {tile}: plans with tiles need a number of at least 1, others none")

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The names of the blocks that run twice."""
        return self.blocks_under(Action.RECOMPUTE)

    @property
    def offloads(self) -> tuple[Action, ...]:
        """The actions of its blocks that take host memory."""
        return tuple(action for action in OFFLOADING if self.blocks_under(action))

    @property
    def is_bitwise(self) -> bool:
        """Whether gradients are bit for bit those without checkpointing, and not sums in another order."""
        return not any(map(self.blocks_under, WITHIN_ROUNDING))

    def in_micro_batches(self, size: int) -> "Plan":
        """The same plan, of which the blocks that recompute do so ``size`` samples at a time, each by itself.

        Raises:
            InputError: none recomputes, or those of a file do so with another size.
        """
        if self.micro_batch_size not in (None, size):
            raise InputError(
                f"strategy {self.strategy} was written with micro-batches of {self.micro_batch_size}: take this size, "
                "or make the plan again"
            )
        if self.micro_batch_size == size:
            return self
        if not any(map(self.blocks_under, OF_MICRO_BATCHES)):
            raise InputError(
                f"strategy {self.strategy} recomputes no block, so none can run in micro-batches: take full, "
                "full_offload, every:K or segments:K, or set no micro-batch size"
            )
        spans = tuple(replace(span, action=OF_MICRO_BATCHES.get(span.action, span.action)) for span in self.spans)
        return replace(self, spans=spans, micro_batch_size=size)

    def blocks_under(self, action: Action) -> tuple[str, ...]:
        """The names of the blocks under ``action``."""
        spans = [span for span in self.spans if span.action is action]
        return tuple(name for span in spans for name in self.blocks[span.start : span.stop])

    def describe(self) -> str:
        """One line for people: ``segments:2: 9 of 18 blocks recomputed, in 1 span``."""
        num_spans = sum(span.action is Action.RECOMPUTE for span in self.spans)
        recomputed = f"recomputed, in {num_spans} {'span' if num_spans == 1 else 'spans'}"
        by_words = {recomputed: self.recomputed, **{words: self.blocks_under(one) for one, words in IN_WORDS.items()}}
        found = [(len(names), words) for words, names in by_words.items() if names]
        if not found:
            return f"{self.strategy}: no activation checkpointing"
        (number, words), *others = found
        parts = [f"{number} of {len(self.blocks)} blocks {words}", *(f"{more} {words}" for more, words in others)]
        return f"{self.strategy}: {'; '.join(parts).format(size=self.micro_batch_size, tile=self.mlp_tile_tokens)}"

    def to_json(self) -> str:
        """The plan as the text of a ``plan.json``."""
        content = asdict(replace(self, prediction=None))
        del content["prediction"]
        for name in ("micro_batch_size", "mlp_tile_tokens"):
            if content[name] is None:
                del content[name]
        return json.dumps({"version": FORMAT_VERSION, **content}, indent=1)

    def __str__(self) -> str:
        """``describe()``, and the prediction where there is one."""
        return self.describe() if self.prediction is None else f"{self.describe()}\n{self.prediction}"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that ``to_json`` wrote.

        Raises:
            InputError: the text is not such a plan.
        """
        try:
            data = json.loads(text)
            if data["version"] != FORMAT_VERSION:
                raise ValueError(f"its version is {data['version']}, this software reads {FORMAT_VERSION}")
            if not STRATEGY.fullmatch(data["strategy"]) or not all(isinstance(name, str) for name in data["blocks"]):
                raise ValueError("its strategy and its blocks must be words, such as segments:2 and layers.0")
            spans = tuple(Span(start=s["start"], stop=s["stop"], action=Action(s["action"])) for s in data["spans"])
            ratio = data.get("compiled_memory_ratio")
            sizes = {name: data.get(name) for name in ("micro_batch_size", "mlp_tile_tokens")}
            if isinstance(ratio, bool) or not {type(size) for size in sizes.values()} <= {int, type(None)}:
                raise ValueError(f"its compiled_memory_ratio is {ratio}, its sizes are {sizes}")
            return cls(
                strategy=data["strategy"],
                blocks=tuple(data["blocks"]),
                spans=spans,
                compiled_memory_ratio=ratio,
                **sizes,
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise InputError(f"this is no plan.json: {error}") from error


def read_plan(path: str | Path) -> Plan:
    """The plan in a file.

    Raises:
        InputError: there is no such file, or it holds no plan.
    """
    if not os.path.isfile(path):  # unlike pathlib, without an error for what can be no path
        raise InputError(f"strategy {path} is not a file: check the path")
    try:
        return Plan.from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"strategy {path} cannot be read: {error}") from error
    except InputError as error:
        raise InputError(f"strategy {path}: {error}") from error


Stacks = Sequence[Sequence[str]]
"""The names of a model's blocks. Blocks of one stack feed one another, so a span may hold several of them; no span
crosses from one stack into the next."""


def count_blocks(stacks: Stacks) -> int:
    """The number of blocks in all stacks."""
    return sum(len(stack) for stack in stacks)


def as_they_run(stacks: Stacks, running: Sequence[str]) -> list[Sequence[str]]:
    """The stacks of which a block runs, in the order in which they begin.

    Args:
        running: the blocks that run, in order.
    """
    first: dict[str, int] = {}
    for position, name in enumerate(running):
        first.setdefault(name, position)
    begins = [(min(first[name] for name in stack if name in first), stack) for stack in stacks if first.keys() & stack]
    return [stack for _, stack in sorted(begins, key=itemgetter(0))]


def every(stacks: Stacks, interval: int) -> tuple[Span, ...]:
    """Recompute each ``interval``-th block, beginning with the first, by itself.

    The same layers as ``activation_checkpointing_enable(every_n_layers)`` of transformers.
    """
    return tuple(
        Span(start=index, stop=index + 1, action=Action.KEEP if index % interval else Action.RECOMPUTE)
        for index in range(count_blocks(stacks))
    )


def full(stacks: Stacks) -> tuple[Span, ...]:
    """Recompute every block by itself."""
    return every(stacks, 1)


def none(stacks: Stacks) -> tuple[Span, ...]:
    """Keep everything: the baseline."""
    return all_under(stacks, Action.KEEP)


def all_under(stacks: Stacks, action: Action) -> tuple[Span, ...]:
    """Every block by itself under one action."""
    return tuple(Span(start=index, stop=index + 1, action=action) for index in range(count_blocks(stacks)))


def segments(stacks: Stacks, count: int) -> tuple[Span, ...]:
    """``count`` segments of nearly equal numbers of blocks; a segment is cut where a stack ends."""
    last_segment = count_blocks(stacks) * (count - 1) // count
    return tuple(
        Span(start=start, stop=stop, action=Action.KEEP if start >= last_segment else Action.RECOMPUTE)
        for start, stop in _cut(stacks, count)
    )


def nested(stacks: Stacks, count: int) -> tuple[Span, ...]:
    """The same segments, all of which recompute, and in the second run each of their blocks again."""
    spans = _cut(stacks, count)
    return tuple(Span(start=start, stop=stop, action=Action.RECOMPUTE_NESTED) for start, stop in spans)


def _cut(stacks: Stacks, count: int) -> Iterator[tuple[int, int]]:
    boundaries = (count_blocks(stacks) * k // count for k in range(count + 1))
    return pairwise(sorted({*boundaries, *accumulate(len(stack) for stack in stacks)}))


PLAIN_STRATEGIES: dict[str, Callable[[Stacks], tuple[Span, ...]]] = {
    "none": none,
    "full": full,
    "selective": partial(all_under, action=Action.SELECT_OPS),
    "offload": partial(all_under, action=Action.OFFLOAD),
    "full_offload": partial(all_under, action=Action.RECOMPUTE_OFFLOAD),
}
OFFLOADING_STRATEGIES = ("offload", "full_offload")
TILED_STRATEGIES = {"full_tiled": Action.RECOMPUTE_TILED, "full_tiled_offload": Action.RECOMPUTE_TILED_OFFLOAD}
COUNTED_STRATEGIES = {"every": every, "segments": segments, "nested": nested}
BUDGET_WORDS = ("budget", "budget:bitwise")  # solved from measured costs, by memsave_recipes.planner
COMPILED_MEMORY_RATIO = 0.3
MLP_TILE_TOKENS = 1024
"""By default; products of fewer rows keep a GPU waiting."""
MAX_DIGITS = 10
KNOWN = (
    "none, full, every:K, segments:K, nested:K, selective, offload, full_offload, full_tiled[:TOKENS], "
    "full_tiled_offload[:TOKENS], compiled[:RATIO], bottleneck, budget, budget:bitwise or the path of a plan.json"
)


def offloads(strategy: str) -> bool:
    """Whether every block under ``strategy`` has tensors in host memory."""
    name = strategy.partition(":")[0]
    return name in OFFLOADING_STRATEGIES or TILED_STRATEGIES.get(name) in OFFLOADING


def plan_for(strategy: str, stacks: Stacks) -> Plan:
    """The plan that ``strategy`` makes for the blocks in ``stacks``.

    Args:
        strategy: ``none``, ``full``, ``selective``, ``offload``, ``full_offload``, ``every:K``, ``segments:K`` or
            ``nested:K`` with K from 1 to the number of blocks, ``full_tiled`` and ``full_tiled_offload`` or these with
            ``:TOKENS``, ``compiled`` or ``compiled:RATIO`` with a ratio from 0 to 1.
        stacks: names of the blocks, in the order of the forward.

    Raises:
        InputError: no such strategy, or K, TOKENS or RATIO is no number in its range.
    """
    blocks = tuple(name for stack in stacks for name in stack)
    name, colon, argument = strategy.partition(":")
    if name in PLAIN_STRATEGIES and not colon:
        return Plan(strategy=strategy, blocks=blocks, spans=PLAIN_STRATEGIES[name](stacks))
    if name in COUNTED_STRATEGIES:
        count = _parse_count(strategy, argument, count_blocks(stacks))
        return Plan(strategy=strategy, blocks=blocks, spans=COUNTED_STRATEGIES[name](stacks, count))
    if name == "compiled":
        ratio = _parse_ratio(strategy, argument) if colon else COMPILED_MEMORY_RATIO
        spans = all_under(stacks, Action.COMPILE)
        return Plan(strategy=strategy, blocks=blocks, spans=spans, compiled_memory_ratio=ratio)
    if name in TILED_STRATEGIES:
        tokens = _parse_tokens(strategy, argument) if colon else MLP_TILE_TOKENS
        spans = all_under(stacks, TILED_STRATEGIES[name])
        return Plan(strategy=strategy, blocks=blocks, spans=spans, mlp_tile_tokens=tokens)
    raise InputError(f"strategy {strategy}: no such strategy; choose {KNOWN}")


def _parse_whole_number(argument: str) -> int:
    """0 where it is none."""
    return int(argument) if argument.isascii() and argument.isdigit() and len(argument) < MAX_DIGITS else 0


def _parse_tokens(strategy: str, argument: str) -> int:
    tokens = _parse_whole_number(argument)
    if not tokens:
        raise InputError(
            f"strategy {strategy}: TOKENS in {strategy.partition(':')[0]}:TOKENS is a whole number from 1 on, the "
            "tokens that an MLP takes at once"
        )
    return tokens


def _parse_count(strategy: str, argument: str, num_blocks: int) -> int:
    count = _parse_whole_number(argument)
    if not 1 <= count <= num_blocks:
        name = strategy.partition(":")[0]
        raise InputError(
            f"strategy {strategy}: K in {name}:K is a whole number from 1 to {num_blocks}, the blocks of this model"
        )
    return count


def _parse_ratio(strategy: str, argument: str) -> float:
    try:
        ratio = float(argument)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise InputError(
            f"strategy {strategy}: RATIO in compiled:RATIO is a number from 0 to 1, "
            "the part of a compiled block's activations that it may keep"
        )
    return ratio
