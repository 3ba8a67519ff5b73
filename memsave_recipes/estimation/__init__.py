"""Estimate the block costs of a step on a device that need not be here: fake tensors and a roofline.

NOTE [ decisions ]
* The model is built on the meta device and then made of fake *cpu* tensors for any target: fake cuda tensors abort on
  a build of torch without CUDA. The same tracer reads them, with seconds by a roofline.
* On a CUDA target the kernels' memory is modelled: attention, autocast's list, dropout masks, the allocator's
  rounding. On this CPU each operator runs once by itself, for its workspace and the layout of its result.
"""
