"""Flags, launch, exact global batches, optimizers and the guard against losses that are not finite.

NOTE [ decisions ]
* The scheduler and the loader are not prepared by Accelerate: it would step the one once for every rank, and shard
  and pad the other. NOTE [ the exact global batch ] in ``batching.py`` has the formula.
* ``--optimizer_in_backward`` uses any optimizer that treats each parameter by itself, one parameter at a time.
* Lost ranks start again all together, from a checkpoint. The others could go on without them, as torchft does, but not
  with the samples of the step.
* AdamW and SGD are the fused ones: one kernel, no temporary copies, on CPUs too.
"""
