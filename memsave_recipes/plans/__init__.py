"""Activation plans: one action for every block of a model, by name or by a solver. Standard library only."""

from memsave_recipes.plans.plan import Action, Plan, Span, read_plan
from memsave_recipes.plans.strategies import BUDGET_WORDS, plan_for

__all__ = ["BUDGET_WORDS", "Action", "Plan", "Span", "plan_for", "read_plan"]
