"""The tensors of a checkpoint whose weights are in shards: a safetensors file for each rank that holds any.

The format is that of torch's distributed checkpoints in safetensors (``HuggingFaceStorageWriter`` with
``save_distributed``): a part of a tensor under the tensor's name, and where it begins in ``DCP_SHARDING_INFO`` of the
file's header. Torch's writer has the ranks agree on a plan in collectives, which can take longer than the writing
(https://github.com/huggingface/accelerate/issues/4099); a rank knows its parts by itself. Torch's reader loads them
onto any number of ranks, cut up in any way or whole. Neither uses pickle.
"""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from memsave_recipes.sharding.tensors import empty_like_shards, first_row, is_first_replica, local

NAME = "shard-{:05d}-model-00001-of-00001.safetensors"
OFFSETS = "DCP_SHARDING_INFO"


@dataclass(frozen=True, eq=False)
class Parts:
    """A rank's parts of tensors, on the host, by the tensor's name, with the header of their file."""

    rank: int
    tensors: dict[str, Tensor]
    header: dict[str, str]


def parts_of(rank: int, tensors: dict[str, Tensor], *, copied: bool = False) -> Parts:
    """Those of ``tensors`` that ``rank``, which calls this, has to write. No collective.

    Of replicas the first writes; tensors that are not in shards are written by rank 0.

    Args:
        copied: also where they are on the host, so that they stay what they are while the training goes on.
    """
    mine: dict[str, Tensor] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            part, begins = tensor.to_local(), [first_row(tensor), *[0] * (tensor.ndim - 1)]
            is_mine = is_first_replica(tensor)
        else:
            part, begins, is_mine = tensor, [0] * tensor.ndim, rank == 0
        if is_mine and part.numel():
            mine[name] = part.detach().to("cpu", copy=copied).contiguous()
            offsets[name] = {"saved_offsets": begins}
    return Parts(rank, mine, {OFFSETS: json.dumps(offsets), "format": "pt"})


def write_parts(folder: Path, parts: Parts) -> Path | None:
    """Write the file of a rank; ``None``, and no file, where it has no part. No collective."""
    if not parts.tensors:
        return None
    path = folder / NAME.format(parts.rank + 1)
    save_file(parts.tensors, path, metadata=parts.header)
    return path


def read_parts(folder: Path, like: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """The tensors in ``folder``, on whichever ranks they were written; each rank reads its own parts. No collective.

    Args:
        like: the tensor in whose shards one of this name and size is wanted; without one it is read whole, to the host.

    Raises:
        ValueError, RuntimeError, OSError: the files cannot be read.
    """
    reader = HuggingFaceStorageReader(str(folder))
    found = reader.read_metadata().state_dict_metadata
    tensors = {
        name: empty_like_shards(about.size, about.properties.dtype, like(name))
        for name, about in found.items()
        if isinstance(about, TensorStorageMetadata)
    }
    with_rows = {name: tensor for name, tensor in tensors.items() if local(tensor).numel()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank plans for itself
        load(with_rows, storage_reader=reader, no_dist=True)  # in place
    return tensors
