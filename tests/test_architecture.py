"""The rooms of docs/architecture.md: what may import what, and that the core needs torch alone."""

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from lives import loaded

ROOT = Path(__file__).parents[1]
ROOMS = ("core", "models", "data", "integrations", "training", "tools", "run")
"""Each imports those before it."""
CORE = (
    *("text", "errors", "processes", "progress", "losses"),  # modules
    *("plans", "activations", "sharding", "costs", "host", "step", "proof", "planner"),
)
"""The parts of the core, each of which imports those before it."""
OUTSIDE = {
    "core": {"torch", "numpy", "psutil", "pynvml", "tqdm"},
    "models": {"torch", "safetensors", "transformers", "peft", "liger_kernel", "huggingface_hub", "datasets", "yaml"},
    "data": {"torch", "datasets", "transformers", "tokenizers", "PIL", "numpy", "kornia", "sklearn"},
    "integrations": {"torch", "transformers", "lightning"},
    "training": {
        *("bitsandbytes", "torchao"),
        *("torch", "accelerate", "transformers", "yaml", "psutil", "datasets", "evaluate", "scipy", "sklearn"),
        *("huggingface_hub", "safetensors", "filelock"),
    },
    "tools": {
        *("torch", "transformers", "PIL", "psutil", "wandb", "wandb_workspaces"),
        *("jinja2", "matplotlib", "rich"),
    },
    "run": {"torch", "psutil", "accelerate", "wandb", "trackio", "huggingface_hub", "jinja2", "safetensors"},
    "recipes": {"safetensors", "torch", "transformers"},
}
"""Packages from outside that a room may import."""
ONLY_IN = {
    "tqdm": ("core/progress.py",),
    "pynvml": ("core/costs/memory.py",),
    "bitsandbytes": ("training/eight_bit.py",),
    "lightning": ("integrations/lightning_callback.py",),
    "wandb": ("run/trackers.py", "tools/wandb_workspace.py"),
    "wandb_workspaces": ("tools/wandb_workspace.py",),
    "torchao": ("training/launch/float8.py",),
    "trackio": ("run/trackers.py",),
    "matplotlib": ("tools/pages/plot.py",),
    "jinja2": ("tools/pages/page.py", "run/report.py"),
    "liger_kernel": ("models/causal_lm.py",),
    "peft": ("models/adapters.py",),
    "tokenizers": ("data/text/tokenizers.py",),
    "filelock": ("training/checkpoints/saver.py",),
    "sklearn": ("data/vision/images.py", "training/evaluation.py"),
    "scipy": ("training/evaluation.py",),
    "yaml": ("training/parsing.py", "models/adapters.py"),
    "kornia": ("data/vision/augmentation.py",),
}
"""Packages that only these files may import."""
MAX_MODULES = 17  # of a package, beside its __init__.py
MAX_FILES = 175

FILES = sorted([*(ROOT / "memsave_recipes").rglob("*.py"), *(ROOT / "recipes").glob("*.py")])
FILES = [path for path in FILES if path != ROOT / "memsave_recipes" / "__init__.py"]


def imports_of(path):
    """Absolute module names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from ([f"{node.module}.{alias.name}" for alias in node.names] if node.module else ())


def place_of(module):
    """The room of a module of ours, and the part of the core that it is or is in."""
    _, *parts = module.split(".")
    return (*parts, "", "")[:2]


def own_place(path):
    if path.parent.name == "recipes":
        return "recipes", ""
    return place_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_rooms_below_it(path):
    order = (*ROOMS, "recipes")
    room, part = own_place(path)
    for module in imports_of(path):
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names:
            continue
        if top != "memsave_recipes":
            assert top in OUTSIDE[room], f"{room} may not import {module}"
            only = ONLY_IN.get(top)
            assert only is None or path.as_posix().endswith(only), f"{top} is for {only} alone"
            continue
        other, other_part = place_of(module)
        if other in ("__version__", ""):
            continue
        assert order.index(other) <= order.index(room), f"{room} may not import {module}"
        if room == other == "core" and part and part != "__init__":
            assert CORE.index(other_part) <= CORE.index(part), f"core/{part} may not import {module}"


def test_seven_rooms_are_all_that_there_is():
    folders = {path.name for path in (ROOT / "memsave_recipes").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == set(ROOMS)
    parts = {own_place(path)[1] for path in FILES if own_place(path)[0] == "core"}
    assert parts == {*CORE, "__init__"}
    assert [path.name for path in (ROOT / "memsave_recipes").glob("*.py")] == ["__init__.py"]


def test_tests_are_in_the_rooms_of_what_they_test():
    beside = {"recipes", "benchmarks", "peer_suites", "standin", "triton_kernels", "zoo"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders - beside == set(ROOMS)


def test_no_module_imports_one_that_imports_it():
    """Also where the import is inside a function."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    imported = {
        name: {
            module if module in names else module.rpartition(".")[0]
            for module in imports_of(path)
            if module.startswith("memsave_recipes.")
        }
        & names.keys() - {name}
        for name, path in names.items()
    }
    below = set()
    while len(below) < len(names):
        free = {name for name in imported if name not in below and imported[name] <= below}
        assert free, f"a circle among {sorted(names.keys() - below)}"
        below |= free


