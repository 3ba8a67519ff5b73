"""How many ranks hold one model in shards: and the mesh of all ranks."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memsave_recipes.core.errors import InputError

FULL, NONE = "full", "none"
SHARD, REPLICATE = "shard", "replicate"
"""The dimensions of the mesh."""


@dataclass(frozen=True, kw_only=True)
class ShardGroups:
    """Groups of ``size`` ranks that hold one model in shards; the groups replicate one another (HSDP)."""

    size: int
    num_ranks: int

    @classmethod
    def of(cls, flag: str | None, num_ranks: int) -> "ShardGroups | None":
        """The groups that a value of ``--shard`` asks for; ``None`` for whole weights on every rank.

        Raises:
            InputError: so many ranks cannot be divided like that.
        """
        if flag in (None, NONE):
            return None
        if num_ranks == 1:
            raise InputError(
                f"shard {flag}: there is one rank, so no part of the weights could be elsewhere: launch several, as "
                "with `--config_file accelerate_configs/fsdp2.yaml`, or leave it out"
            )
        size = num_ranks if flag == FULL else int(str(flag))
        if num_ranks % size:
            raise InputError(
                f"shard {flag}: {num_ranks} ranks cannot be divided into groups of {size}: take a divisor of "
                f"{num_ranks}, or full"
            )
        return cls(size=size, num_ranks=num_ranks)

    @property
    def num_replicas(self) -> int:
        """How often the model is there."""
        return self.num_ranks // self.size

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Of all ranks: one group after the other, so that a group is on one machine where that is possible."""
        if self.num_replicas == 1:
            return init_device_mesh(device.type, (self.size,), mesh_dim_names=(SHARD,))
        return init_device_mesh(device.type, (self.num_replicas, self.size), mesh_dim_names=(REPLICATE, SHARD))

    def describe(self) -> str:
        """One line for people."""
        replicas = f", replicated {self.num_replicas} times" if self.num_replicas > 1 else ""
        return f"weights, gradients and optimizer state in shards over {self.size} ranks{replicas}"


def check_precision(flag: str, mixed_precision: str) -> None:
    """Refuse a precision that does not go with shards.

    Raises:
        InputError: it is fp16 or fp8.
    """
    if mixed_precision == "fp8":
        raise InputError(f"shard {flag}: layers that multiply in float8 have not been tried with it: take bf16")
    if mixed_precision == "fp16":
        raise InputError(f"shard {flag}: the scaler of fp16 has not been tried with it: take bf16")
