"""Tensors of which a rank has a part (``DTensor``): that part, the whole, and others cut up like them.

Parameters, gradients and optimizer state are cut along their first dimension, as ``torch.chunk`` does; the last ranks
may have less than the others, or nothing.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import empty as empty_shards


def is_sharded(model: nn.Module) -> bool:
    """Whether any of its parameters is in shards."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def local(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that this rank has, in the same memory; ``tensor`` itself where that is all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def locals_of(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """``local`` of each."""
    return map(local, tensors)


def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``, from all ranks of its mesh; a collective where it is in shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: DTensor) -> int:
    """The row of the whole tensor at which this rank's part begins; of its mesh the last dimension cuts it up."""
    mesh = tensor.device_mesh
    rows_of_a_rank = -(-tensor.shape[0] // mesh.size(mesh.ndim - 1))
    return min(tensor.shape[0], mesh.get_local_rank(mesh.ndim - 1) * rows_of_a_rank)


def is_first_replica(tensor: DTensor) -> bool:
    """Whether this rank belongs to the first of the groups that hold ``tensor``."""
    return tensor.device_mesh.ndim == 1 or tensor.device_mesh.get_local_rank(0) == 0


def cut_like(tensor: Tensor, other: Tensor | None) -> Tensor:
    """A whole ``tensor``, which every rank has, in the shards of ``other``; as it is where neither has any."""
    if isinstance(tensor, DTensor) or not isinstance(other, DTensor):
        return tensor
    on_device = tensor.to(other.to_local().device)
    return distribute_tensor(on_device, other.device_mesh, other.placements, src_data_rank=None)


def empty_like_shards(size: torch.Size, dtype: torch.dtype, other: Tensor | None) -> Tensor:
    """Uninitialised, in the shards of ``other`` where that has the same size, else whole and on the host."""
    if not isinstance(other, DTensor) or other.shape != size:
        return torch.empty(size, dtype=dtype)
    return empty_shards(*size, dtype=dtype, device_mesh=other.device_mesh, placements=other.placements)


@torch.no_grad()
def gathered(model: nn.Module, *, wanted: bool, only_trained: bool = False) -> dict[str, Tensor]:
    """The ``state_dict`` of a model in shards, whole and on the host of the ranks where it is ``wanted``.

    For all ranks, which gather one tensor at a time; the others keep none. Names of one tensor share its memory.

    Args:
        only_trained: without frozen parameters and buffers.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    on_host: dict[int, Tensor] = {}
    result: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        parameter = named.get(name)
        if only_trained and not (parameter is not None and parameter.requires_grad):
            continue
        key = id(tensor if parameter is None else parameter)
        if key not in on_host:
            full = whole(tensor)
            on_host[key] = full.cpu() if wanted else torch.empty(0)
        result[name] = on_host[key]
    return result if wanted else {}
