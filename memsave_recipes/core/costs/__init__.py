"""Bytes, seconds and FLOPs of steps and of their blocks: measured as they run, or estimated for an absent device.

NOTE [ decisions ]
* Costs are read at the boundaries of blocks, in one instrumented step for each action and in timed ones. Memory that
  the chain does not track is folded into each block's transient peak, so the simulated baseline peaks exactly as
  measured.
* A step that does not fit without checkpointing is measured in groups of blocks while the others recompute: the costs
  of a block do not depend on how the others run.
* Autocast keeps no cache of weights: it would hold a copy of all of them until the forward ends, whatever recomputes.
* For an absent device the model is built on the meta device and then made of fake *cpu* tensors, whatever the target:
  fake cuda tensors abort on a build of torch without CUDA. The same tracer reads them, with seconds by a roofline.
* On a CUDA target the kernels' memory is modelled: attention, autocast's list, dropout masks, the allocator's
  rounding. On this CPU each operator runs once by itself, for its workspace and the layout of its result.
"""
