"""The task of a recipe in a file, under its flags."""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.task import Task

FOLDER_FLAG = "--output_dir"


def read_task(recipe: Path, args: Sequence[str]) -> Task:
    """Return the task of the recipe in a file under the flags ``args``; ``--output_dir`` may be missing.

    Raises:
        InputError: no such file, no function ``task`` in it, or flags that it refuses.
    """
    task: Callable[[list[str]], Task] | None = getattr(_load(recipe), "task", None)
    if task is None:
        raise InputError(f"{recipe} has no function task(args): docs/recipes.md has an example")
    named = any(word.partition("=")[0] == FOLDER_FLAG for word in args)
    if "transformers" in sys.modules:  # which shows a bar for weights that it does not read either
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    return task([*args] if named else [*args, FOLDER_FLAG, "out"])


def _load(recipe: Path) -> object:
    if not os.path.isfile(recipe):  # unlike pathlib, without an error for a text that cannot be a path
        raise InputError(f"RECIPE {recipe} is not a file: name one such as recipes/language_modeling.py")
    spec = importlib.util.spec_from_file_location(recipe.stem, recipe)
    if spec is None or spec.loader is None:
        raise InputError(f"RECIPE {recipe} is not a Python file")
    try:
        compile(recipe.read_bytes(), str(recipe), "exec")
    except (SyntaxError, ValueError) as error:
        raise InputError(f"RECIPE {recipe} is not Python: {error}") from error
    module = importlib.util.module_from_spec(spec)
    sys.modules[recipe.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
