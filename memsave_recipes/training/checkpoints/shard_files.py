"""The tensors of a checkpoint whose weights are in shards: a safetensors file for each rank that holds any.

The format is that of torch's distributed checkpoints (``HuggingFaceStorageWriter`` with ``save_distributed``): a shard
under the tensor's name, and where it begins in ``DCP_SHARDING_INFO`` of the file's header. Torch's reader loads them
onto any number of ranks. Its writer has the ranks agree on a plan in collectives, which can take longer than the
writing (https://github.com/huggingface/accelerate/issues/4099); a rank knows its shards by itself.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from memsave_recipes.core.sharding.tensors import empty_like_shards, first_row, is_first_replica, local

NAME = "shard-{:05d}-model-00001-of-00001.safetensors"
OFFSETS = "DCP_SHARDING_INFO"


def shards_of(rank: int, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the shards of ``tensors`` that ``rank``, which calls this, has to write, and the header of their file.

    The first of replicas is written, and by rank 0 what is not in shards. No collective.
    """
    mine: dict[str, Tensor] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            shard, begins = tensor.to_local(), [first_row(tensor), *[0] * (tensor.ndim - 1)]
            is_mine = is_first_replica(tensor)
        else:
            shard, begins, is_mine = tensor, [0] * tensor.ndim, rank == 0
        if is_mine and shard.numel():
            mine[name] = shard.detach()
            offsets[name] = {"saved_offsets": begins}
    return mine, {OFFSETS: json.dumps(offsets), "format": "pt"}


def read_shards(folder: Path, like: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """Read the tensors in ``folder``, on each rank its own shards; on any number of ranks. No collective.

    Args:
        like: returns by name the tensor in whose shards one is wanted; ``None``: whole, on the host.

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
