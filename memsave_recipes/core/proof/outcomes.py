"""Outcomes of a global batch, the first difference of two of them, and one verdict for all ranks.

NOTE [ equality ]
1. Values are equal bit for bit; 0 and -0 are equal, and so are two NaN at the same place. A NaN and a number, or NaN
   at other places, is a difference.
2. A distance in ulp counts the floating-point numbers between two values of one dtype: 0 for equal ones, 1 for
   neighbours (Goldberg 1991, https://doi.org/10.1145/103162.103163). It has no meaning where one of them is not finite.
3. A NaN or an infinity in loss or gradients, equal or not, is no result that training could begin with.
"""

import copy
import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memsave_recipes.core.host.masters import reduce_in_float32

Key = tuple[str, str]
"""Kind and name: ``("gradient", "features.0.weight")``."""

T = TypeVar("T")
KINDS = ("loss", "gradient", "buffer", "parameter", "RNG")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LARGEST = torch.iinfo(torch.int64).max


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of one global batch.

    Args:
        tensors: by kind and name, in the order of ``KINDS``, on whichever device they are.
        block_runs: how often the modules of a block were called; empty where they were not counted.
        error: in one line, if the run was aborted.
    """

    tensors: dict[Key, Tensor]
    block_runs: dict[str, int] = field(default_factory=dict)
    error: str | None = None

    def on_host(self) -> "Outcome":
        """Return a copy that no later run can change."""
        return replace(
            self, tensors={key: tensor.detach().to("cpu", copy=True) for key, tensor in self.tensors.items()}
        )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where two outcomes differ first.

    Args:
        kind: one of ``KINDS``, ``block``, ``run`` (it was aborted), or one of them ``over ranks``.
        ulp, absolute: the largest of the tensor, where both numbers are finite.
    """

    kind: str
    name: str
    words: str
    ulp: int | None = None
    absolute: float | None = None

    def describe(self) -> str:
        """Return a line: ``gradient features.0.weight: 12 of 864 values differ, by up to 3 ulp (1.2e-07)``."""
        largest = [] if self.absolute is None else [f"by up to {self.absolute:.1e}"]
        if self.ulp is not None:
            largest = [f"by up to {self.ulp:,} ulp ({self.absolute:.1e})"]
        return f"{self.kind} {self.name}".strip() + ": " + ", ".join([self.words, *largest])


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether the plan changes anything.

    Args:
        status: ``identical``, ``as exact as plain`` (a plan that compiles), ``nothing to verify``; or ``different``,
            ``not repeatable`` (two baseline runs differ), ``not synchronised``, ``not finite``, ``unproven``.
        num_compared, num_different: tensors of this rank.
        first: the first difference, in the order of a step: loss, gradients, buffers, parameters, RNG.
        rank: which rank found it.
    """

    status: str
    num_compared: int = 0
    num_different: int = 0
    first: Difference | None = None
    rank: int | None = None
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether training can begin."""
        return self.status in ("identical", "as exact as plain", "nothing to verify")

    def describe(self) -> str:
        """Return one line for people."""
        parts = [self.status]
        if self.first:
            where = "" if self.rank is None else f" on rank {self.rank}"
            parts.append(f"{self.first.describe()}{where}")
        if self.num_compared:
            many = f"{self.num_different} of " if self.num_different else ""
            parts.append(f"{many}{self.num_compared} tensors {'differ' if self.num_different else 'compared'}")
        return "; ".join([*parts, *filter(None, [self.note])])

    def to_dict(self) -> dict[str, object]:
        """Return the entry of ``results.json``, without unknown values."""
        first = {f"first_{name}": value for name, value in asdict(self.first).items()} if self.first else {}
        entries = {**{k: v for k, v in asdict(self).items() if k not in ("status", "first")}, **first}
        return {"verdict": self.status, **{name: value for name, value in entries.items() if value not in (None, "")}}


