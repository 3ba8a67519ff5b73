"""Activation plans: one action for every block of a model, by name or by a solver.

NOTE [ decisions ]
* ``segments:K`` follows ``checkpoint_sequential``: K segments, the last one kept. Their sizes differ by at most one
  block; torch gives the whole remainder to the last.
* Recomputation has two levels at most (``RECOMPUTE_NESTED``). The planner tries the second level only if no plan with
  one level fits without offloading. On ResNet-50 one level goes down to 41 % of the baseline (``docs/recipes.md``).
"""

from memsave_recipes.core.plans.plan import BUDGET_WORDS, Action, Plan, Span, plan_for, read_plan

__all__ = ["BUDGET_WORDS", "Action", "Plan", "Span", "plan_for", "read_plan"]
