"""What a row of the table is, plain first; ``peers.py`` has what others offer, ``ours.py`` what the budget gives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from models import Work
from torch import Tensor

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.plans import Plan
from memsave_recipes.models.causal_lm import LossKind

PLAIN, PLAIN_CHUNKED = "plain", "plain, chunked loss"
BUDGET, BITWISE = "budget", "budget:bitwise"
SEQUENTIAL, SEGMENTS = "checkpoint_sequential", "segments:K"
EVERY_BLOCK, EVERY_NTH, SELECTIVE = "every block", "every n-th block", "selective"
WHOLE, CKPTPLAN = "torch.compile", "ckptplan"
OURS = (BUDGET, BITWISE)

Forward = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table. ``build`` makes its forward, which gives the loss; what it raises is a result as well.

    ``budget_bytes`` are those of a forward and backward, above what is resident; ``num_segments`` is for segments.
    """

    series: str
    name: str
    build: Callable[[], Forward]
    loss: LossKind = "full"
    is_compiled: bool = False
    num_segments: int = 0
    budget_bytes: int | None = None
    plan: Plan | None = None


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much is tried."""

    num_budgets: int = 8
    segments: Sequence[int] = range(2, 13)
    intervals: Sequence[int] = (2, 3, 4)
    ratios: Sequence[float] = (0.3, 0.5, 0.7)
    whole: Sequence[str] = ("gpt2", "llama")  # what torch.compile gets whole; of CNNs ABOUT in pages.py says why not


QUICK = Extent(num_budgets=3, segments=(2, 3), intervals=(2,), ratios=())


def plain(work: Work) -> list[Method]:
    """Plain, and of a language model plain with our loss."""
    methods = [Method(series=PLAIN, name=PLAIN, build=partial(planned, work, "none", "full"))]
    if work.is_language_model:
        build = partial(planned, work, "none", "chunked")
        methods.append(Method(series=PLAIN_CHUNKED, name=PLAIN_CHUNKED, build=build, loss="chunked"))
    return methods


def planned(work: Work, strategy: str, loss: LossKind) -> Forward:
    """A strategy of ours that needs no measuring."""
    return applied(work, plan_blocks(work.copy(loss), strategy), loss)


def applied(work: Work, plan: Plan, loss: LossKind) -> Forward:
    """A plan of ours."""
    model = work.copy(loss)
    apply_plan(model, plan)
    return partial(work.loss_of, model)
