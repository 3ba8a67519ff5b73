"""The planner: the fastest micro-batch size and activation checkpointing plan that fit a memory budget.

NOTE [ decisions ]
* A recipe describes its task: ``task`` next to ``main`` gives the model, the loss and a micro-batch before there are
  data or weights; ``memsave plan`` needs nothing else.
* Nothing is interpolated: each micro-batch size, halvings of a rank's share, is measured or estimated by itself, and
  the search ends with the first size in which nothing fits.
* A choice runs once as a trial step before it is used, a run's and ``make_plan``'s (``trial_step.py``). Memory that
  is in no tensor of a step (the device's context, workspaces, a reserve of 1 %) is part of the budget and shown by
  itself.
* The plan of a run is made after ``prepare``, so that a measured step is that of the training, with its precision.
* The loss of a language model, and its chunks, are compared in estimates only. In a run ``--loss auto`` decides by the
  size of the logits alone: another size of chunks rounds otherwise, and a plan has the bits of the baseline.
"""

from memsave_recipes.core.planner.budget import Forecast
from memsave_recipes.core.planner.make_plan import make_plan
from memsave_recipes.core.plans.chain import StaticMemory

__all__ = ["Forecast", "StaticMemory", "make_plan"]
