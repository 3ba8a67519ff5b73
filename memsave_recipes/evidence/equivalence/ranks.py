"""One verdict for all ranks, and what has to be the same on all of them."""

import copy
import hashlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memsave_recipes.evidence.equivalence.kept_state import lent
from memsave_recipes.evidence.equivalence.outcomes import Difference, Key, Outcome, Verdict, dense, measure


def without_wrapper(model: nn.Module) -> nn.Module:
    """What DDP wraps."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def reducer_of_its_own(model: nn.Module) -> AbstractContextManager[None]:
    """Rule 4 of NOTE [ the proof ]: a copy of a DDP shares the module inside and makes a reducer for it."""
    if not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return lent(model, dict(vars(copy.copy(model))))


def agree(verdict: Verdict) -> Verdict:
    """The verdict of the first rank that objects; of this one where all pass."""
    verdicts = _gather(verdict)
    objections = [replace(found, rank=rank) for rank, found in enumerate(verdicts) if not found.passed]
    if not objections or len(verdicts) == 1:
        return verdict
    return objections[0]


def shared_at_the_start(model: nn.Module) -> dict[Key, Tensor]:
    """What has to be the same on all ranks before a step: what trains, and buffers that DDP leaves alone."""
    inner = without_wrapper(model)
    parameters = {("parameter", name): p.detach() for name, p in inner.named_parameters() if p.requires_grad}
    return parameters | {("buffer", name): b for name, b in inner.named_buffers() if not _is_broadcast(model, name)}


def shared_after(model: nn.Module, outcome: Outcome) -> dict[Key, Tensor]:
    """And after it: gradients, and buffers that DDP leaves alone. The others follow rank 0 at the next forward."""
    return {
        (kind, name): tensor
        for (kind, name), tensor in outcome.tensors.items()
        if kind == "gradient" or (kind == "buffer" and not _is_broadcast(model, name))
    }


def out_of_step(model: nn.Module, shared: dict[Key, Tensor]) -> Difference | None:
    """The first tensor that is not the same on all ranks; the same answer on all of them."""
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
    kind = f"{key[0]} over ranks"
    if tensors[0] is None or tensors[other] is None:
        return Difference(kind=kind, name=key[1], words=f"rank 0 and rank {other}: only one of them has it")
    found = measure(key, tensors[0], tensors[other])
    # Bytes may differ where values do not, as in 0 and -0.
    words = f"rank 0 and rank {other}: {found.words if found else 'other signs of zero'}"
    return replace(found, kind=kind, words=words) if found else Difference(kind=kind, name=key[1], words=words)


def _is_broadcast(model: nn.Module, name: str) -> bool:
    """Whether DDP gives all ranks the buffer of rank 0 before a forward."""
    if not isinstance(model, DistributedDataParallel):
        return False
    return bool(model.broadcast_buffers) and name not in model.parameters_to_ignore


def _gather(value: Any) -> list[Any]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _digest(tensor: Tensor) -> str:
    values = dense(tensor).cpu().contiguous().flatten()
    digest = hashlib.sha256(values.view(torch.uint8).numpy().data).hexdigest()
    return f"{tuple(tensor.shape)} {tensor.dtype} {digest}"
