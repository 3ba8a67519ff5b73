"""Activation plans: one action for every block of a model, by name or by a solver. Standard library only.

NOTE [ decisions ]
* ``segments:K`` follows ``checkpoint_sequential``: K segments, the last one kept. Their sizes differ by at most one
  block; torch gives the whole remainder to the last.
* The solver finds the least added time for a byte budget exactly, from the costs of a chain (``chain.py`` defines
  them, ``simulate.py`` the peak of a plan). Recomputation has one level: a recomputation does not recompute within
  itself.
"""

from memsave_recipes.plans.plan import BUDGET_WORDS, Action, Plan, Span, plan_for, read_plan

__all__ = ["BUDGET_WORDS", "Action", "Plan", "Span", "plan_for", "read_plan"]
