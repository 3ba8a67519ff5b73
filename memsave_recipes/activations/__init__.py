"""OBEY: make a model follow an activation plan, with the gradients of the plain model."""

from memsave_recipes.activations.apply import PlanHandle, apply_plan, plan_blocks
from memsave_recipes.activations.blocks import block_names, find_bottlenecks, find_stacks

__all__ = ["PlanHandle", "apply_plan", "block_names", "find_bottlenecks", "find_stacks", "plan_blocks"]
