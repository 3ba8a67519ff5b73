"""The sweep of W&B: its agent launches the recipe with the flags of a run, each run in a folder of its own."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lives import loaded
from wandb.wandb_agent import Agent

from memsave_recipes.tools.cli import main
from memsave_recipes.training.parsing import parse_arguments

ROOT = Path(__file__).parents[2]
SWEEP = ROOT / "recipes/configs/sweep.yaml"
MODEL = ["--model", "densenet_small", "--output_dir", "out"]
ACCELERATE = """#!/bin/sh
printf '%s\\n' "$@" > "$WORDS_IN"
"""


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """``launched(run_id, flags)`` has the agent start a run; the words after ``accelerate``, which is a stand-in."""
    program = tmp_path / "bin" / "accelerate"
    program.parent.mkdir()
    program.write_text(ACCELERATE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("WORDS_IN", str(tmp_path / "words"))
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, "another")  # the agent sets them
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    sweep = yaml.safe_load(SWEEP.read_text(encoding="utf-8"))
    agent = Agent(api=None, queue=None, sweep_id="sweep")
    agent._sweep_command = sweep["command"]

    def run(run_id: str, flags: dict[str, Any]) -> list[str]:
        values = {name: {"value": value} for name, value in flags.items()}
        agent._command_run({"run_id": run_id, "program": sweep["program"], "args": values})
        assert agent._run_processes.pop(run_id).wait(timeout=60) == 0
        return (tmp_path / "words").read_text().splitlines()

    return run


def first_of_grid() -> dict[str, Any]:
    parameters = yaml.safe_load(SWEEP.read_text(encoding="utf-8"))["parameters"]
    return {name: values["values"][0] for name, values in parameters.items()}


def test_each_run_has_the_flags_of_the_sweep_and_a_folder_of_its_own(
    launched: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for run_id in ("k3v9", "x7q2"):
        words = launched(run_id, first_of_grid())
        assert words[:4] == [
            "launch",
            "--config_file",
            "accelerate_configs/cpu.yaml",
            "recipes/image_classification.py",
        ]
        with loaded("image_classification") as recipe:
            (args,) = parse_arguments(recipe.Arguments, args=words[4:])
        assert args.output_dir == f"out/sweep/{run_id}"
        assert args.report_to == ["wandb"]
        assert args.model == "densenet_small"  # of the preset
        assert {name: getattr(args, name) for name in first_of_grid()} == first_of_grid()


def test_an_agent_may_launch_on_more_ranks(launched: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCH", "accelerate_configs/cpu_ddp.yaml")
    assert launched("k3v9", {})[:3] == ["launch", "--config_file", "accelerate_configs/cpu_ddp.yaml"]


def test_the_page_shows_the_sweep() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/dashboards.md").read_text(encoding="utf-8"), re.S)
    assert SWEEP.read_text(encoding="utf-8").endswith(shown)


def test_every_value_of_the_grid_is_one_that_the_recipe_takes() -> None:
    sweep = yaml.safe_load(SWEEP.read_text(encoding="utf-8"))
    with loaded("image_classification") as recipe:
        for name, parameter in sweep["parameters"].items():
            for value in parameter["values"]:
                (args,) = parse_arguments(recipe.Arguments, args=[*MODEL, f"--{name}={value}"])
                assert getattr(args, name) == value
    assert sweep["metric"]["name"] == "eval/loss"  # a key of metrics.jsonl


@pytest.fixture
def type_wandb(wandb_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """``type_wandb(*words, **environment)`` runs ``wandb`` in a folder with our files, as people do; what it said."""
    for folder in ("recipes", "accelerate_configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    programs = Path(sys.executable).parent
    account = {"WANDB_BASE_URL": wandb_server.url, "WANDB_API_KEY": "k" * 40, "HOME": str(tmp_path)}
    patience = {"WANDB_HTTP_TIMEOUT": "60", "WANDB_ERROR_REPORTING": "false"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    path = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run(*words: str, **environment: str) -> str:
        environment = {**kept, **path, **account, **patience, **environment}
        done = subprocess.run(
            [programs / "wandb", *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


@pytest.mark.slow
@pytest.mark.timeout(900)  # an agent looks every 5 s
def test_a_sweep_as_people_run_it(
    type_wandb: Callable[..., str], wandb_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = yaml.safe_load(SWEEP.read_text(encoding="utf-8"))
    plans = ["none", "full"]
    sweep["parameters"] = {"activation_checkpointing": {"values": plans}, "micro_batch_size": {"value": 32}}
    sweep["parameters"] |= {"model": {"value": "vgg_small"}, "max_steps": {"value": 2}}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))

    name = re.search(r"wandb agent (\S+)", type_wandb("sweep", "sweep.yaml"))[1]
    said = type_wandb("agent", "--count", "1", name)
    said += type_wandb("agent", name, LAUNCH="accelerate_configs/cpu_ddp.yaml")
    assert "WARNING Config item" not in said  # "was locked by 'sweep'"

    (told,) = wandb_server.sweeps.values()
    assert told.given.keys() == wandb_server.runs.keys(), said
    folders = [tmp_path / "out/sweep" / run_id for run_id in told.given]
    ranks = []
    for (run_id, flags), folder in zip(told.given.items(), folders, strict=True):
        run, config = wandb_server.runs[run_id], json.loads((folder / "config.json").read_text())
        assert (run.project, run.sweep, run.exit_code) == (sweep["project"], name.split("/")[-1], 0)
        assert flags.items() <= run.config.items()
        assert flags.items() <= config.items()
        assert sweep["metric"]["name"] in run.history[-1]
        ranks.append(config["environment"]["num_processes"])
        assert [row["progress/samples_seen"] for row in run.history if "train/loss" in row] == [128, 256]
    assert ranks == [1, 2]

    assert main(["compare", str(tmp_path / "out/sweep"), "--csv", str(tmp_path / "runs.csv")]) == 0
    compared = (tmp_path / "runs.csv").read_text().splitlines()
    assert len(compared) == 1 + len(plans)
    assert "not comparable" not in capsys.readouterr().out
