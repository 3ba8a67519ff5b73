"""Through real `accelerate launch`: a global batch of 24 trains the same weights on any ranks and micro-batches."""

import json
import os
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).parents[2]
ACCELERATE = Path(sysconfig.get_path("scripts")) / "accelerate"
TIMEOUT_S = 240
TINY_VIT = (
    "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64,patch_size=8,"
    "hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0"
)
SCRIPTS = {
    "images": [
        "recipes/image_classification.py",
        *("--model_type", "vit", "--config_overrides", TINY_VIT, "--augmentation", "digits"),
        *("--report_to", "none", "--logging_steps", "1"),
    ],
    "text": ["tests/recipes/causal_language_model.py"],
}
OPTIMIZERS = {
    "adamw": ["--optimizer", "adamw", "--learning_rate", "1e-3"],
    "sgd": ["--optimizer", "sgd", "--learning_rate", "0.1"],
}
WORK = ["--max_steps", "30", "--global_batch_size", "24", "--warmup_steps", "5"]
# name: ranks, largest micro-batch
GEOMETRIES = {
    "1x24": (1, 24),
    "1x6x4": (1, 6),
    "1x5-uneven": (1, 5),
    "2x12": (2, 12),
    "2x3x4": (2, 3),
    "3x8": (3, 8),
    "4x2x3": (4, 2),
}
ON_ONE_RANK = {"1x3x8": (1, 3)}  # with the micro-batches of 2x3x4
TOLERANCES = {"float64": 1e-12, "float32": 1e-5}
KEY_BIAS = ".key.bias"
QUICK = {("images", "adamw", "float64", "2x3x4")}


class Launcher:
    """Starts real `accelerate launch` runs, each into a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, launch: list[str], script: list[str]) -> subprocess.Popen[str]:
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        ours = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HOME": str(self.folder),
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [str(ACCELERATE), "launch", *launch, *script]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | offline | ours, start_new_session=True, **pipes)
        self._processes.append(process)
        return process

    def train(self, layout: str, script: list[str]) -> None:
        """On this machine alone."""
        num_ranks, micro_batch_size = (GEOMETRIES | ON_ONE_RANK)[layout]
        config = "cpu" if num_ranks == 1 else "cpu_ddp"
        launch = ["--config_file", f"accelerate_configs/{config}.yaml", "--num_processes", str(num_ranks)]
        wait_for(self.start(launch, [*script, "--micro_batch_size", str(micro_batch_size)]))

    def train_on_two_machines(self, rendezvous: str, script: list[str]) -> None:
        """Two ranks on each of two machines, which are both this one."""
        port = free_port()
        launch = ["--config_file", "accelerate_configs/multi_node.yaml", "--rdzv_backend", rendezvous]
        launch += ["--main_process_port", str(port), "--machine_rank"]
        first = self.start([*launch, "0"], script)
        if rendezvous == "c10d":  # machine 1 would open the port itself, and machine 0 then refuse it
            wait_until_listening(port)
        wait_for(self.start([*launch, "1"], script))
        wait_for(first)

    def end_all(self) -> None:
        """End what a failed test left behind; torch gives each rank a session of its own, so find them as children."""
        for process in self._processes:
            if process.poll() is None:
                for rank in psutil.Process(process.pid).children(recursive=True):
                    rank.kill()
                process.kill()
                process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_listening(port: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    pytest.fail(f"nothing listens on port {port}")


def wait_for(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("launches"))
    yield launcher
    launcher.end_all()


def words(script: str, optimizer: str, dtype: str) -> list[str]:
    return [*SCRIPTS[script], *OPTIMIZERS[optimizer], "--dtype", dtype, *WORK]


Train = Callable[[str, str, str, str], Path]


@pytest.fixture(scope="module")
def train(launcher: Launcher) -> Train:
    """The folder of a run, each launched once."""

    @cache
    def run(script: str, optimizer: str, dtype: str, layout: str) -> Path:
        folder = launcher.folder / "-".join([script, optimizer, dtype, layout])
        launcher.train(layout, [*words(script, optimizer, dtype), "--output_dir", str(folder)])
        return folder

    return run


def cases() -> list[Any]:
    """All geometries but the first, which the others are compared with; all but a few are slow."""
    others = list(GEOMETRIES)[1:]
    every = list(product(SCRIPTS, OPTIMIZERS, TOLERANCES, others))
    return [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow, id="-".join(case)) for case in every]


@pytest.mark.parametrize(("script", "optimizer", "dtype", "layout"), cases())
def test_any_geometry_trains_the_same(train: Train, script: str, optimizer: str, dtype: str, layout: str) -> None:
    folder, expected = (train(script, optimizer, dtype, name) for name in (layout, "1x24"))
    assert_same_weights(folder, expected, dtype, optimizer)
    if script == "images":
        assert_same_curve(folder, expected, TOLERANCES[dtype])
    else:
        assert samples_of_each_step(folder) == samples_of_each_step(expected)


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_machines_train_the_same(launcher: Launcher, train: Train, rendezvous: str) -> None:
    script, optimizer, dtype = "images", "adamw", "float64"
    folder = launcher.folder / rendezvous
    launcher.train_on_two_machines(rendezvous, [*words(script, optimizer, dtype), "--output_dir", str(folder)])
    assert_same_weights(folder, train(script, optimizer, dtype, "1x24"), dtype, optimizer)
    assert_same_curve(folder, train(script, optimizer, dtype, "1x24"), TOLERANCES[dtype])


def assert_same_weights(folder: Path, expected_folder: Path, dtype: str, optimizer: str) -> None:
    """Each tensor relative to its largest element, in the worst of them."""
    weights, expected = weights_in(folder), weights_in(expected_folder)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = tensor.abs().max()
        if name.endswith(KEY_BIAS):
            # It shifts all scores of a query alike, so its true gradient is zero and it holds rounding alone: of the
            # order of the tolerance where a weight would be of the order of 1, unless AdamW enlarges that of float32.
            if (dtype, optimizer) == ("float32", "adamw"):
                continue
            scale = torch.ones(())
        assert (weights[name] - tensor).abs().max() <= TOLERANCES[dtype] * scale, name


def weights_in(folder: Path) -> dict[str, Tensor]:
    """The final weights; GPT-2's biases of queries, keys and values, which are one tensor, apart."""
    weights = load_file(folder / "final" / "model.safetensors")
    for name in [name for name in weights if name.endswith(".c_attn.bias")]:
        for part, tensor in zip(("query", "key", "value"), weights.pop(name).chunk(3), strict=True):
            weights[f"{name.removesuffix('.bias')}.{part}.bias"] = tensor
    return weights


