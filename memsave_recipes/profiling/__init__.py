"""Bytes, seconds and FLOPs of training steps, measured as they run.

NOTE [ decisions ]
* Costs are read at the boundaries of blocks, in one instrumented step for each action and in timed ones. Memory that
  the chain does not track is folded into each block's transient peak, so the simulated baseline peaks exactly as
  measured.
* A step that does not fit without checkpointing is measured in groups of blocks while the others recompute: the costs
  of a block do not depend on how the others run.
* Autocast keeps no cache of weights: it would hold a copy of all of them until the forward ends, whatever recomputes.
"""
