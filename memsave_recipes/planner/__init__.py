"""CHOOSE: the fastest plan that fits the memory."""

from memsave_recipes.planner.budget import Beside, Forecast
from memsave_recipes.planner.make_plan import make_plan, plan_workload

__all__ = ["Beside", "Forecast", "make_plan", "plan_workload"]
