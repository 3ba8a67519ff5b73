"""The names that all recipes need, from one module: flags, the run, global batches, optimizer, and its end."""

from memsave_recipes.core.errors import InputError, require
from memsave_recipes.core.planner.task import Task
from memsave_recipes.core.step.batch_layout import Batch, BatchLayout, seed_for
from memsave_recipes.run.failures import run_recipe
from memsave_recipes.run.prepared_run import PreparedRun
from memsave_recipes.run.run import Run
from memsave_recipes.run.training_run import TrainingRun
from memsave_recipes.training.arguments import RecipeArguments
from memsave_recipes.training.batching import GlobalBatch, GlobalBatches
from memsave_recipes.training.evaluation import LabelArguments, evaluate_classifier, summed_loss
from memsave_recipes.training.optimizers import make_optimizer, make_scheduler
from memsave_recipes.training.parsing import parse_arguments

__all__ = [
    "Batch",
    "BatchLayout",
    "GlobalBatch",
    "GlobalBatches",
    "InputError",
    "LabelArguments",
    "PreparedRun",
    "RecipeArguments",
    "Run",
    "Task",
    "TrainingRun",
    "evaluate_classifier",
    "make_optimizer",
    "make_scheduler",
    "parse_arguments",
    "require",
    "run_recipe",
    "seed_for",
    "summed_loss",
]
