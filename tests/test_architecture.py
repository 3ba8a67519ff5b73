"""The import table of docs/architecture.md: what each package may import from the others and from outside."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EVERYWHERE = {"errors", "text"}

# package or module: (what of ours it imports beside EVERYWHERE, packages from outside)
TABLE = {
    "text": (set(), {"tqdm"}),
    "errors": (set(), set()),
    "fingerprint": (set(), {"torch", "numpy"}),
    "hub": (set(), {"datasets", "huggingface_hub", "transformers"}),
    "losses": (set(), {"torch"}),
    "processes": (set(), {"accelerate", "psutil", "torch"}),
    "distributed": ({"processes"}, {"accelerate", "torch"}),
    "plans": (set(), set()),
    "models": (
        {"activations", "hub", "losses", "profiling"},
        {"torch", "safetensors", "transformers", "peft", "liger_kernel", "huggingface_hub"},
    ),
    "data": (
        {"fingerprint", "hub", "losses"},  # losses: the label that they leave out
        {"torch", "datasets", "transformers", "tokenizers", "PIL", "numpy", "kornia", "sklearn"},
    ),
    "inference": ({"data", "losses", "models"}, {"torch", "transformers", "PIL"}),
    "activations": ({"plans"}, {"numpy", "psutil", "torch", "transformers"}),
    "sharding": ({"activations", "plans"}, {"accelerate", "torch"}),
    "step": ({"activations", "plans", "sharding"}, {"torch", "transformers", "bitsandbytes"}),
    "exact": ({"activations", "plans", "step"}, {"torch"}),
    "profiling": ({"activations", "plans", "processes", "sharding"}, {"torch", "numpy", "psutil", "pynvml"}),
    "estimation": ({"activations", "models", "plans", "profiling"}, {"torch"}),
    "equivalence": ({"activations", "plans", "profiling", "sharding"}, {"torch"}),
    "training": (
        {"activations", "exact", "losses", "plans", "processes", "sharding", "step"},
        {
            *("torch", "accelerate", "transformers", "yaml", "psutil", "datasets", "evaluate", "scipy", "sklearn"),
            "huggingface_hub",
        },
    ),
    "checkpoints": (
        {"distributed", "fingerprint", "processes", "sharding", "step", "training"},
        {"torch", "accelerate", "safetensors", "filelock"},
    ),
    "planner": (
        {"activations", "estimation", "hub", "models", "plans", "processes", "profiling", "sharding", "step"},
        {"torch", "psutil", "transformers"},
    ),
    "integrations": (
        {"activations", "models", "planner", "plans", "profiling", "step"},
        {"torch", "transformers", "lightning"},
    ),
    "compare": (set(), set()),
    "dashboards": ({"compare"}, {"psutil", "wandb", "wandb_workspaces", "trackio"}),
    "render": ({"compare", "planner", "plans", "step"}, {"jinja2", "matplotlib", "rich"}),
    "run": (
        {
            *("activations", "checkpoints", "compare", "distributed", "equivalence", "estimation", "fingerprint"),
            *("hub", "models", "planner", "plans", "processes", "profiling", "render", "sharding", "step", "training"),
        },
        {"torch", "accelerate", "wandb", "trackio", "huggingface_hub", "jinja2", "safetensors"},
    ),
    "recipe": ({"planner", "run", "step", "training"}, set()),
    "cli": (
        {"compare", "dashboards", "estimation", "inference", "planner", "plans", "render", "step", "training"},
        {"torch"},
    ),
    "recipes": (
        {"activations", "compare", "data", "exact", "losses", "models", "recipe", "step", "training"},
        {"accelerate", "torch", "transformers", "rich"},
    ),
}
# Packages that only these files may import.
ONLY_IN = {
    "tqdm": "memsave_recipes/text.py",
    "lightning": ("integrations/lightning_callback.py",),
    "wandb": ("run/trackers.py", "dashboards.py"),
    "wandb_workspaces": "dashboards.py",
    "trackio": ("run/trackers.py", "dashboards.py"),
    "matplotlib": "render/plot.py",
    "jinja2": ("render/page.py", "run/report.py"),
    "liger_kernel": "models/causal_lm.py",
    "peft": "models/adapters.py",
    "bitsandbytes": "step/eight_bit.py",
    "tokenizers": "data/text/tokenizers.py",
    "filelock": "checkpoints/saver.py",
    "sklearn": ("data/vision/images.py", "training/evaluation.py"),
    "scipy": "training/evaluation.py",
    "yaml": "training/parsing.py",
    "kornia": "data/vision/augmentation.py",
}
IN_ACTIVATIONS_ONLY_IN_BLOCKS = "transformers"
MAX_MODULES = 15  # of a package, beside its __init__.py
MAX_FILES = 156


def imports_of(path):
    """Absolute module names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def package_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "recipes" if parts[0] == "recipes" else parts[1]


