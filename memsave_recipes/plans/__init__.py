"""DECIDE: which blocks keep their activations and which run again. Standard library only."""

from memsave_recipes.plans.plan import Action, Plan, Span, read_plan
from memsave_recipes.plans.strategies import plan_for

__all__ = ["Action", "Plan", "Span", "plan_for", "read_plan"]
