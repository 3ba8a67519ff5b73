"""A step with the same bits on any number of ranks, and BatchNorm over the whole global batch.

``ExactSettings`` is what the flags ask for, ``step_sums`` what a global batch computes with, ``global_batchnorm``
changes a model. Others only ask a batch layout what it needs, and a model whether its BatchNorm is joined.

NOTE [ decisions ]
* Gradients are added in a tree and not as integers: NOTE [ the tree of sums ] in ``tree_sum.py``.
* BatchNorm joins micro-batches in two ways: in blocks that run in micro-batches (``global_batchnorm.py``), equal within
  rounding, and in lockstep (``lockstep.py``), to the bit.
"""
