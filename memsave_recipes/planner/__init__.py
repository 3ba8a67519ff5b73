"""The planner: the fastest micro-batch size and activation checkpointing plan that fit a memory budget."""

from memsave_recipes.planner.budget import Forecast, StaticMemory
from memsave_recipes.planner.make_plan import make_plan, plan_workload

__all__ = ["Forecast", "StaticMemory", "make_plan", "plan_workload"]
