"""The import table of docs/architecture.md: what each room may take from the others and from outside."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BASE = {"errors", "foreign", "units"}

# room: (rooms of ours beside those of BASE, packages from outside)
TABLE = {
    "errors": (set(), set()),
    "foreign": (set(), set()),
    "units": (set(), set()),
    "fingerprint": (set(), {"torch", "numpy"}),
    "hub": (set(), {"datasets", "huggingface_hub"}),
    "agreement": (set(), {"accelerate", "torch"}),
    "processes": (set(), {"psutil", "torch"}),
    "plans": (set(), set()),
    "losses": (set(), {"torch"}),
    "models": ({"hub", "losses"}, {"torch", "safetensors", "transformers", "peft", "liger_kernel"}),
    "metrics": (set(), {"evaluate", "datasets", "sklearn"}),
    "data": (
        {"fingerprint", "hub"},
        {"torch", "datasets", "transformers", "tokenizers", "PIL", "numpy", "kornia", "sklearn"},
    ),
    "activations": ({"plans"}, {"torch", "transformers"}),
    "measure": ({"plans", "activations"}, {"torch", "psutil"}),
    "costs": ({"plans", "activations", "measure"}, {"torch", "numpy", "psutil"}),
    "training": (
        {"measure", "plans", "processes"},
        {"torch", "accelerate", "transformers", "yaml", "psutil", "bitsandbytes"},
    ),
    "checkpoints": (
        {"agreement", "fingerprint", "processes", "training"},
        {"torch", "accelerate", "safetensors", "filelock"},
    ),
    "planner": (
        {"activations", "agreement", "costs", "measure", "models", "plans", "training"},
        {"torch", "accelerate", "rich", "tqdm", "psutil"},
    ),
    "reporting": (
        {
            *("activations", "agreement", "checkpoints", "costs", "evidence", "fingerprint", "measure", "models"),
            *("planner", "processes", "training"),
        },
        {"torch", "accelerate", "rich", "wandb", "trackio", "huggingface_hub"},
    ),
    "evidence": (
        {"activations", "measure", "plans"},
        {"torch", "rich", "matplotlib", "wandb", "wandb_workspaces", "trackio"},
    ),
    "cli": ({"costs", "evidence", "planner", "plans", "training"}, {"torch", "rich", "tqdm"}),
    "recipes": (
        {
            *("activations", "agreement", "checkpoints", "data", "evidence", "losses", "metrics", "models", "planner"),
            *("plans", "reporting", "training"),
        },
        {"torch", "accelerate", "transformers", "datasets", "evaluate", "rich", "tqdm"},
    ),
}
# Packages that only one file may import.
ONLY_IN = {
    "wandb": ("reporting/wandb_run.py", "evidence/wandb_runs.py"),
    "wandb_workspaces": "evidence/dashboards.py",
    "trackio": ("reporting/trackio_run.py", "evidence/dashboards.py"),
    "matplotlib": "evidence/plot.py",
    "liger_kernel": "models/causal_lm.py",
    "peft": "models/adapters.py",
    "bitsandbytes": "training/optimizers.py",
    "tokenizers": ("data/tokenizers.py", "data/tokenized_text.py"),
    "filelock": "checkpoints/run_lock.py",
    "sklearn": ("data/image_sources.py", "metrics/f1.py"),
}
IN_ACTIVATIONS_ONLY_IN_BLOCKS = "transformers"


def imports_of(path):
    """Absolute module names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def room_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "recipes" if parts[0] == "recipes" else parts[1]


FILES = sorted([*(ROOT / "memsave_recipes").rglob("*.py"), *(ROOT / "recipes").glob("*.py")])
FILES = [path for path in FILES if path != ROOT / "memsave_recipes" / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_table(path):
    room = room_of(path)
    ours, outside = TABLE[room]
    for module in imports_of(path):
        package, _, rest = module.partition(".")
        if package in sys.stdlib_module_names:
            continue
        if package == "memsave_recipes":
            target = rest.partition(".")[0]
            assert target in ours | BASE | {room}, f"{room} may not import {module}"
        else:
            assert package in outside, f"{room} may not import {module}"
            only = ONLY_IN.get(package)
            assert only is None or path.as_posix().endswith(only), f"{module} is for {only} alone"
            if room == "activations" and package == IN_ACTIVATIONS_ONLY_IN_BLOCKS:
                assert path.name == "blocks.py"


def test_every_room_is_in_the_table():
    rooms = {room_of(path) for path in FILES}
    assert rooms <= TABLE.keys()
    alone = {path.stem for path in (ROOT / "memsave_recipes").glob("*.py")}
    assert alone == {"__init__", "agreement", "errors", "fingerprint", "foreign", "hub", "losses", "units"}


@pytest.mark.parametrize("room", [room for room in TABLE if (ROOT / "memsave_recipes" / room).is_dir()])
def test_a_room_holds_at_most_a_dozen_modules(room):
    assert len(list((ROOT / "memsave_recipes" / room).glob("*.py"))) <= 13  # with its __init__.py


def test_no_recipe_imports_another():
    names = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    for path in (ROOT / "recipes").glob("*.py"):
        assert not names & {module.partition(".")[0] for module in imports_of(path)}
