"""CHOOSE: the fastest plan that fits the memory."""

from memsave_recipes.planner.budget import Forecast, StaticMemory
from memsave_recipes.planner.make_plan import make_plan, plan_workload

__all__ = ["Forecast", "StaticMemory", "make_plan", "plan_workload"]
