"""A recipe launched with ``accelerate_configs/cpu_fsdp2.yaml``: a finished run with the curve of one process."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from accelerate.state import AcceleratorState
from hub_stand_in import NAME, cache_as_downloaded
from launches import RECIPE, exit_codes, launch, write_text
from lives import curve, loaded
from nursery import free_port
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from memsave_recipes.core.errors import InputError
from memsave_recipes.run.run import Run
from memsave_recipes.training.arguments import RecipeArguments
from memsave_recipes.training.launch.start import Accelerator

TINY = "n_layer=3,n_head=2,n_embd=16,vocab_size=300"
FLAGS = (
    *("--model_type", "gpt2", "--config_overrides", TINY, "--block_size", "16"),
    *("--global_batch_size", "6", "--micro_batch_size", "2", "--max_steps", "4", "--eval_steps", "2"),
    *("--logging_steps", "1", "--dtype", "float64", "--report_to", "none"),
)


def train_here(*flags):
    """On one rank with whole weights, in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with loaded("language_modeling") as module:
        module.main([str(flag) for flag in flags])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    flags = [*FLAGS, "--train_file", write_text(folder)]
    train_here(*flags, "--output_dir", folder / "one")
    flags += ["--activation_checkpointing", "segments:2", "--verify", "--save_every", "2"]
    done = launch("cpu_fsdp2.yaml", *flags, "--output_dir", folder / "two")
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "two.out").write_text(done.stdout)
    return folder


@pytest.mark.slow
def test_the_curve_of_one_process(runs):
    assert curve(runs / "two") == pytest.approx(curve(runs / "one"), rel=1e-9)
    one, two = (json.loads((runs / name / "results.json").read_text()) for name in ("one", "two"))
    assert two["num_processes"] == 2
    assert two["eval"]["loss"] == pytest.approx(one["eval"]["loss"], rel=1e-9)
    assert two["equivalence"]["verdict"] == "identical"
    assert json.loads((runs / "two" / "config.json").read_text())["shard"] == "full"


def test_it_says_so_and_draws_a_sample(runs):
    output = (runs / "two.out").read_text()
    assert "weights, gradients and optimizer state in shards over 2 ranks" in output
    assert "weights: each rank initialises its part" in output
    assert output.count("sample: ") == 1


def test_a_rank_holds_about_half_of_it(runs):
    one, two = (
        json.loads((runs / name / "results.json").read_text())["memory"]["breakdown"] for name in ("one", "two")
    )
    assert two["optimizer_state_gib"] < 0.55 * one["optimizer_state_gib"]


@pytest.mark.slow
def test_no_proof_is_begun_that_needs_float64(runs, tmp_path):
    flags = [*FLAGS, "--train_file", runs / "text.txt", "--verify", "--output_dir", tmp_path / "tiled"]
    done = launch("cpu_fsdp2.yaml", *flags, "--activation_checkpointing", "full_tiled")
    assert "2" in exit_codes(done)  # of rank 0, which speaks; the launcher ends the others
    assert "error: --verify: plan full_tiled rounds in another order" in done.stderr
    assert not (tmp_path / "tiled" / "metrics.jsonl").exists()


