"""DECIDE: which blocks keep their activations and which run again. Standard library only."""

from memsave_recipes.plans.plan import BUDGET_WORDS, Action, Plan, Span, plan_for, read_plan

__all__ = ["BUDGET_WORDS", "Action", "Plan", "Span", "plan_for", "read_plan"]
