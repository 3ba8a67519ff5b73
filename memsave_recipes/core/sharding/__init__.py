"""Weights, gradients and optimizer state in shards over the ranks, by torch's ``fully_shard`` (FSDP2).

The method is ZeRO's third stage (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054) as PyTorch FSDP has it
(Zhao et al. 2023, https://arxiv.org/abs/2304.11277): a rank keeps a part of every weight, and gathers those of one unit
while the unit runs.

NOTE [ decisions ]
* We call ``fully_shard``; Accelerate sees a data parallel world, and keeps device, precision, backward, clipping and
  gathering. Its own FSDP never starts on a CPU, and would wrap by classes of layers what a plan joins by span.
* What a plan runs again together is one unit, so its weights are gathered once. Units follow the plan, so a plan has to
  be known before the weights are cut up: a run with a budget finds it by estimates (NOTE [ a plan by estimates ] in
  ``run/run_plan.py``), as ``memsave plan`` does (``core/plans/shards.py``).
* FSDP averages over all ranks, also where groups of them replicate one another, as DDP does. So the exact global batch
  is the one of NOTE [ the exact global batch ] in ``training/batching.py``, and nobody sets a divide factor.
* The gradients of every micro-batch are reduced at once. To accumulate them whole saves traffic, and takes the memory
  that shards are for: a run does it where it is told to (``reduce_once_a_step``), or where a search finds that it fits
  and is faster.
"""

from memsave_recipes.core.sharding.groups import ShardGroups
from memsave_recipes.core.sharding.shards import shard
from memsave_recipes.core.sharding.tensors import gathered, is_sharded, local, whole

__all__ = ["ShardGroups", "gathered", "is_sharded", "local", "shard", "whole"]
