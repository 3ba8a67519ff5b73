"""A plan: one action for every block of a model, in frozen dataclasses and JSON; ``plan_for`` makes the named ones.

A *span* is a run of neighbouring blocks under one action. A ``RECOMPUTE`` span keeps only its input; its blocks run
again, together, in the backward (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost",
https://arxiv.org/abs/1604.06174). In a ``RECOMPUTE_NESTED`` span this second run keeps only the input of each block,
and the blocks run a third time, one by one (section 4.3 of the same paper, with two levels). Under all other actions
each block of a span is treated by itself.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import accumulate, groupby, pairwise
from math import inf
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias

from memsave_recipes.core.errors import InputError, check_file
from memsave_recipes.core.plans.prediction import Prediction

FORMAT_VERSION = 1
STRATEGY = re.compile(r"[\w :.,+-]{1,100}")  # a name from a plan.json is printed as it is: no control characters


class Action(StrEnum):
    """What happens to the activations of a span between its forward and its backward; ``KINDS`` has the details."""

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

    @property
    def kind(self) -> "ActionKind":
        """Its properties."""
        return KINDS[self]


@dataclass(frozen=True, kw_only=True)
class ActionKind:
    """The properties of an action.

    Args:
        label: its name in tables.
        words: what ``Plan.describe`` says of the blocks under it; ``{spans}`` is the number of its spans, ``{size}``
            the plan's ``micro_batch_size``, ``{tile}`` the plan's ``mlp_tile_tokens``.
        strategy: the strategy that puts every block by itself under it.
        is_joint: whether the blocks of a span run again together, from the input of the first.
        runs_twice: whether a block runs again in the backward, wholly or in part.
        starts_again: whether this second run starts from the input's own storage: no in-place operator may change it.
        on_host: what waits in host memory: the tensors that a block saves, or its input alone.
        is_tiled: whether the MLP of a block takes some tokens at a time.
        in_sublayers: whether attention and MLP of a layer recompute separately, each from its own input, if the layer
            has such parts.
        micro_batches_of: the action that it applies to one micro-batch after the other inside each block.
        is_eager: whether it needs eager layers.
        is_bitwise: whether gradients are bit for bit those without checkpointing, not sums in another order.
    """

    label: str
    words: str = ""
    strategy: str | None = None
    is_joint: bool = False
    runs_twice: bool = False
    starts_again: bool = False
    on_host: Literal["saved", "input"] | None = None
    is_tiled: bool = False
    in_sublayers: bool = False
    micro_batches_of: Action | None = None
    is_eager: bool = False
    is_bitwise: bool = True


_ROUNDING = " (equal to plain within rounding, not bitwise)"
_checkpointed = partial(ActionKind, runs_twice=True, starts_again=True)
_in_micro_batches = partial(ActionKind, starts_again=True, is_eager=True, is_bitwise=False)
KINDS = {
    Action.KEEP: ActionKind(label="keep", strategy="none"),
    Action.RECOMPUTE: _checkpointed(label="recompute", words="recomputed, in {spans}", strategy="full", is_joint=True),
    Action.SELECT_OPS: ActionKind(
        label="recompute cheap operators",
        words="recompute their cheap operators",
        strategy="selective",
        runs_twice=True,
    ),
    Action.OFFLOAD: ActionKind(
        label="offload to the host", words="offloaded to the host", strategy="offload", on_host="saved"
    ),
    Action.RECOMPUTE_OFFLOAD: _checkpointed(
        label="recompute, input on the host",
        words="recomputed, their inputs offloaded to the host",
        strategy="full_offload",
        on_host="input",
    ),
    Action.COMPILE: ActionKind(
        label="compiled, save a part",
        words=f"compiled, saving a part{_ROUNDING}",
        strategy="compiled",
        is_bitwise=False,
    ),
    Action.IN_MICRO_BATCHES: _in_micro_batches(
        label="recompute in micro-batches",
        words=f"recomputed in micro-batches of {{size}}{_ROUNDING}",
        micro_batches_of=Action.RECOMPUTE,
    ),
    Action.IN_MICRO_BATCHES_OFFLOAD: _in_micro_batches(
        label="recompute in micro-batches, input on the host",
        words=f"recomputed in micro-batches of {{size}}, their inputs offloaded to the host{_ROUNDING}",
        micro_batches_of=Action.RECOMPUTE_OFFLOAD,
        on_host="input",
    ),
    Action.RECOMPUTE_TILED: _checkpointed(
        label="recompute, MLP in tiles",
        words=f"recomputed, their MLPs in tiles of {{tile}} tokens{_ROUNDING}",
        strategy="full_tiled",
        is_tiled=True,
        is_eager=True,
        is_bitwise=False,
    ),
    Action.RECOMPUTE_TILED_OFFLOAD: _checkpointed(
        label="recompute in tiles, inputs of attention and MLP on the host",
        words=("recomputed in tiles of {tile} tokens, attention and MLP each from an input on the host" + _ROUNDING),
        strategy="full_tiled_offload",
        on_host="input",
        is_tiled=True,
        in_sublayers=True,
        is_eager=True,
        is_bitwise=False,
    ),
    Action.RECOMPUTE_NESTED: _checkpointed(
        label="recompute, and again block by block",
        words="recomputed in spans, and once more block by block",
        is_joint=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Span:
    """Blocks ``start`` to ``stop - 1`` of a plan, under one action.

    Args:
        ratio: for ``COMPILE`` alone: a compiled block may save this part, from 0 to 1, of what it would save for its
            fastest backward.
    """

    start: int
    stop: int
    action: Action
    ratio: float | None = None

    def __post_init__(self) -> None:
        if not (type(self.start) is type(self.stop) is int and 0 <= self.start < self.stop):
            raise ValueError(f"a span needs 0 <= start < stop, not {self.start}..{self.stop}")
        if (self.ratio is None) is (self.action is Action.COMPILE) or not 0 <= (self.ratio or 0) <= 1:
            raise ValueError(f"the ratio of {self.action.value} cannot be {self.ratio}: compile has one from 0 to 1")

    @property
    def way(self) -> "Way":
        """Its action and ratio."""
        return self.action, self.ratio


Way: TypeAlias = tuple[Action, float | None]
"""An action with its ratio: the key of a block's options and of the traces that measure them."""
AS_IT_IS: Way = (Action.KEEP, None)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An action for every block of a model.

    Args:
        strategy: the name that made the plan, such as ``segments:2``.
        blocks: the name of every block, in the order of the forward.
        spans: cover all blocks once, in order.
        compiled: whether all layers are compiled; the actions apply to the compiled layers.
        micro_batch_size: the samples that a block takes at once, if blocks run in micro-batches; else ``None``.
        mlp_tile_tokens: the tokens that an MLP takes at once, if MLPs run in tiles; else ``None``.
        prediction: the memory and time of a step, if ``make_plan`` has measured one; ``==`` and plan.json leave it out.

    Raises:
        ValueError: the spans leave a block out or name one twice, or they contradict a size.
    """

    strategy: str
    blocks: tuple[str, ...]
    spans: tuple[Span, ...]
    compiled: bool = False
    micro_batch_size: int | None = None
    mlp_tile_tokens: int | None = None
    prediction: Prediction | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        borders = [0, *(span.stop for span in self.spans)]
        if [span.start for span in self.spans] != borders[:-1] or borders[-1] != len(self.blocks):
            raise ValueError(f"the spans of a plan must cover its {len(self.blocks)} blocks once and in order")
        kinds = [span.action.kind for span in self.spans]
        size = self.micro_batch_size
        if (size is None) is any(kind.micro_batches_of for kind in kinds) or (size is not None and size < 1):
            raise ValueError(f"micro_batch_size is {size}: plans in micro-batches need one of at least 1, others none")
        tile = self.mlp_tile_tokens
        if (tile is None) is any(kind.is_tiled for kind in kinds) or (tile is not None and tile < 1):
            raise ValueError(f"mlp_tile_tokens is {tile}: plans with tiles need a number of at least 1, others none")

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The names of the blocks under ``RECOMPUTE``."""
        return self.blocks_under(Action.RECOMPUTE)

    @property
    def offloads(self) -> tuple[Action, ...]:
        """Its actions that take host memory."""
        return tuple(action for action in Action if action.kind.on_host and self.blocks_under(action))

    @property
    def is_bitwise(self) -> bool:
        """Whether gradients are bit for bit those of the same layers (compiled or not) without checkpointing."""
        return all(span.action.kind.is_bitwise for span in self.spans)

    @property
    def compiles(self) -> bool:
        """Whether it compiles layers: all of them, or in a plan of an earlier version those under ``COMPILE``."""
        return self.compiled or bool(self.blocks_under(Action.COMPILE))

    @property
    def asks_to_compile(self) -> bool:
        """Whether its strategy is ``compiled``: then a layer that cannot compile is an error, else it stays eager."""
        return UNIFORM_STRATEGIES.get(self.strategy.partition(":")[0]) is Action.COMPILE

    @property
    def ratios(self) -> tuple[float, ...]:
        """The ratios of its spans under ``COMPILE``, the largest first."""
        return tuple(sorted({span.ratio for span in self.spans if span.ratio is not None}, reverse=True))

    def on_compiled_layers(self) -> "Plan":
        """Return the same plan for compiled layers: ``COMPILE`` with the default ratio replaces ``SELECT_OPS``.

        Raises:
            InputError: compiled layers cannot do one of its actions.
        """
        if self.compiles:
            return self
        if eager := [span.action.kind.label for span in self.spans if span.action.kind.is_eager]:
            raise InputError(
                f"strategy {self.strategy}: compiled layers cannot {eager[0]}: take full or offload, or do not compile"
            )
        partly = partial(replace, action=Action.COMPILE, ratio=COMPILED_MEMORY_RATIO)
        spans = (partly(span) if span.action is Action.SELECT_OPS else span for span in self.spans)
        return replace(self, spans=tuple(spans), compiled=True)

    def in_micro_batches(self, size: int) -> "Plan":
        """Return the same plan, but each block that recomputes runs ``size`` samples at a time.

        Raises:
            InputError: no block recomputes, or the plan of a file has another size.
        """
        if self.micro_batch_size not in (None, size):
            raise InputError(
                f"strategy {self.strategy} was written with micro-batches of {self.micro_batch_size}: take this size, "
                "or make the plan again"
            )
        if self.micro_batch_size == size:
            return self
        smaller = {action.kind.micro_batches_of: action for action in Action}
        if not any(span.action in smaller for span in self.spans):
            raise InputError(
                f"strategy {self.strategy} recomputes no block, so none can run in micro-batches: take full, "
                "full_offload, every:K or segments:K, or set no micro-batch size"
            )
        spans = tuple(replace(span, action=smaller.get(span.action, span.action)) for span in self.spans)
        return replace(self, spans=spans, micro_batch_size=size)

    def blocks_under(self, action: Action) -> tuple[str, ...]:
        """Return the names of the blocks under ``action``."""
        spans = [span for span in self.spans if span.action is action]
        return tuple(name for span in spans for name in self.blocks[span.start : span.stop])

    def describe(self) -> str:
        """Return a line for people: ``segments:2: 9 of 18 blocks recomputed, in 1 span``.

        It names the stacks that segments leave as they are, which may be a whole tower of a model.
        """
        num_spans = sum(span.action is Action.RECOMPUTE for span in self.spans)
        spans = f"{num_spans} {'span' if num_spans == 1 else 'spans'}"
        under = ((len(self.blocks_under(action)), action.kind.words) for action in Action)
        found = [(number, words) for number, words in under if number and words]
        compiled = "; all layers compiled" if self.compiled else ""
        if not found:
            return f"{self.strategy}: no activation checkpointing{compiled}"
        (number, words), *others = found
        parts = [f"{number} of {len(self.blocks)} blocks {words}", *(f"{more} {words}" for more, words in others)]
        parts += [f"all of {', '.join(kept)} kept"] if (kept := self._kept_stacks()) else []
        text = "; ".join(parts).format(spans=spans, size=self.micro_batch_size, tile=self.mlp_tile_tokens)
        return f"{self.strategy}: {text}{compiled}"

    def _kept_stacks(self) -> list[str]:
        """Return the stacks of which segments recompute no block."""
        if not self.strategy.startswith("segments"):
            return []
        recomputed = {_stack_of(name) for name in self.recomputed}
        return [stack for stack in dict.fromkeys(map(_stack_of, self.blocks)) if stack not in recomputed]

    def to_json(self) -> str:
        """Return the plan as the text of a ``plan.json``."""
        content = asdict(replace(self, prediction=None), dict_factory=_without_defaults)
        return json.dumps({"version": FORMAT_VERSION, **content}, indent=1)

    def __str__(self) -> str:
        """Return ``describe()``, and the prediction where there is one."""
        return self.describe() if self.prediction is None else f"{self.describe()}\n{self.prediction}"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read the plan that ``to_json`` wrote.

        Raises:
            InputError: the text is not such a plan.
        """
        try:
            data = json.loads(text)
            if data["version"] != FORMAT_VERSION:
                raise ValueError(f"its version is {data['version']}, this software reads {FORMAT_VERSION}")
            if not STRATEGY.fullmatch(data["strategy"]) or not all(isinstance(name, str) for name in data["blocks"]):
                raise ValueError("its strategy and its blocks must be words, such as segments:2 and layers.0")
            ratio_of_all = data.get("compiled_memory_ratio")  # files of earlier versions: one ratio for all spans
            spans = tuple(_span_of(span, ratio_of_all) for span in data["spans"])
            sizes = {name: data.get(name) for name in ("micro_batch_size", "mlp_tile_tokens")}
            compiled = data.get("compiled", False)
            if type(compiled) is not bool or not {type(size) for size in sizes.values()} <= {int, type(None)}:
                raise ValueError(f"its compiled is {compiled}, its sizes are {sizes}")
            return cls(
                strategy=data["strategy"],
                blocks=tuple(data["blocks"]),
                spans=spans,
                compiled=compiled,
                **sizes,
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise InputError(f"this is not a plan.json: {error}") from error


def _without_defaults(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if value is not None and value is not False}


def _span_of(data: dict[str, Any], ratio_of_all: Any) -> Span:
    action = Action(data["action"])
    ratio = data.get("ratio", ratio_of_all) if action is Action.COMPILE else None
    if isinstance(ratio, bool):
        raise ValueError(f"its ratio is {ratio}")
    return Span(start=data["start"], stop=data["stop"], action=action, ratio=ratio)


def read_plan(path: str | Path) -> Plan:
    """Read the plan in a file.

    Raises:
        InputError: there is no such file, or it holds no plan.
    """
    check_file("strategy", path)
    try:
        return Plan.from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"strategy {path} cannot be read: {error}") from error
    except InputError as error:
        raise InputError(f"strategy {path}: {error}") from error


Stacks = Sequence[Sequence[str]]
"""The names of a model's blocks, stack by stack. Each block of a stack feeds the next one, so a span may join them. No
span crosses from one stack into the next."""


def count_blocks(stacks: Stacks) -> int:
    """Return the number of blocks in all stacks."""
    return sum(len(stack) for stack in stacks)


def as_they_run(stacks: Stacks, running: Iterable[str]) -> list[Sequence[str]]:
    """Return the stacks that run, in the order in which their first blocks do.

    Args:
        running: the names of the blocks that run, in order.
    """
    first: dict[str, int] = {}
    for position, name in enumerate(running):
        first.setdefault(name, position)
    begins = [(min(first[name] for name in stack if name in first), stack) for stack in stacks if first.keys() & stack]
    return [stack for _, stack in sorted(begins, key=itemgetter(0))]


def every(stacks: Stacks, interval: int) -> tuple[Span, ...]:
    """Recompute each ``interval``-th block, beginning with the first, by itself.

    These are the layers that ``activation_checkpointing_enable(every_n_layers)`` of transformers recomputes.
    """
    return tuple(
        Span(start=index, stop=index + 1, action=Action.KEEP if index % interval else Action.RECOMPUTE)
        for index in range(count_blocks(stacks))
    )


def _stack_of(block: str) -> str:
    return block.rpartition(".")[0]


def all_under(stacks: Stacks, action: Action, ratio: float | None = None) -> tuple[Span, ...]:
    """Put every block by itself under one action."""
    numbers = range(count_blocks(stacks))
    return tuple(Span(start=number, stop=number + 1, action=action, ratio=ratio) for number in numbers)


def segments(stacks: Stacks, count: int) -> tuple[Span, ...]:
    """Cut the blocks into ``count`` segments of nearly equal size, and also where a stack ends; keep the last segment.

    This is the method of ``torch.utils.checkpoint.checkpoint_sequential``. The backward of the last segment comes
    first, so recomputing it would free nothing. ``segments:1`` is the baseline.
    """
    last_segment = count_blocks(stacks) * (count - 1) // count
    return tuple(
        Span(start=start, stop=stop, action=Action.KEEP if start >= last_segment else Action.RECOMPUTE)
        for start, stop in _cut(stacks, count)
    )


def nested(stacks: Stacks, count: int) -> tuple[Span, ...]:
    """Recompute each of ``count`` segments, also the last one, and in the second run recompute each block again."""
    spans = _cut(stacks, count)
    return tuple(Span(start=start, stop=stop, action=Action.RECOMPUTE_NESTED) for start, stop in spans)


def _cut(stacks: Stacks, count: int) -> Iterator[tuple[int, int]]:
    boundaries = (count_blocks(stacks) * k // count for k in range(count + 1))
    return pairwise(sorted({*boundaries, *accumulate(len(stack) for stack in stacks)}))


def _spread(spans: Sequence[Span], blocks: Sequence[str], idle: Collection[str]) -> tuple[Span, ...]:
    """Map spans, which do not count ``idle`` blocks, to positions in ``blocks``, and keep the idle blocks."""
    at = [position for position, name in enumerate(blocks) if name not in idle]
    spread = [replace(span, start=at[span.start], stop=at[span.stop - 1] + 1) for span in spans]
    spread += [Span(start=i, stop=i + 1, action=Action.KEEP) for i, name in enumerate(blocks) if name in idle]
    return tuple(sorted(spread, key=attrgetter("start")))


UNIFORM_STRATEGIES = {action.kind.strategy: action for action in Action if action.kind.strategy}
"""The strategies that put every block by itself under one action."""
TILED_STRATEGIES = tuple(name for name, action in UNIFORM_STRATEGIES.items() if action.kind.is_tiled)
OFFLOADING_STRATEGIES = tuple(
    name for name, action in UNIFORM_STRATEGIES.items() if action.kind.on_host and not action.kind.is_tiled
)
COUNTED_STRATEGIES = {"every": every, "segments": segments, "nested": nested}
BUDGET_WORDS = ("budget", "budget:bitwise")  # solved from measured costs, by memsave_recipes.core.planner
COMPILED_MEMORY_RATIO = 0.3
MLP_TILE_TOKENS = 1024
"""The default; a matrix product of fewer rows does not keep a GPU busy."""
MAX_DIGITS = 10
KNOWN = (
    "none, full, every:K, segments:K, nested:K, selective, offload, full_offload, full_tiled[:TOKENS], "
    "full_tiled_offload[:TOKENS], compiled[:RATIO], bottleneck, budget, budget:bitwise or the path of a plan.json"
)


def offloads(strategy: str) -> bool:
    """Return whether every block under ``strategy`` has tensors in host memory."""
    action = UNIFORM_STRATEGIES.get(strategy.partition(":")[0])
    return action is not None and action.kind.on_host is not None


def plan_for(strategy: str, stacks: Stacks, idle: Collection[str] = ()) -> Plan:
    """Return the plan that ``strategy`` makes for the blocks in ``stacks``.

    Args:
        strategy: any of ``KNOWN`` but ``bottleneck``, ``budget``, ``budget:bitwise`` and a path.
        stacks: names of the blocks, in the order of the forward.
        idle: blocks without a backward, which save nothing; strategies with a K keep them and do not count them.

    Raises:
        InputError: there is no such strategy, or K, TOKENS or RATIO is out of its range.
    """
    blocks = tuple(name for stack in stacks for name in stack)
    plan = partial(Plan, strategy=strategy, blocks=blocks)
    name, colon, argument = strategy.partition(":")
    if name in COUNTED_STRATEGIES:
        trained = [
            list(names) for stack in stacks for is_idle, names in groupby(stack, idle.__contains__) if not is_idle
        ]
        num_blocks, which = count_blocks(trained), " that have a backward" if idle else ""
        if idle and not num_blocks:
            raise InputError(
                f"strategy {strategy}: no block of this model has a backward, so none saves memory: use none"
            )
        count = _parse_count(strategy, "K", num_blocks, f"to {num_blocks}, the blocks of this model{which}")
        return plan(spans=_spread(COUNTED_STRATEGIES[name](trained, count), blocks, idle))
    action = UNIFORM_STRATEGIES.get(name)
    if action is None or (colon and action is not Action.COMPILE and not action.kind.is_tiled):
        raise InputError(f"strategy {strategy}: no such strategy; choose {KNOWN}")
    if action is Action.COMPILE:
        ratio = _parse_ratio(strategy, argument) if colon else COMPILED_MEMORY_RATIO
        return plan(spans=all_under(stacks, action, ratio), compiled=True)
    spans = all_under(stacks, action)
    if action.kind.is_tiled:
        rule = "on, the tokens that an MLP takes at once"
        tokens = _parse_count(strategy, "TOKENS", inf, rule) if colon else MLP_TILE_TOKENS
        return plan(spans=spans, mlp_tile_tokens=tokens)
    return plan(spans=spans)


def _parse_count(strategy: str, word: str, most: float, rule: str) -> int:
    name, _, argument = strategy.partition(":")
    is_number = argument.isascii() and argument.isdigit() and len(argument) < MAX_DIGITS
    count = int(argument) if is_number else 0
    if not 1 <= count <= most:
        raise InputError(f"strategy {strategy}: {word} in {name}:{word} is a whole number from 1 {rule}")
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
