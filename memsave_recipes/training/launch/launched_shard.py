"""Shards as a launch file of Accelerate asks for them.

NOTE [ shards in a launch file ], as of Accelerate 1.15

1. ``distributed_type: FSDP`` with its ``fsdp_config`` becomes ``ACCELERATE_USE_FSDP`` and ``FSDP_...`` in the
   environment of every rank, ``parallelism_config`` becomes ``ACCELERATE_USE_PARALLELISM_CONFIG`` and
   ``PARALLELISM_CONFIG_...``. The version of FSDP is 1 unless the file says 2.
2. On a CPU Accelerate makes a DDP of it, without a word. So the variables are read here, and taken away from Accelerate
   while a run lasts. transformers reads them as well: with ``fsdp_cpu_ram_efficient_loading`` only one rank of a
   machine would have the weights of a checkpoint.
3. A setting that moves weights elsewhere, or computes otherwise, is refused. The units are those of the plan, and the
   files those of ``checkpoints/``, so a wrap policy and a type of state dict say nothing here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.utils import parse_flag_from_env

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.sharding.groups import FULL

USES_FSDP, USES_PARALLELISM = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"
SIZE = "PARALLELISM_CONFIG_{}_SIZE"
OTHER_PARALLELISM = ("TP", "CP", "SP")
REFUSED = {
    "FSDP_OFFLOAD_PARAMS": "fsdp_offload_params keeps weights on the host, which the recipes do not: set it to false",
    "FSDP_ACTIVATION_CHECKPOINTING": (
        "fsdp_activation_checkpointing would run beside the plan: set it to false, and pass --activation_checkpointing"
    ),
}


@contextmanager
def launched_shard() -> Iterator[str | None]:
    """The value of ``--shard`` that the launch file implies, if it does; inside, Accelerate reads none of it.

    Raises:
        InputError: it asks for what the recipes do not do, by NOTE [ shards in a launch file ].
    """
    if not parse_flag_from_env(USES_FSDP):
        yield None
        return
    implied = _implied()
    taken = {name: os.environ.pop(name) for name in (USES_FSDP, USES_PARALLELISM) if name in os.environ}
    try:
        yield implied
    finally:
        os.environ |= taken


def _implied() -> str:
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise InputError(
            f"fsdp_version {version}: the recipes shard by torch's fully_shard, which is FSDP2: launch with "
            "`--config_file accelerate_configs/fsdp2.yaml`, or write fsdp_version: 2"
        )
    for name, reason in REFUSED.items():
        if parse_flag_from_env(name):
            raise InputError(reason)
    if not parse_flag_from_env("FSDP_RESHARD_AFTER_FORWARD", default=True):
        raise InputError(
            "fsdp_reshard_after_forward false keeps all weights gathered until the backward: set it to true"
        )
    return _group_size() if parse_flag_from_env(USES_PARALLELISM) else FULL


def _group_size() -> str:
    """By ``parallelism_config``."""
    for name in OTHER_PARALLELISM:
        if _size(name) > 1:
            raise InputError(
                f"parallelism_config: {name.lower()}_size {_size(name)} cuts up single layers or rows in a way "
                "that the recipes do not: set it to 1, and pass --sequence_parallel for long rows"
            )
    replicas, shards = _size("DP_REPLICATE"), _size("DP_SHARD")
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if replicas * shards != num_ranks:
        raise InputError(
            f"parallelism_config: dp_replicate_size {replicas} times dp_shard_size {shards} are not the {num_ranks} "
            "ranks that were launched: make them so, or leave parallelism_config out and pass --shard"
        )
    return FULL if replicas == 1 else str(shards)


def _size(name: str) -> int:
    return int(os.environ.get(SIZE.format(name), "1"))
