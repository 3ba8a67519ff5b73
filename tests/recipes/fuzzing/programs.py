"""A recipe or ``memsave`` with a command line, as a process of the nursery (``tests/nursery.py``).

What programs import is imported here, once, before the nursery is made.
"""

import importlib
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from memsave_recipes.run.failures import run_recipe
from memsave_recipes.tools.cli import main as memsave

RECIPES = Path(__file__).parents[3] / "recipes"
NAMES = ("image_classification", "language_modeling", "text_classification")
MOST_BYTES = 4 * 1024**3  # more than that a program may not take, so that what is huge fails at once

WHEN_NEEDED = (  # what programs import only then
    *(
        "memsave_recipes.tools.pages.frontier",
        "memsave_recipes.tools.cli.request",
        "peft",
        "rich._emoji_codes",
        "sklearn.datasets",
    ),
    *("sklearn.metrics", *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "vit"))),
)

RunProgram = Callable[..., int | None]

for module in WHEN_NEEDED:
    importlib.import_module(module)
sys.path.insert(0, str(RECIPES))
MAINS = {name: importlib.import_module(name) for name in NAMES}
sys.path.remove(str(RECIPES))


@dataclass(frozen=True, kw_only=True)
class End:
    """How a program ended; ``code`` is ``None`` for one that had to be ended."""

    code: int | None
    out: str
    err: str


def end_of_program(run_program: RunProgram, program: str, words: list[str], folder: Path) -> End:
    """Of ``program``, a recipe by its name or ``memsave``, with ``words`` in ``folder``."""
    out, err = (folder.with_name(f"{folder.name}.{name}") for name in ("out", "err"))
    code = run_program(_be_program, program, words, folder, out, err)
    return End(code=code, out=out.read_text(errors="replace"), err=err.read_text(errors="replace"))


def _be_program(program: str, words: list[str], folder: Path, out: Path, err: Path) -> None:
    sys.stdout, sys.stderr = _into(out, 1, "strict"), _into(err, 2, "backslashreplace")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, used + MOST_BYTES))
    os.chdir(folder)
    sys.argv = [program, *words]
    _main_of(program)()


def _into(path: Path, descriptor: int, errors: str) -> TextIO:
    """A stream as Python opens it, whose text lands in ``path``; pytest has put streams of its own in their place."""
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    return open(descriptor, "w", encoding="utf-8", errors=errors, buffering=1)


def _main_of(program: str) -> Callable[[], None]:
    if program == "memsave":
        return lambda: sys.exit(memsave())
    recipe = MAINS[program]
    return lambda: run_recipe(recipe.main, getattr(recipe, "task", None))