def assert_same_curve(folder: Path, expected_folder: Path, tolerance: float) -> None:
    rows, expected = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (folder, expected_folder)
    )
    curves = [[row["train/loss"] for row in run if "train/loss" in row] for run in (rows, expected)]
    rates = [[row["train/lr"] for row in run if "train/lr" in row] for run in (rows, expected)]
    assert len(curves[0]) == len(rates[0]) == 30
    assert curves[0] == pytest.approx(curves[1], rel=tolerance)
    assert rates[0] == rates[1]


def samples_of_each_step(folder: Path) -> list[list[int]]:
    """Of all ranks together, in the order of the ranks."""
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    return [list(chain.from_iterable(step)) for step in zip(*ranks, strict=True)]


@pytest.mark.slow
def test_the_teaching_recipe_gives_the_same_weights_on_two_ranks(launcher: Launcher) -> None:
    script = ["recipes/ddp_equals_accumulation.py", "--report_to", "none", "--output_dir"]
    one, two = launcher.folder / "one", launcher.folder / "two"
    launcher.train("1x3x8", [*script, str(one)])
    launcher.train("2x3x4", [*script, str(two), "--compare_with", str(one)])
    equivalence = json.loads((two / "results.json").read_text())["equivalence"]
    assert equivalence["largest_difference_to_it"] <= 1e-15
    assert equivalence["largest_difference_exact"] <= 1e-15
    bitwise = ("bitwise", "bitwise_GPT-2", "bitwise_VGG16-BN")
    assert [equivalence[f"largest_difference_{loop}"] for loop in bitwise] == [0, 0, 0]
    assert equivalence["same_bits_as_it"] == {"3": True}
    assert equivalence["largest_difference_usual"] > 0.01
