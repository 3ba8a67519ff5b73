"""Flags of the commands that plan, the writing of files that flags name, and where the recipes are.

The commands import their dependencies when they run, so that ``--help`` is fast.
"""

import argparse
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.text import GIB, MIB, printable

STDOUT = "-"
CONFIGS = "accelerate_configs"
FILES = {
    "png": "file for the chart; no table is printed",
    "html": "file for a page with table and chart",
    "json": "file for all data; - prints it instead of the table",
}
UNITS = {"": GIB, "gib": GIB, "gb": 10**9, "mib": MIB}


def recipes_folder() -> Path:
    """Return the folder of the recipes, next to ``accelerate_configs``; a wheel installs both below ``sys.prefix``."""
    tree = Path(__file__).parents[3]
    if (tree / "setup.cfg").is_file():
        return tree / "recipes"
    return Path(sysconfig.get_path("data")) / "share" / "memsave_recipes" / "recipes"


def recipe_path(word: str) -> Path:
    """Return the file of a recipe: a path, or the name of one of ours, such as ``language_modeling``."""
    path, ours = Path(word), recipes_folder() / f"{word}.py"
    return ours if path.name == word and not path.exists() and ours.is_file() else path


def recipe_at_hand(path: Path) -> Path:
    """Return the copy of one of our recipes in ``recipes/`` of the current folder; else ``path``."""
    copy = Path("recipes") / path.name
    return copy if path.parent == recipes_folder() and copy.is_file() else path


def other_recipe(path: Path) -> list[str]:
    """Return a line where that copy is another than the recipe that is planned: only a path runs code of a folder."""
    copy = recipe_at_hand(path)
    if copy == path or copy.read_bytes() == path.read_bytes():
        return []
    return [f"planned with {path}, from which {copy} differs: memsave plan {copy} plans with that"]


def add_recipes(parser: argparse.ArgumentParser) -> None:
    """Declare the flag of ``memsave recipes``."""
    parser.add_argument("--copy", type=Path, metavar="DIR", help="copies of recipes/ and accelerate_configs/ in DIR")
    parser.set_defaults(command=_recipes)


def _recipes(arguments: argparse.Namespace) -> None:
    folder = recipes_folder()
    if arguments.copy is not None:
        folder = _copied(folder, arguments.copy)
    print(printable(str(folder)))
    for path in sorted([*folder.glob("*.py"), *folder.glob("configs/*.yaml")]):
        print(f"  {path.relative_to(folder)}")


def _copied(recipes: Path, target: Path) -> Path:
    """Copy the recipes and the launch files beside them; return the folder of the copied recipes."""
    folders = [recipes, recipes.parent / CONFIGS]
    for taken in (target / folder.name for folder in folders):
        if os.path.exists(taken):  # unlike pathlib, without an error for a name that is too long
            raise InputError(f"--copy {target}: {taken} is there already; name another folder, or move it away")
    try:
        for folder in folders:
            shutil.copytree(folder, target / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise InputError(
            f"--copy {target} cannot be written ({error.strerror or error}): name another folder"
        ) from error
    return target / recipes.name


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``memsave plan``."""
    _add_recipe_flags(parser)
    parser.add_argument("--all", action="store_true", help="show all, not only the best of each micro-batch")
    parser.add_argument(
        "--largest",
        choices=["block_size", "micro_batch_size", "global_batch_size"],
        help="find the largest value of this flag with which the run fits",
    )
    parser.add_argument("--plan", type=Path, metavar="FILE", help="file for the chosen plan; the launch line names it")
    _add_files(parser, "json", "html")
    parser.set_defaults(command=_imported("memsave_recipes.tools.cli.plan", "plan"))


def add_frontier(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``memsave frontier``."""
    _add_recipe_flags(parser)
    parser.add_argument("--all", action="store_true", help="show all points, not only Pareto-optimal ones")
    _add_files(parser, "png", "html", "json")
    parser.set_defaults(command=_imported("memsave_recipes.tools.cli.plan", "frontier"))


def add_fit(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``memsave fit``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder with a config.json, type of transformers (llama, vit), one of ours (vgg16), or a Hub id",
    )
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--card", metavar="DEVICE", help="card, such as rtx4090; default: this machine's device")
    device.add_argument(
        "--memory", type=memory_gib, metavar="GIB", help="of any GPU, such as 24GiB, at the rates of an A100"
    )
    _add_host_memory(parser)
    parser.add_argument("--length", type=int, metavar="N", help="tokens per sample; default: 2048, for classifiers 512")
    parser.add_argument("--image_size", type=int, metavar="N", help="pixels per side; default: the model's, or 224")
    parser.add_argument("--max_pixels", type=int, metavar="N", help="of an image beside text; default: the processor's")
    parser.add_argument("--global_batch_size", type=int, default=16, metavar="N", help="samples per step; default: 16")
    parser.add_argument("--micro_batch_size", type=int, metavar="N", help="samples per forward; default: searched")
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help="as in the recipes; default: adamw")
    parser.add_argument(
        "--mixed_precision",
        choices=["no", "bf16", "fp16"],
        help="precision of autocast; default: bf16 on a GPU, fp16 on one without bf16",
    )
    _add_files(parser, "json")
    parser.set_defaults(command=_imported("memsave_recipes.tools.cli.fit", "fit"))


