"""One row over several ranks: each has a slice of every row, and inside of attention a part of the heads of whole rows.

Notes: ``docs/design/models.md``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from transformers import PreTrainedModel

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.losses import IGNORED_LABEL
from memsave_recipes.models.flags import check_ranges, option
from memsave_recipes.models.packed_attention import (
    OTHER_LOGITS,
    DocumentLengths,
    Documents,
    agree,
    attend_by_document,
    drops,
    evaluating,
)

ROW_LENGTHS = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies follow from the longest position that they are given."""


@dataclass(kw_only=True)
class SequenceArguments:
    """Whether several ranks share each row."""

    sequence_parallel: int = option(
        1,
        "ranks that share each row (Ulysses), if rows are too long for one; must divide the heads",
        shown="seldom",
        least=1,
        rounds="ranks add gradients in another order",
        before=1,
    )

    def __post_init__(self) -> None:
        size = self.sequence_parallel
        check_ranges(self)
        if size == 1:
            return
        if vars(self)["bitwise_topology"]:
            why = "--bitwise_topology adds up the gradients of whole rows"
            raise InputError(f"--sequence_parallel {size}: {why}: leave one of them out")


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """The ranks that share the rows of this one: NOTE [ sequence parallelism ].

    Args:
        group: ``None`` in an estimate: rule 8.
        size: the number of ranks.
        rank: of this one among them.
    """

    group: dist.ProcessGroup | None
    size: int
    rank: int = 0

    @classmethod
    def of(cls, size: int, timeout: timedelta) -> "SequenceGroup | None":
        """Make the groups of all ranks, which call this together; ``None`` where each has rows of its own.

        Args:
            timeout: after which an exchange fails, as for the process group of all ranks.
        """
        if size == 1:
            return None
        group, _ = dist.new_subgroups(size, timeout=timeout)
        return cls(group, size, dist.get_rank(group))

    @classmethod
    def estimated(cls, size: int) -> "SequenceGroup | None":
        """Make the group of an estimate; ``None`` where each rank has rows of its own."""
        return None if size == 1 else cls(None, size)

    @property
    def line(self) -> str:
        """Say so to people."""
        return f"rows are shared by {self.size} ranks: attention by document, each rank with a part of the heads"

    def __deepcopy__(self, memo: object) -> "SequenceGroup":
        """Return the same: copies of a model talk to the same ranks."""
        return self

    def sliced(
        self, rows: Tensor, targets: Tensor, positions: Tensor | None = None, lengths: DocumentLengths | None = None
    ) -> tuple[dict[str, Any], Tensor]:
        """Cut rows of tokens and their targets, (B, T), to those of this rank, (B, T / ranks): rule 1.

        Args:
            positions: (B, T); by default each row is one document.
            lengths: of the documents of each row.

        Returns:
            What the model takes, and the targets.
        """
        count, length = rows.shape
        if positions is None:
            positions = torch.arange(length, device=rows.device).expand(count, -1)
        lengths = [[length]] * count if lengths is None else lengths
        if rest := -length % self.size:
            lengths = [[*of_row, rest] for of_row in lengths]
        taken: dict[str, Any] = {"input_ids": self.slice(rows), "position_ids": self.slice(positions)}
        taken |= {"document_lengths": Documents(lengths), "sequence_group": self}
        return taken, self.slice(targets, IGNORED_LABEL)

    def slice(self, rows: Tensor, filling: int = 0) -> Tensor:
        """Return this rank's part of (B, T), or of (B, T, ...) where T is a multiple of the ranks."""
        length = -(-rows.shape[1] // self.size)
        if rest := length * self.size - rows.shape[1]:
            rows = F.pad(rows, (0, rest), value=filling)
        return rows.narrow(1, self.rank * length, length)

    def attend(self, attention: Callable[..., Tensor], query: Tensor, *keys_and_values: Tensor) -> Tensor:
        """Call ``attention`` on the whole rows of a part of the heads, from slices (B, H, L, D) to (B, L, H, D).

        Raises:
            InputError: the ranks do not divide the heads.
        """
        heads = query.shape[1]
        if heads % self.size:
            raise InputError(
                f"--sequence_parallel {self.size}: {heads} attention heads cannot be split over {self.size} ranks: "
                f"take a divisor of {heads}"
            )
        parts = [self._parts(states) for states in (query, *keys_and_values)]
        whole = self._exchange(torch.cat(parts, dim=3)).flatten(0, 1)  # (ranks * L, B, width)
        of_each = zip(whole.split([part.shape[3] for part in parts], dim=2), (query, *keys_and_values), strict=True)
        rows = [one.unflatten(2, (-1, states.shape[3])).permute(1, 2, 0, 3) for one, states in of_each]
        return self._slices(attention(*rows))

    def _parts(self, states: Tensor) -> Tensor:
        """Cut (B, H, L, D) to (ranks, L, B, H / ranks * D): the heads of each rank, repeated where there are fewer."""
        repeats = self.size // gcd(states.shape[1], self.size)
        states = states.repeat_interleave(repeats, dim=1) if repeats > 1 else states
        parts: Tensor = states.unflatten(1, (self.size, -1)).permute(1, 3, 0, 2, 4).flatten(3)
        return parts

    def _slices(self, attended: Tensor) -> Tensor:
        """Exchange (B, ranks * L, h, D) for (B, L, ranks * h, D)."""
        parts = attended.unflatten(1, (self.size, -1)).permute(1, 2, 0, 3, 4)  # (ranks, L, B, h, D)
        return self._exchange(parts).permute(2, 1, 0, 3, 4).flatten(2, 3)

    def _exchange(self, parts: Tensor) -> Tensor:
        exchanged: Tensor
        if is_compiling():
            assert self.group is not None, "an estimate compiles nothing"
            exchanged = _compiled_exchange(parts, self.group.group_name)
        else:
            exchanged = _AllToAll.apply(parts, self.group)  # type: ignore[no-untyped-call]
        return exchanged

    @torch.no_grad()
    def adopt(self, model: PreTrainedModel, *, compiles: bool = False) -> None:
        """Let ``model`` attend by document in this group, and check that slices have the logits of whole rows.

        For all ranks.

        Raises:
            InputError: it cannot, or they have not, or its layers are to be compiled with dropout.
        """
        if compiles and drops(model):
            raise InputError(
                f"--sequence_parallel {self.size}: layers with dropout that attend by document are not compiled: take "
                "full or full_tiled, without --compile"
            )
        if reason := attend_by_document(model) or _why_not_in_parts(model) or self._why_not(model):
            raise InputError(f"--sequence_parallel {self.size}: the model needs whole rows, as {reason}: leave it out")
        vars(model)["sequence_group"] = self

    def _why_not(self, model: PreTrainedModel) -> str | None:
        if self.group is None:
            return None
        device = next(model.parameters()).device
        tokens = torch.arange(8 * self.size, device=device).square().view(2, -1) // 3 % 4  # slices that differ
        taken, _ = self.sliced(tokens, tokens)
        with evaluating(model):
            expected = model(input_ids=tokens, document_lengths=taken["document_lengths"], use_cache=False).logits
            found = model(**taken, use_cache=False).logits
        on_all = torch.tensor(float(agree(found, self.slice(expected))), device=device)
        dist.all_reduce(on_all, dist.ReduceOp.MIN)
        return None if on_all else OTHER_LOGITS


def _why_not_in_parts(model: nn.Module) -> str | None:
    """Say of its rotary embeddings why slices of a row would have others."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if any(name in str(kind) for name in ROW_LENGTHS):
                return f"its {kind} positions depend on the length of a row"
    return None


class _AllToAll(torch.autograd.Function):
    """Give the parts (ranks, ...) to the ranks of a group, and take one from each: rule 4."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    parts = parts.contiguous()
    taken = torch.empty_like(parts)
    dist.all_to_all_single(taken, parts, group=group)
    return taken


@torch.library.custom_op("memsave::exchange", mutates_args=())
def _compiled_exchange(parts: Tensor, group_name: str) -> Tensor:
    """Exchange as ``_AllToAll``: rule 6."""
    return _all_to_all(parts, _resolve_process_group(group_name))  # type: ignore[arg-type]


@_compiled_exchange.register_fake
def _(parts: Tensor, group_name: str) -> Tensor:
    return parts.new_empty(parts.shape)


def _save(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    _, ctx.group_name = inputs


def _exchange_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return _compiled_exchange(gradient, ctx.group_name), None


_compiled_exchange.register_autograd(_exchange_back, setup_context=_save)