def compare_runs(plain: Outcome, planned: Outcome, *, kept_blocks: tuple[str, ...] = ()) -> Verdict:
    """Return the verdict on a baseline and a planned run, by NOTE [ equality ].

    Args:
        kept_blocks: must have run as often in one as in the other.
    """
    differences = [
        found
        for key in keys_of(plain, planned)
        for found in difference_of(key, plain.tensors.get(key), planned.tensors.get(key))
    ]
    differences += [
        Difference(kind="block", name=name, words="it ran again, and the plan keeps it")
        for name in kept_blocks
        if planned.block_runs.get(name, 0) > plain.block_runs.get(name, 0)
    ]
    return verdict_of("identical", differences, len(plain.tensors), planned)


def difference_in_values(key: Key, one: Tensor, other: Tensor) -> Difference | None:
    """Return the difference of two tensors; ``None`` where rule 1 calls them equal."""
    kind, name = key
    difference = partial(Difference, kind=kind, name=name)
    if one.shape != other.shape or one.dtype != other.dtype:
        words = f"{tuple(one.shape)} in {one.dtype} became {tuple(other.shape)} in {other.dtype}".replace("torch.", "")
        return difference(words=words)
    one, other = dense(one), dense(other)
    differ = (one != other) & ~((one != one) & (other != other))
    count = int(differ.sum())
    if not count:
        return None
    if kind == "RNG":
        return difference(words="another state")
    one, other = one[differ], other[differ]
    words = f"{count} of {differ.numel()} values differ"
    if nans := int((one.isnan() != other.isnan()).sum()):
        words += f", {nans} of them NaN in one run and a number in the other"
    finite = one.isfinite() & other.isfinite()
    if not finite.any():
        return difference(words=words)
    one, other = one[finite].cpu(), other[finite].cpu()  # Apple's GPUs have no float64
    ulp = int(distance_in_ulp(one, other).max()) if one.is_floating_point() else None
    wide = torch.float64 if one.is_floating_point() or one.dtype is torch.bool else torch.int64
    return difference(words=words, ulp=ulp, absolute=float((one.to(wide) - other.to(wide)).abs().max()))


def distance_in_ulp(one: Tensor, other: Tensor) -> Tensor:
    """Return rule 2's distance of each pair of finite values of one floating dtype: int64, at most its largest."""
    bits = [x.contiguous().view(_BITS[x.element_size()]).to(torch.int64) for x in (one, other)]
    mask = _LARGEST >> (64 - 8 * one.element_size())
    magnitudes = [b & mask for b in bits]  # without the sign; neighbours of one sign are neighbours as integers
    near = (magnitudes[0] - magnitudes[1]).abs()
    headroom = _LARGEST - magnitudes[1]
    far = torch.where(magnitudes[0] > headroom, _LARGEST, magnitudes[0] + magnitudes[1])
    return torch.where(one.signbit() == other.signbit(), near, far)


def verdict_of(if_equal: str, differences: list[Difference], num_compared: int, planned: Outcome) -> Verdict:
    """Return the verdict ``if_equal``, unless something differs or is not finite."""
    if planned.error:
        return Verdict(status="different", first=Difference(kind="run", name="", words=planned.error))
    if differences:
        count = len(differences)
        return Verdict(status="different", num_compared=num_compared, num_different=count, first=differences[0])
    not_finite = _first_not_finite(planned)
    return Verdict(status="not finite" if not_finite else if_equal, num_compared=num_compared, first=not_finite)


def keys_of(plain: Outcome, planned: Outcome) -> list[Key]:
    """Return the keys of both, in the order of ``KINDS``."""
    return sorted({**plain.tensors, **planned.tensors}, key=lambda key: KINDS.index(key[0]))


def difference_of(key: Key, plain: Tensor | None, planned: Tensor | None) -> list[Difference]:
    """List no difference or one, wherever the tensors are, also where one of them is missing."""
    if plain is None or planned is None:
        which = "planned" if plain is None else "plain"
        words = f"only the {which} run {'changed it' if key[0] == 'parameter' else 'has one'}"
        return [Difference(kind=key[0], name=key[1], words=words)]
    found = difference_in_values(key, plain.cpu(), planned.cpu())
    return [found] if found else []


