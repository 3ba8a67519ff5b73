"""Tensors of which a rank has a part (``DTensor``): that part, the whole, and others cut up like them.

Parameters, gradients and optimizer state are cut along their first dimension, as ``torch.chunk`` does; the last ranks
may have less than the others, or nothing.
"""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

GATHERED_DTYPE = "memsave_gathered_dtype"
"""An attribute of a model in shards: the dtype of its weights where their shards are masters, else ``None``."""


def is_sharded(model: nn.Module) -> bool:
    """Whether any of its parameters is in shards."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def local(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that this rank has, in the same memory; ``tensor`` itself where that is all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``, from all ranks of its mesh; a collective where it is in shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def num_parts(tensor: Tensor) -> int:
    """The ranks that hold ``tensor`` together: those of the last dimension of its mesh, which cuts it up."""
    return tensor.device_mesh.size(tensor.device_mesh.ndim - 1) if isinstance(tensor, DTensor) else 1


def most_rows(tensor: DTensor) -> int:
    """Rows of the largest part of ``tensor``, that of the first rank."""
    return -(-tensor.shape[0] // num_parts(tensor))


def first_row(tensor: DTensor) -> int:
    """The row of the whole tensor at which this rank's part begins."""
    return min(tensor.shape[0], _number_of_part(tensor) * most_rows(tensor))


def _group(tensor: DTensor) -> dist.ProcessGroup:
    """The ranks that hold ``tensor`` together."""
    return tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)


def _number_of_part(tensor: DTensor) -> int:
    return tensor.device_mesh.get_local_rank(tensor.device_mesh.ndim - 1)


def is_first_replica(tensor: DTensor) -> bool:
    """Whether this rank belongs to the first of the groups that hold ``tensor``."""
    return tensor.device_mesh.ndim == 1 or tensor.device_mesh.get_local_rank(0) == 0


def cut_like(tensor: Tensor, other: Tensor | None) -> Tensor:
    """A whole ``tensor``, which every rank has, in the shards of ``other``; as it is where neither has any.

    The parts are where ``tensor`` is, so that a device need not hold all that is loaded onto it.
    """
    if isinstance(tensor, DTensor) or not isinstance(other, DTensor):
        return tensor
    cut = torch.empty_like(other, dtype=tensor.dtype, device=tensor.device, requires_grad=False)
    part, begin = local(cut.detach()), first_row(other)
    part.copy_(tensor[begin : begin + len(part)])
    return cut


@torch.no_grad()
def with_part(part: Tensor, like: Tensor) -> Tensor:
    """The tensor in the shards of ``like``, and of its size, of which this rank has ``part``. No collective.

    It is where ``part`` is; ``DTensor.from_local`` would bring that to the device of the mesh.
    """
    if not isinstance(like, DTensor):
        return part
    cut = torch.empty_like(like, dtype=part.dtype, device=part.device, requires_grad=False)
    local(cut).data = part
    return cut


def norms_over_ranks(norms: Tensor, like: Tensor) -> Tensor:
    """The norms of tensors in the shards of ``like``, by the ``norms`` of this rank's parts, (n,), on the host.

    A collective within the groups that hold one model, on the device of ``like``.
    """
    if not isinstance(like, DTensor):
        return norms
    squares = norms.to(local(like).device, non_blocking=True) ** 2
    dist.all_reduce(squares, group=_group(like))
    return (squares**0.5).cpu()


def collected(part: Tensor, like: Tensor, rank: int) -> Tensor | None:
    """On ``rank`` of each group the whole tensor of which this rank has ``part``; ``None`` on the others.

    A collective within the groups that hold one model; ``part`` itself where that is all of it.

    Args:
        like: a tensor in the same shards.
    """
    if not isinstance(like, DTensor):
        return part
    rows = most_rows(like)
    sent = part.new_zeros((rows, *like.shape[1:]))
    sent[: len(part)] = part
    is_here = _number_of_part(like) == rank
    received = part.new_empty((num_parts(like) * rows, *like.shape[1:])) if is_here else None
    buffers = None if received is None else list(received.split(rows))
    dist.gather(sent, buffers, group=_group(like), group_dst=rank)
    return None if received is None else received[: like.shape[0]]


def handed_out(tensor: Tensor | None, like: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """This rank's part of the whole ``tensor`` of ``rank`` of each group; the ``tensor`` of others is not looked at.

    A collective within the groups that hold one model; ``tensor`` itself where nothing is cut up.

    Args:
        like: a tensor in the shards that it is cut into.
        dtype: of ``tensor``.
    """
    if not isinstance(like, DTensor):
        assert tensor is not None, "there is no other rank"
        return tensor
    rows, part = most_rows(like), local(like)
    received = torch.empty((rows, *like.shape[1:]), dtype=dtype, device=part.device)
    buffers = None
    if tensor is not None and _number_of_part(like) == rank:
        sent = tensor.new_zeros((num_parts(like) * rows, *like.shape[1:]))
        sent[: len(tensor)] = tensor
        buffers = list(sent.split(rows))
    dist.scatter(received, buffers, group=_group(like), group_src=rank)
    return received[: len(part)]


def empty_like_shards(size: torch.Size, dtype: torch.dtype, other: Tensor | None) -> Tensor:
    """Uninitialised, on the host, in the shards of ``other`` where that has the same size, else whole."""
    if not isinstance(other, DTensor) or other.shape != size:
        return torch.empty(size, dtype=dtype)
    return torch.empty_like(other, dtype=dtype, device="cpu", requires_grad=False)


@torch.no_grad()
def gathered(model: nn.Module, names: Collection[str], *, wanted: bool) -> dict[str, Tensor]:
    """Tensors of the ``state_dict`` of a model in shards, whole and on the host of the ranks where they are ``wanted``.

    For all ranks, which gather one tensor at a time; the others keep none. Names of one tensor share its memory.
    Masters come in the dtype of their weights.
    """
    dtypes = (vars(module).get(GATHERED_DTYPE) for module in model.modules())
    dtype = next(filter(None, dtypes), None)
    named = dict(model.named_parameters(remove_duplicate=False))
    on_host: dict[int, Tensor] = {}
    result: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name not in names:
            continue
        key = id(named.get(name, tensor))
        if key not in on_host:
            full = whole(tensor)
            of_weight = dtype if name in named and named[name].requires_grad else None
            kept = full.to("cpu", of_weight or full.dtype, copy=True) if wanted else torch.empty(0)
            on_host[key] = kept  # without the rows that pad shards
        result[name] = on_host[key]
    return result if wanted else {}
