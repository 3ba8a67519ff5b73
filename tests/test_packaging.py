"""What would be published: a source distribution, and the wheel built from it, in a virtual environment of its own."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml

import memsave_recipes

ROOT = Path(__file__).parents[1]
SHIPPED = ("memsave_recipes", "recipes", "accelerate_configs", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
OF_EXTRAS = (
    *("PIL", "bitsandbytes", "datasets", "evaluate", "kornia", "kornia_rs", "matplotlib", "peft", "pillow"),
    *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics", "trl"),
    *("scikit_learn", "sklearn", "tensorboard", "trackio", "wandb", "wandb_workspaces"),
)
SMALL = ["--config_overrides", "n_layer=2,n_head=2,n_embd=32,vocab_size=512", "--block_size", "64"]
PLAN = ["plan", "language_modeling", "--model_type", "gpt2", *SMALL, "--global_batch_size", "1", "--loss", "full"]


class Installed:
    """An environment that holds the wheel, and everything else by a path to the packages of this one."""

    def __init__(self, folder, wheel, packages):
        venv.create(folder, with_pip=False)
        self.folder, self.bin = folder, folder / "bin"
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
        (self.site,) = folder.glob("lib/python*/site-packages")
        (self.site / "others.pth").write_text(f"{packages}\n")

    def run(self, *words, cwd=None):
        """The finished process, with an empty home; nothing of this tree is on its path."""
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env |= {"VIRTUAL_ENV": str(self.folder), "PATH": f"{self.bin}:{env['PATH']}", "OMP_NUM_THREADS": "1"}
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        command = [str(self.bin / words[0]), *map(str, words[1:])]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=cwd or self.folder, env=env | {"HOME": str(home)}
        )

    @property
    def recipes(self):
        return self.folder / "share" / "memsave_recipes" / "recipes"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("tree")
    for name in SHIPPED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", str(folder)], check=True, stdout=subprocess.DEVNULL
    )
    return sorted((folder / "dist").iterdir())


@pytest.fixture(scope="module")
def wheel(distributions):
    (built,) = (path for path in distributions if path.suffix == ".whl")
    return built


@pytest.fixture(scope="module")
def everything(wheel, tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("everything"), wheel, sysconfig.get_path("purelib"))


@pytest.fixture(scope="module")
def core(wheel, tmp_path_factory):
    """Only what ``install_requires`` names, and what that needs."""
    packages = tmp_path_factory.mktemp("packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(tuple(f"{name}{end}" for name in OF_EXTRAS for end in ("-", "."))) and (
            path.name not in OF_EXTRAS and "memsave" not in path.name
        ):
            (packages / path.name).symlink_to(path)
    return Installed(tmp_path_factory.mktemp("core"), wheel, packages)


def test_types_and_recipes_are_shipped(everything):
    assert (everything.site / "memsave_recipes" / "py.typed").is_file()
    printed = everything.run("memsave", "recipes").stdout.splitlines()
    assert printed[0] == str(everything.recipes)
    assert (everything.recipes.parent / "accelerate_configs" / "slurm.sbatch").is_file()
    of_tree = [*(ROOT / "recipes").glob("*.py"), *(ROOT / "recipes").glob("configs/*.yaml")]
    assert printed[1:] == sorted(f"  {path.relative_to(ROOT / 'recipes')}" for path in of_tree)


def test_an_index_would_take_both(distributions):
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, distributions)], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.count("PASSED") == 2


@pytest.mark.slow
def test_recipes_are_copied_and_planned_there(everything, tmp_path):
    done = everything.run("memsave", "recipes", "--copy", ".", cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "recipes")
    for folder in ("recipes", "accelerate_configs"):
        copied = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.glob(f"{folder}/**/*.*")}
        assert copied
        assert copied == {one: (ROOT / one).read_bytes() for one in copied}
    again = everything.run("memsave", "recipes", "--copy", ".", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == "error: --copy .: recipes is there already; name another folder, or move it away\n"
    # as the README's first command, with a path
    words = [PLAN[0], "recipes/language_modeling.py", *PLAN[2:], "--target", "h100", "--memory_budget_gib", "2"]
    planned = everything.run("memsave", *words, cwd=tmp_path)
    launch = planned.stdout.strip().splitlines()[-1].split()
    assert launch[3:5] == ["accelerate_configs/single_gpu.yaml", "recipes/language_modeling.py"]


@pytest.mark.slow
def test_the_wheel_alone_plans_trains_resumes_compares_and_predicts(everything, tmp_path):
    def run(*words):
        done = everything.run(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("memsave", "recipes", "--copy", ".")
    flags = ["recipes/image_classification.py", "--config", "recipes/configs/demo.yaml"]
    run("memsave", "plan", *flags, "--target", "cpu")
    train = ["accelerate", "launch", "--config_file", "accelerate_configs/cpu.yaml", *flags, "--output_dir", "out/a"]
    train += [
        "--save_every",
        "2",
        "--lr_scheduler_type",
        "constant",
        "--activation_checkpointing",
        "budget",
        "--memory_budget_gib",
        "0.025",
    ]
    run(*train, "--max_steps", "4")
    run(*train, "--max_steps", "6", "--resume", "--overwrite", "no")
    assert re.search(r"^ a +budget", run("memsave", "compare", "out"), re.MULTILINE)
    from PIL import Image

    Image.new("L", (8, 8)).save(tmp_path / "photo.png")
    assert "photo.png" in run("memsave", "predict", "out/a", "photo.png")


@pytest.mark.slow
def test_a_recipe_is_planned_by_its_name(everything):
    done = everything.run("memsave", *PLAN, "--target", "h100", "--memory_budget_gib", "2")
    assert done.returncode == 0, done.stderr
    launch = done.stdout.strip().splitlines()[-1].split()
    assert launch[:3] == ["accelerate", "launch", "--config_file"]
    assert launch[4] == str(everything.recipes / "language_modeling.py")
    assert Path(launch[3]).is_file()


MISSING = "error: the recipes' data need datasets, which is not installed: pip install 'memsave-recipes[vision,text]'\n"


def test_the_core_plans_a_model_and_names_a_missing_extra_in_one_line(core):
    script = (
        "import memsave_recipes as memsave, torch\n"
        "layers = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4))\n"
        "model, batch = torch.nn.Sequential(*layers), torch.ones(64, 8)\n"
        "plan = memsave.make_plan(model, batch, strategy='budget:bitwise', budget_gib=1)\n"
        "with memsave.apply_plan(model, plan): model(batch).sum().backward()\n"
        "from memsave_recipes import Task, estimate, verify, linear_cross_entropy\n"
        "from memsave_recipes.tools.cli import main\n"
        "raise SystemExit(main(['plan', 'image_classification']))\n"
    )
    done = core.run("python", "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", MISSING)


@pytest.mark.slow
def test_a_recipe_without_its_extra_is_one_line(core):
    done = core.run("python", core.recipes / "language_modeling.py")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", MISSING)


def test_the_image_copies_what_is_shipped_and_no_root_runs_it():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == set(SHIPPED)
    image = [line.split() for line in (ROOT / "Dockerfile").read_text().splitlines()]
    users = [int(words[1]) for words in image if words[:1] == ["USER"]]
    assert users[-1:] > [0]
    python = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"][0]
    assert f"Programming Language :: Python :: {python.removeprefix('python=')}\n" in (ROOT / "setup.cfg").read_text()


def test_a_missing_package_names_what_needs_it():
    script = "import sys; sys.modules['kornia'] = None; import memsave_recipes.data.vision.images"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: images need kornia, which is not installed: pip install 'memsave-recipes[vision]'\n"


def test_the_version_is_the_same_everywhere():
    version = memsave_recipes.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text()


def test_hooks_and_workflow_call_what_is_there():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"].split()[0] for hook in hooks] == [".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/mypy"]
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["check"]["steps"]
    assert steps[-1]["run"] == ".ci/run"
    assert os.access(ROOT / ".ci/run", os.X_OK)
    steps = yaml.safe_load((ROOT / ".github/workflows/versions.yml").read_text())["jobs"]["platforms"]["steps"]
    words = " ".join(step.get("run", "") for step in steps).split()
    files = [word for word in words if word.endswith((".py", ".yaml"))]
    assert len(files) == 6
    assert all((ROOT / file).is_file() for file in files)
