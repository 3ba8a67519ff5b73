"""The parts of a recipe that are the same in all: flags, the run, exact global batches, optimizer, and how it ends."""

from memsave_recipes.distributed import main_process_first
from memsave_recipes.errors import InputError
from memsave_recipes.metrics import classification_metrics
from memsave_recipes.planner.task import Task
from memsave_recipes.run.failures import run_recipe
from memsave_recipes.run.run import Run
from memsave_recipes.training.arguments import RecipeArguments, require
from memsave_recipes.training.batching import Batch, gather_counted
from memsave_recipes.training.environment import deterministic_kernels
from memsave_recipes.training.launch import synchronize_batchnorm
from memsave_recipes.training.optimizers import clip_gradients
from memsave_recipes.training.parsing import parse_arguments

__all__ = [
    "Batch",
    "InputError",
    "RecipeArguments",
    "Run",
    "Task",
    "classification_metrics",
    "clip_gradients",
    "deterministic_kernels",
    "gather_counted",
    "main_process_first",
    "parse_arguments",
    "require",
    "run_recipe",
    "synchronize_batchnorm",
]