def _imported(module: str, name: str) -> Callable[[argparse.Namespace], None]:
    """Return a command that is imported when it runs."""
    return lambda arguments: getattr(import_module(module), name)(arguments)


def _add_files(parser: argparse.ArgumentParser, *formats: str) -> None:
    for name in formats:
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=FILES[name])


def _add_recipe_flags(parser: argparse.ArgumentParser) -> None:
    """Declare a recipe and a target device; all other flags are the recipe's."""
    parser.usage = "%(prog)s RECIPE [flags of the recipe] [options]"
    parser.add_argument(
        "recipe",
        type=recipe_path,
        metavar="RECIPE",
        help="a file, or the name of one that `memsave recipes` lists, such as language_modeling",
    )
    parser.add_argument(
        "--memory_budget_gib",
        type=float,
        metavar="F",
        help="memory of a device, in GiB; default: 95 %% of a GPU's, all of a CPU's",
    )
    parser.add_argument(
        "--target", metavar="DEVICE", help="device to plan for: cpu, cuda, h100, rtx3060, ...; default: this machine's"
    )
    parser.add_argument(
        "--target_memory",
        type=memory_gib,
        metavar="GIB",
        help="memory of this device, such as 12GiB; without --target: a GPU of this size with the speed of an A100",
    )
    _add_host_memory(parser)
    parser.add_argument("--num_processes", type=int, default=1, metavar="N", help="number of devices; default: 1")
    parser.add_argument(
        "--interconnect",
        type=float,
        metavar="GB",
        help="GB/s from one device to the others, for shards and shared rows; default: the same as to its host",
    )
    parser.add_argument(
        "--mixed_precision",
        choices=["no", "bf16", "fp16"],
        default="no",
        help="precision of autocast; default: no",
    )
    parser.set_defaults(flags=[])


def _add_host_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host_memory",
        type=memory_gib,
        metavar="GIB",
        help="host memory that is free for offloading, such as 64GiB; default: not checked",
    )


def memory_gib(word: str) -> float:
    """Return the GiB of ``12``, ``12GiB``, ``12GB`` (10^9 bytes each) or ``512MiB``.

    Raises:
        ArgumentTypeError: none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GiB|GB|MiB|)", word, re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{word}: write a size such as 12GiB")
    return float(found[1]) * UNITS[found[2].lower()] / GIB


def write_text(flag: str, path: Path, text: str) -> None:
    """Write ``text`` into the file that ``flag`` names; ``-`` prints it.

    Raises:
        InputError: the file cannot be written.
    """
    if str(path) == STDOUT:
        print(text, end="")
        return
    with writing(f"{flag} {path}"):
        path.write_text(text, encoding="utf-8")


@contextmanager
def writing(flag: str) -> Iterator[None]:
    """Inside, a file is written that ``flag`` names.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{flag} cannot be written ({error.strerror}): name a file in a folder that exists") from error
