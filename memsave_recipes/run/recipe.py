"""The names that all recipes need, from one module: flags, the run, global batches, optimizer, and its end."""

from memsave_recipes.core.activations import apply_plan
from memsave_recipes.core.errors import InputError, require
from memsave_recipes.core.planner.task import Task
from memsave_recipes.core.step.batch_layout import Batch, BatchLayout, seed_for
from memsave_recipes.models.flags import option
from memsave_recipes.run.failures import run_recipe
from memsave_recipes.run.run import Run
from memsave_recipes.run.training_run import TrainingRun
from memsave_recipes.training.arguments import RecipeArguments
from memsave_recipes.training.batching import GlobalBatch, GlobalBatches
from memsave_recipes.training.evaluation import LabelArguments, evaluate_classifier, sum_over_ranks, summed_loss
from memsave_recipes.training.launch.start import Accelerator
from memsave_recipes.training.optimizers import make_optimizer, make_scheduler
from memsave_recipes.training.parsing import parse_arguments

__all__ = [
    "Accelerator",
    "Batch",
    "BatchLayout",
    "GlobalBatch",
    "GlobalBatches",
    "InputError",
    "LabelArguments",
    "RecipeArguments",
    "Run",
    "Task",
    "TrainingRun",
    "apply_plan",
    "evaluate_classifier",
    "make_optimizer",
    "make_scheduler",
    "option",
    "parse_arguments",
    "require",
    "run_recipe",
    "seed_for",
    "sum_over_ranks",
    "summed_loss",
]
