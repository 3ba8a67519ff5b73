"""A plan: one action for every block of a model, as frozen data with JSON both ways.

Blocks stand in the order of the forward. A *span* is a run of neighbouring blocks with one action: the blocks of a
``RECOMPUTE`` span keep only what enters the span and run again, together, in the backward (Chen et al. 2016,
"Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174). A plan never touches a model:
``memsave_recipes.activations.apply_plan`` does.
"""

import json
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from memsave_recipes.errors import InputError

FORMAT_VERSION = 1


class Action(str, Enum):
    """What happens to the activations of a span between its forward and its backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    SELECT_OPS = "select_ops"
    OFFLOAD = "offload"


@dataclass(frozen=True, kw_only=True)
class Span:
    """Blocks ``start`` to ``stop - 1``, treated together."""

    start: int
    stop: int
    action: Action

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a span needs 0 <= start < stop, not {self.start}..{self.stop}")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do with every block of a model.

    Args:
        strategy: the words that made the plan, such as ``segments:2``.
        blocks: the name of every block, in the order of the forward.
        spans: cover all blocks once, in order.

    Raises:
        ValueError: the spans leave a block out or name one twice.
    """

    strategy: str
    blocks: tuple[str, ...]
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        covered = [index for span in self.spans for index in range(span.start, span.stop)]
        if covered != list(range(len(self.blocks))):
            raise ValueError(f"the spans of a plan must cover its {len(self.blocks)} blocks once and in order")

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The names of the blocks that run twice."""
        spans = [span for span in self.spans if span.action is Action.RECOMPUTE]
        return tuple(name for span in spans for name in self.blocks[span.start : span.stop])

    def describe(self) -> str:
        """One line for people: ``segments:2: 9 of 18 blocks recomputed, in 1 span``."""
        num_spans = sum(span.action is Action.RECOMPUTE for span in self.spans)
        plural = "span" if num_spans == 1 else "spans"
        return (
            f"{self.strategy}: {len(self.recomputed)} of {len(self.blocks)} blocks recomputed, in {num_spans} {plural}"
        )

    def to_json(self) -> str:
        """The plan as the text of a ``plan.json``."""
        return json.dumps({"version": FORMAT_VERSION, **asdict(self)}, indent=1)

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
            spans = tuple(Span(start=s["start"], stop=s["stop"], action=Action(s["action"])) for s in data["spans"])
            return cls(strategy=data["strategy"], blocks=tuple(data["blocks"]), spans=spans)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"this is no plan.json: {error}") from error


def read_plan(path: str | Path) -> Plan:
    """The plan in a file.

    Raises:
        InputError: there is no such file, or it holds no plan.
    """
    try:
        return Plan.from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--activation_checkpointing {path} cannot be read: {error}") from error
    except InputError as error:
        raise InputError(f"--activation_checkpointing {path}: {error}") from error
