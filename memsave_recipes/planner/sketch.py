"""What a recipe tells of a run before there are data or weights: enough to predict its step on paper.

A recipe that ``memsave plan`` can plan has a function ``sketch(args)`` beside its ``main``, made of the same pieces.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from memsave_recipes.errors import InputError
from memsave_recipes.training.arguments import OptimizerArguments, RunArguments
from memsave_recipes.training.batching import Batch

FOLDER_FLAG = "--output_dir"


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """A recipe with its flags.

    Args:
        run, optim: the parsed flags.
        build_model: the model with the blocks, without its weights; called where torch's default device is ``meta``.
        trained: the module that the recipe trains, around the model: given the model, a choice among ``losses``, or
            ``None`` for what the flags say, and the device that it will run on.
        loss_of: the summed loss of a micro-batch, given what ``trained`` made.
        micro_batch: one of so many samples, as large as they get; values do not count.
        takes_adapters: whether ``--lora`` would train less than these flags do.
        losses: the words of ``--loss`` that are to be compared; ``(None,)`` for a recipe that has one loss.
        assumed: what could not be known without data, in words.
    """

    run: RunArguments
    optim: OptimizerArguments
    build_model: Callable[[], nn.Module]
    trained: Callable[[nn.Module, str | None, torch.device], nn.Module] = lambda model, loss, device: model
    loss_of: Callable[[nn.Module, Batch], Tensor]
    micro_batch: Callable[[int], Batch]
    takes_adapters: bool = False
    losses: tuple[str | None, ...] = (None,)
    assumed: tuple[str, ...] = ()


def read_sketch(recipe: Path, args: Sequence[str]) -> Sketch:
    """What the recipe in a file says of a run with the flags ``args``; ``--output_dir`` may be missing.

    Raises:
        InputError: no such file, no ``sketch`` in it, or flags that it refuses.
    """
    sketch = getattr(_load(recipe), "sketch", None)
    if sketch is None:
        raise InputError(f"{recipe} has no function sketch(args): see docs/planner.md for what it returns")
    named = any(word.partition("=")[0] == FOLDER_FLAG for word in args)
    return sketch([*args] if named else [*args, FOLDER_FLAG, "out"])


def _load(recipe: Path) -> object:
    if not os.path.isfile(recipe):  # unlike pathlib, without an error for what can be no path
        raise InputError(f"RECIPE {recipe} is no file: name one such as recipes/language_modeling.py")
    spec = importlib.util.spec_from_file_location(recipe.stem, recipe)
    if spec is None or spec.loader is None:
        raise InputError(f"RECIPE {recipe} is no Python file")
    try:
        compile(recipe.read_bytes(), str(recipe), "exec")
    except (SyntaxError, ValueError) as error:
        raise InputError(f"RECIPE {recipe} is no Python: {error}") from error
    module = importlib.util.module_from_spec(spec)
    sys.modules[recipe.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