def test_final_is_a_model_of_transformers_with_the_same_weights(runs):
    one, two = (load_file(runs / name / "final" / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(((one[name] - two[name]).abs().max() <= 1e-9 * one[name].abs().max()) for name in one)
    assert AutoModelForCausalLM.from_pretrained(runs / "two" / "final").config.architectures == ["GPT2LMHeadModel"]


ONCE_IS_FASTER = """
import sys
from memsave_recipes.core.planner.search import Candidate
from memsave_recipes.run.failures import run_recipe
sys.path.insert(0, {recipes!r})
import language_modeling as recipe

Candidate.step_s = property(lambda self: 1 - 0.5 * self.reduces_once)
run_recipe(recipe.main)
"""


@pytest.fixture(scope="module")
def reduced_once(runs):
    flags = [*FLAGS, "--train_file", runs / "text.txt", "--verify", "--save_every", "2", "--global_batch_size", "12"]
    flags += ["--activation_checkpointing", "budget:bitwise", "--memory_budget_gib", "1"]
    program = runs / "program.py"
    program.write_text(ONCE_IS_FASTER.format(recipes=str(RECIPE.parent)))
    done = launch("cpu_fsdp2.yaml", *flags, "--output_dir", runs / "once", program=program)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "gradients are reduced once a step, and whole on each rank until then" in done.stdout
    return flags


@pytest.mark.slow
def test_it_goes_on_as_it_reduced_gradients(runs, reduced_once, tmp_path):
    stopped_after_two(runs / "once", tmp_path)
    done = launch("cpu_fsdp2.yaml", *reduced_once, "--resume", "--output_dir", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "config.json").read_text())["reduces_once"]
    assert curve(tmp_path) == curve(runs / "once")


def stopped_after_two(run, folder):
    """The files of ``run`` as if it had been stopped after its second step."""
    for name in ("config.json", "plan.json", "metrics.jsonl", "checkpoints/step-2"):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", run / name, target], check=True)


@pytest.mark.slow
def test_each_rank_reads_its_slices_of_a_folder_and_of_a_name(runs, monkeypatch, tmp_path):
    folder = runs / "two" / "final"
    flags = ["--model_name_or_path", folder, *FLAGS[FLAGS.index("--block_size") :], "--train_file", runs / "text.txt"]
    train_here(*flags, "--output_dir", tmp_path / "one")
    cache_as_downloaded(folder, tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name, source in (("two", folder), ("by_name", NAME)):
        done = launch("cpu_fsdp2.yaml", *flags, "--model_name_or_path", source, "--output_dir", tmp_path / name)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"weights: each rank reads its slices of {source}" in done.stdout
        assert curve(tmp_path / name) == pytest.approx(curve(tmp_path / "one"), rel=1e-9)
        files = [tmp_path / each / "final" / "generation_config.json" for each in ("one", name)]
        assert files[0].read_text() == files[1].read_text()


@pytest.mark.slow
def test_groups_that_replicate_one_another(runs, tmp_path):
    """By the flag, and by the file for two machines, whose launchers run side by side here."""
    flags = [*FLAGS, "--train_file", runs / "text.txt", "--output_dir"]
    done = launch("cpu_ddp.yaml", *flags, tmp_path / "flag", "--shard", "2", num_processes=4)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "over 2 ranks, replicated 2 times" in done.stdout
    assert curve(tmp_path / "flag") == pytest.approx(curve(runs / "one"), rel=1e-9)
    port = ["--main_process_port", str(free_port())]
    with ThreadPoolExecutor(2) as machines:
        launched = [
            machines.submit(
                launch, "fsdp2_hsdp.yaml", *flags, tmp_path / "file", of_launch=[*port, "--machine_rank", rank]
            )
            for rank in ("0", "1")
        ]
    assert [machine.result().returncode for machine in launched] == [0, 0], launched[0].result().stderr[-3000:]
    assert curve(tmp_path / "file") == curve(tmp_path / "flag")


def test_a_run_asks_before_it_trains_whole_weights(monkeypatch, tmp_path):
    args = RecipeArguments(output_dir=str(tmp_path / "run"), report_to=["none"], shard="full")
    with pytest.raises(InputError, match="shard full: there is one rank"), Run.open(args, recipe="one") as run:
        run.join(Accelerator(**run.launch))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    args = replace(args, shard="2")
    with pytest.raises(InputError, match="--shard 2: the launch file says full"), Run.open(args, recipe="two"):
        pass


MIXED = f"""
import os, sys
sys.path.insert(0, {str(RECIPE.parent)!r})
import language_modeling
from memsave_recipes.run.recipe import run_recipe
from memsave_recipes.run import run

installed = run.installed_versions
run.installed_versions = lambda: {{**installed(), "torch": "2." + os.environ["RANK"]}}
run_recipe(language_modeling.main)
"""


@pytest.mark.slow
def test_ranks_with_different_versions_end_in_one_line(tmp_path):
    program = tmp_path / "mixed.py"
    program.write_text(MIXED)
    done = launch("cpu_fsdp2.yaml", *FLAGS, "--output_dir", tmp_path / "run", program=program)
    line = "error: rank 1 has torch 2.1, rank 0 has 2.0: install the same versions on every machine"
    assert done.stderr.splitlines().count(line) == 1
    assert "2" in exit_codes(done)
    assert not (tmp_path / "run").exists()
