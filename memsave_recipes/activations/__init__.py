"""OBEY: make a model follow an activation plan, with the gradients of the plain model."""

from memsave_recipes.activations.apply import PlanHandle, apply_plan, make_plan
from memsave_recipes.activations.blocks import block_names, find_bottlenecks, find_stacks

__all__ = ["PlanHandle", "apply_plan", "block_names", "find_bottlenecks", "find_stacks", "make_plan"]