ALONE = """
import sys

sys.modules.update(dict.fromkeys({HIDDEN}))  # None: importing it fails

import torch
from torch import nn

from memsave_recipes.core.activations import apply_plan
from memsave_recipes.core.planner import make_plan
from memsave_recipes.core.plans import Plan
from memsave_recipes.core.proof import verify

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, values):
        return values + self.net(values)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, values):
        for layer in self.layers:
            values = layer(values)
        return values

torch.manual_seed(0)
model, values = Model(), torch.randn(512, 32)

def mean_square(output):
    return output.square().mean()

plan = make_plan(model, (values,), strategy="budget:bitwise", budget_gib=0.004, loss_fn=mean_square, blocks=Layer)
assert plan.prediction.peak_bytes <= 0.004 * 2**30, plan.prediction
assert Plan.from_json(plan.to_json()) == plan
handle = apply_plan(model, plan)

def step():
    loss = mean_square(model(values))
    loss.backward()
    return loss

assert verify(model, handle, step).status == "identical"
found = {name.partition(".")[0] for name, module in sys.modules.items() if module is not None} & {HIDDEN}
assert not found, found
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("memsave_recipes.")}
assert rooms == {"core"}, rooms
"""
HIDDEN = sorted(set().union(*OUTSIDE.values()) - {"torch", "numpy", "psutil"})


def test_the_core_needs_torch_alone(tmp_path):
    """It makes, predicts, applies and proves a plan for a model written by hand where nothing else is installed."""
    script = tmp_path / "alone.py"
    script.write_text(ALONE.replace("{HIDDEN}", repr(set(HIDDEN))), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr


def test_images_and_text_know_nothing_of_each_other():
    for package, other in (("vision", "text"), ("text", "vision")):
        for path in (ROOT / "memsave_recipes/data" / package).glob("*.py"):
            assert not [module for module in imports_of(path) if module.startswith(f"memsave_recipes.data.{other}")]


def test_the_page_says_this():
    page = " ".join((ROOT / "docs/architecture.md").read_text(encoding="utf-8").split())
    assert " < ".join(f"`{room}`" for room in ROOMS) in page
    assert " < ".join(f"`{part}`" for part in CORE) in page
    for room, packages in OUTSIDE.items():
        row = re.search(rf"\| `{room}` \|[^|]*\| ([^|]*) \|", page)
        assert row, room
        assert set(row[1].split(", ")) == packages, room
    for package, modules in ONLY_IN.items():
        for module in modules:
            assert re.search(rf"{package} in [^;]*`{module}`", page), package


def test_few_files():
    files = list((ROOT / "memsave_recipes").rglob("*.py"))
    assert len(files) <= MAX_FILES
    for package in {path.parent for path in files}:
        assert len(list(package.glob("*.py"))) <= MAX_MODULES + 1


def test_no_recipe_imports_another():
    names = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    for path in (ROOT / "recipes").glob("*.py"):
        assert not names & {module.partition(".")[0] for module in imports_of(path)}


MAX_LINES, MAX_LINES_OF_TRAIN, MAX_NAMES, MAX_ROOMS_MODULES = 240, 80, 25, 8
IN_THIS_ORDER = (
    *(
        "Accelerator(",
        "run.global_batches(",
        "run.build(",
        "make_optimizer(",
        "make_scheduler(",
        "accelerator.prepare(",
    ),
    *("run.choose_plan(", "apply_plan(", "accelerator.backward(", "training.clip_grad_norm_(", "optimizer.step()"),
    *("scheduler.step()", "optimizer.zero_grad()", "accelerator.log(", "training.evaluate_if_due("),
    *("training.save_if_due()", "training.finish("),
)
"""What who knows Accelerate's examples finds in the training function of a recipe."""
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.py") if path.stem != "ddp_equals_accumulation")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_plain(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    ours = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("memsave_recipes.")
    ]
    assert len(text.splitlines()) <= MAX_LINES
    assert len({node.module for node in ours}) <= MAX_ROOMS_MODULES
    assert sum(len(node.names) for node in ours) <= MAX_NAMES
    (train,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train")
    body = ast.get_source_segment(text, train)
    assert len(body.splitlines()) <= MAX_LINES_OF_TRAIN
    loop = body.index("for batch in training.steps()")
    places = [body.index(call, loop if call.startswith("training.ev") else 0) for call in IN_THIS_ORDER]
    assert places == sorted(places)


MAX_FLAGS = 60


@pytest.mark.parametrize("recipe", [path.stem for path in RECIPES])
def test_a_recipe_has_few_flags(recipe):
    with loaded(recipe) as module:
        flags = [flag.name for flag in fields(module.Arguments) if flag.init and "help" in flag.metadata]
    assert len(flags) <= MAX_FLAGS, flags


FILES_OF_A_FLAG = {
    "activation_checkpointing": {"training/arguments", "core/step/settings", "run/run_plan", "core/planner/search"},
    "memory_budget_gib": {"training/arguments", "core/step/settings"},
    "offload_optimizer": {"training/arguments", "core/step/settings", "training/optimizers"},
    "ema_decay": {"training/arguments", "core/step/settings", "core/step/memory", "run/training_run"},
}
"""The files of a run in which code names a flag; further on its value is a plan, bytes, or what was made of it."""
OF_RESUME = "training/checkpoints/resume"  # which compares the flags of two runs


def names_in(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        yield from (getattr(node, kind, None) for kind in ("id", "attr", "arg"))
        if isinstance(node, ast.Constant):  # as of getattr, or among other names
            yield node.value


@pytest.mark.parametrize("flag", FILES_OF_A_FLAG)
def test_few_files_of_a_run_ask_for_a_flag(flag):
    package = ROOT / "memsave_recipes"
    named = {
        path.relative_to(package).with_suffix("").as_posix()
        for room in set(ROOMS) - {"integrations", "tools"}
        for path in (package / room).rglob("*.py")
        if flag in names_in(path)
    }
    assert named - {OF_RESUME} == FILES_OF_A_FLAG[flag]