def _first_not_finite(outcome: Outcome) -> Difference | None:
    for (kind, name), tensor in outcome.tensors.items():
        if kind in ("loss", "gradient") and not bool(tensor.isfinite().all()):
            count = int((~dense(tensor).isfinite()).sum())
            return Difference(kind=kind, name=name, words=f"{count} of {tensor.numel()} values are not finite")
    return None


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor with the values of a sparse gradient at all places."""
    tensor = tensor.detach()
    return tensor.to_dense() if tensor.is_sparse else tensor


def without_wrapper(model: nn.Module) -> nn.Module:
    """Return the module inside DDP."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def reducer_of_its_own(model: nn.Module) -> AbstractContextManager[None]:
    """Replace DDP's reducer meanwhile: a copy of a DDP shares the module inside and makes a reducer for it."""
    if not isinstance(model, DistributedDataParallel):
        return nullcontext()
    other = copy.copy(model)
    reduce_in_float32(other)
    return swap_contents(model, dict(vars(other)))


@contextmanager
def swap_contents(module: nn.Module, attributes: dict[str, Any]) -> Iterator[None]:
    """Give ``module`` the attributes of another one meanwhile."""
    own = dict(vars(module))
    try:
        vars(module).clear()
        vars(module).update(attributes)
        yield
    finally:
        vars(module).clear()
        vars(module).update(own)


def agree(verdict: Verdict) -> Verdict:
    """Return the verdict of the first rank that objects; of this one where all pass."""
    verdicts = _gather(verdict)
    objections = [replace(found, rank=rank) for rank, found in enumerate(verdicts) if not found.passed]
    if not objections or len(verdicts) == 1:
        return verdict
    return objections[0]


def shared_at_the_start(model: nn.Module) -> dict[Key, Tensor]:
    """Return what must be equal on all ranks before a step: trained parameters, buffers that DDP leaves alone."""
    inner = without_wrapper(model)
    parameters = {("parameter", name): p.detach() for name, p in inner.named_parameters() if p.requires_grad}
    return parameters | {("buffer", name): b for name, b in inner.named_buffers() if not _is_broadcast(model, name)}


def shared_after(model: nn.Module, outcome: Outcome) -> dict[Key, Tensor]:
    """Return what must be equal after it: gradients, buffers that DDP does not give out at the next forward."""
    return {
        (kind, name): tensor
        for (kind, name), tensor in outcome.tensors.items()
        if kind == "gradient" or (kind == "buffer" and not _is_broadcast(model, name))
    }


def out_of_step(model: nn.Module, shared: dict[Key, Tensor]) -> Difference | None:
    """Return the first tensor that is not the same on all ranks; the same answer on all of them."""
    if not isinstance(model, DistributedDataParallel) or dist.get_world_size() == 1:
        return None
    digests = _gather({key: _digest(tensor) for key, tensor in shared.items()})
    for key in dict.fromkeys(key for of_rank in digests for key in of_rank):
        of_ranks = [of_rank.get(key) for of_rank in digests]
        if len(set(of_ranks)) > 1:
            other = next(rank for rank, digest in enumerate(of_ranks) if digest != of_ranks[0])
            return _between_ranks(key, shared.get(key), other)
    return None


def _between_ranks(key: Key, tensor: Tensor | None, other: int) -> Difference:
    tensors = _gather(None if tensor is None else dense(tensor).cpu())
    first, second = tensors[0], tensors[other]
    kind = f"{key[0]} over ranks"
    if first is None or second is None:
        return Difference(kind=kind, name=key[1], words=f"rank 0 and rank {other}: only one of them has it")
    found = difference_in_values(key, first, second)
    # Bytes may differ where values do not, as in 0 and -0.
    words = f"rank 0 and rank {other}: {found.words if found else 'other signs of zero'}"
    return replace(found, kind=kind, words=words) if found else Difference(kind=kind, name=key[1], words=words)


def _is_broadcast(model: nn.Module, name: str) -> bool:
    """Return whether DDP gives all ranks the buffer of rank 0 before a forward."""
    if not isinstance(model, DistributedDataParallel):
        return False
    return bool(model.broadcast_buffers) and name not in model.parameters_to_ignore


def _gather(value: T) -> list[T]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()  # gathered in place
    dist.all_gather_object(values, value)
    return values


def _digest(tensor: Tensor) -> str:
    values = dense(tensor).cpu().contiguous().flatten()
    digest = hashlib.sha256(values.view(torch.uint8).numpy().data).hexdigest()
    return f"{tuple(tensor.shape)} {tensor.dtype} {digest}"
