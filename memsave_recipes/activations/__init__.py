"""Apply an activation plan to a model and remove it; gradients are those without checkpointing."""

from memsave_recipes.activations.apply import PlanHandle, apply_plan, plan_blocks
from memsave_recipes.activations.blocks import block_names, find_bottlenecks, find_stacks

__all__ = ["PlanHandle", "apply_plan", "block_names", "find_bottlenecks", "find_stacks", "plan_blocks"]