FILES = sorted([*(ROOT / "memsave_recipes").rglob("*.py"), *(ROOT / "recipes").glob("*.py")])
FILES = [path for path in FILES if path != ROOT / "memsave_recipes" / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_table(path):
    package = package_of(path)
    ours, outside = TABLE[package]
    for module in imports_of(path):
        top, _, rest = module.partition(".")
        if top in sys.stdlib_module_names:
            continue
        if top == "memsave_recipes":
            target = rest.partition(".")[0]
            assert target in ours | EVERYWHERE | {package}, f"{package} may not import {module}"
        else:
            assert top in outside, f"{package} may not import {module}"
            only = ONLY_IN.get(top)
            assert only is None or path.as_posix().endswith(only), f"{module} is for {only} alone"
            if package == "activations" and top == IN_ACTIVATIONS_ONLY_IN_BLOCKS:
                assert path.name == "blocks.py"


def test_no_package_imports_one_that_imports_it():
    """The table has no cycles: every package stands below those that import it."""
    below = set()
    while len(below) < len(TABLE):
        free = {name for name, (ours, _) in TABLE.items() if name not in below and ours <= below}
        assert free, f"a cycle among {set(TABLE) - below}"
        below |= free


def test_whoever_has_values_needs_no_flags():
    """What finds, applies and proves a plan stands below the flags of the recipes, and asks no Accelerator."""
    for package in ("plans", "activations", "step", "profiling", "estimation", "planner", "equivalence"):
        below, ours = set(), {package}
        while ours:
            below |= ours
            ours = set().union(*(TABLE[name][0] for name in ours)) - below
        assert "training" not in below, package
        assert "accelerate" not in TABLE[package][1], package


def test_images_and_text_know_nothing_of_each_other():
    for package, other in (("vision", "text"), ("text", "vision")):
        for path in (ROOT / "memsave_recipes/data" / package).glob("*.py"):
            assert not [module for module in imports_of(path) if module.startswith(f"memsave_recipes.data.{other}")]


def test_everything_is_in_the_table():
    assert {package_of(path) for path in FILES} == TABLE.keys()


def test_the_page_shows_this_table():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    shown = {name.strip("`"): tuple(set(cell.split(", ")) - {"-"} for cell in cells) for name, _, *cells in rows}
    assert shown == TABLE
    prose = " ".join(page.split())
    for package, modules in ONLY_IN.items():
        for module in [modules] if isinstance(modules, str) else modules:
            assert re.search(rf"{package} in [^;]*`{module.removeprefix('memsave_recipes/')}`", prose), package


def test_few_files():
    files = list((ROOT / "memsave_recipes").rglob("*.py"))
    assert len(files) <= MAX_FILES
    for package in {path.parent for path in files}:
        assert len(list(package.glob("*.py"))) <= MAX_MODULES + 1


def test_no_recipe_imports_another():
    names = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    for path in (ROOT / "recipes").glob("*.py"):
        assert not names & {module.partition(".")[0] for module in imports_of(path)}
