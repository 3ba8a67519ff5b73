"""``--compile``: the curve of eager layers within rounding, and a resumed run with the bits of an uninterrupted one."""

from types import SimpleNamespace

import pytest
import torch
from lives import FLAGS, assert_the_same_weights, curve, scratch, with_context
from torch._dynamo.utils import counters

from memsave_recipes.core.planner.task import Task
from memsave_recipes.core.plans.chain import CUDA
from memsave_recipes.run import building
from memsave_recipes.run.building import Built
from memsave_recipes.training.arguments import RecipeArguments

RECIPE = "language_modeling"
MODELS = {"language_modeling": scratch("llama"), "image_classification": []}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", MODELS, indirect=True)
def test_a_resumed_run_has_the_bits_of_one_that_nothing_ended(recipe, train, tmp_path, request):
    name = request.node.callspec.params["recipe"]
    flags = [*FLAGS[name], *MODELS[name], "--logging_steps", "1", "--save_every", "2"]
    flags += ["--max_steps", "4", "--eval_steps", "99", "--lr_scheduler_type", "constant"]
    train(*flags, output="plain")
    before = counters["stats"]["unique_graphs"]
    assert train(*flags, "--compile", output="whole")["plan"] == "none"
    assert 0 < counters["stats"]["unique_graphs"] - before <= 2
    assert curve(tmp_path / "whole") == pytest.approx(curve(tmp_path / "plain"), rel=1e-5)
    train(*flags, "--compile", "--max_steps", "2", output="cut")
    train(*flags, "--resume", output="cut")  # which goes on as the run began
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    assert_the_same_weights(tmp_path / "cut/final", tmp_path / "whole/final")


PLANS = ("full", "every:2", "segments:2", "nested:2", "offload", "full_offload", "budget:bitwise")


def flags_under(plan):
    """The flags of a run under a plan."""
    budget = ["--memory_budget_gib", with_context(0.5)] if plan.startswith("budget") else []
    return ["--activation_checkpointing", plan, *budget]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["language_modeling", "text_classification", "image_classification"], indirect=True)
@pytest.mark.parametrize("more", [[], ["--lora", "--lora_rank", "4"], ["--dtype", "bfloat16_master"]])
def test_every_plan_ends_in_the_weights_of_compiled_layers_that_keep_everything(recipe, more, train, tmp_path, request):
    name = request.node.callspec.params["recipe"]
    if "--lora" in more and name == "image_classification":
        pytest.skip("its adapters are tried elsewhere")
    flags = [*FLAGS[name], *more, "--compile", "--max_steps", "3", "--logging_steps", "1", "--eval_steps", "99"]
    train(*flags, output="kept")
    for plan in PLANS:
        train(*flags, *flags_under(plan), output=plan)
        assert curve(tmp_path / plan) == curve(tmp_path / "kept"), plan
        assert_the_same_weights(tmp_path / plan / "final", tmp_path / "kept/final")


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--shard", "full"], ["--sequence_parallel", "2"], ["--lora"]])
def test_two_ranks_with_every_plan_end_in_the_weights_of_compiled_layers(more, train_on_ranks, tmp_path):
    flags = [*FLAGS[RECIPE], *more, "--compile", "--max_steps", "3", "--logging_steps", "1", "--eval_steps", "99"]
    flags += ["--lr_scheduler_type", "constant"]
    train_on_ranks(2, *flags, output="kept")
    for plan in ("full", "segments:2", "offload"):
        train_on_ranks(2, *flags, "--activation_checkpointing", plan, output=plan)
        assert curve(tmp_path / plan) == curve(tmp_path / "kept"), plan
        assert_the_same_weights(tmp_path / plan / "final", tmp_path / "kept/final")
    train_on_ranks(
        2, *flags, "--activation_checkpointing", "full", "--save_every", "2", "--max_steps", "2", output="cut"
    )
    train_on_ranks(2, *flags, "--activation_checkpointing", "full", "--resume", output="cut")
    assert_the_same_weights(tmp_path / "cut/final", tmp_path / "kept/final")


@pytest.mark.slow
def test_the_peak_of_a_micro_batch_that_was_searched_is_not_above_its_prediction(train):
    flags = [*FLAGS[RECIPE], *MODELS[RECIPE], "--global_batch_size", "2", "--max_steps", "3", "--compile"]
    results = train(*flags, "--micro_batch_size", "auto", "--memory_budget_gib", with_context(0.02))
    assert results["plan"] == "none"
    assert 0 <= results["memory"]["prediction_error_pct"] <= 2


@pytest.mark.parametrize(
    ("device", "repeats", "num_steps", "compile"),
    [
        ("cuda", True, 100, "regions"),
        ("cuda", True, 99, "none"),
        ("cuda", False, 100, "none"),
        ("cpu", True, 100, "none"),
    ],
)
def test_auto_compiles_on_a_gpu_where_layers_repeat_for_long(device, repeats, num_steps, compile, monkeypatch):
    said = []
    monkeypatch.setattr(building, "on_main_process", lambda accelerator, ask: ask())
    monkeypatch.setattr(building, "can_compile", lambda model: repeats)
    flags = RecipeArguments(output_dir="run", activation_checkpointing="full")
    prepared = object.__new__(Built)
    prepared.bare = torch.nn.Identity()
    prepared.batches = SimpleNamespace(layout=SimpleNamespace(sequence_parallel=1), num_steps=num_steps)
    accelerator = SimpleNamespace(device=torch.device(device), print=said.append)
    prepared.run = SimpleNamespace(args=flags, flags={"compile": "auto"}, accelerator=accelerator)
    task = Task(run=flags, optim=flags, build_model=None, loss_of=None, micro_batch=None)
    settled = prepared._with_compile(task).run
    assert settled is prepared.run.args
    assert (settled.activation_checkpointing, settled.compile) == ("full", compile)
    assert prepared.run.flags == {"compile": compile}
    assert [line.partition(";")[0] for line in said] == [f"--compile auto: {compile}"] * (device == "cuda")


def test_the_planner_knows_which_runs_are_too_short_to_compile():
    compiles = [RecipeArguments(output_dir="run", max_steps=steps).compiles_on(CUDA) for steps in (99, 100, None)]
    assert compiles == [False, True, True]
    assert RecipeArguments(output_dir="run", max_steps=1, compile="regions").compiles_on(CUDA)
