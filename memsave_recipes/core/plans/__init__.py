"""Activation plans: one action for every block of a model, by name or by a solver. Standard library only.

NOTE [ decisions ]
* ``segments:K`` follows ``checkpoint_sequential``: K segments, the last one kept. Their sizes differ by at most one
  block; torch gives the whole remainder to the last.
* Recomputation has two levels at most, and the second one only where no other plan fits without the host. Measured, it
  has the same optimum as one level down to 35 % of the baseline's activations on ResNet-50, and 20 % on DenseNet-121.
"""

from memsave_recipes.core.plans.plan import BUDGET_WORDS, Action, Plan, Span, plan_for, read_plan

__all__ = ["BUDGET_WORDS", "Action", "Plan", "Span", "plan_for", "read_plan"]
