"""What is predicted of a recipe's task is what the recipe then needs."""

import importlib.util
import re
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

from memsave_recipes.core.costs.estimate import fake_model
from memsave_recipes.core.costs.targets import Host, find_target
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner import task as task_module
from memsave_recipes.core.planner.task import (
    Launch,
    Task,
    choose_for_target,
    fake_planned_model,
    fake_workload,
    inputs_of,
)
from memsave_recipes.core.planner.trial_step import step_bytes
from memsave_recipes.core.plans.chain import CPU, CUDA
from memsave_recipes.core.plans.plan import OFFLOADING_STRATEGIES
from memsave_recipes.core.processes import ahead
from memsave_recipes.core.text import GIB, format_bytes
from memsave_recipes.models.labels import MULTI, REGRESSION, LabelLoss
from memsave_recipes.run.recipe import RecipeArguments, summed_loss
from memsave_recipes.run.run_plan import predicted_host_memory
from memsave_recipes.tools.fit.recipe_task import read_task

RECIPES = Path(__file__).parents[3] / "recipes"
BERT = "hidden_size=64,num_hidden_layers=3,num_attention_heads=4,intermediate_size=128"
GPT2 = "n_layer=3,n_head=4,n_embd=64,vocab_size=2048"
IMAGES = ["--model", "densenet_small", "--image_size", "32", "--augmentation", "none"]
BITWISE = ["--bitwise_topology", "--batchnorm", "global"]
TEXT = ["--model_type", "gpt2", "--config_overrides", GPT2, "--block_size", "128"]
CASES = {
    "images": ("image_classification", [*IMAGES, "--global_batch_size", "16", "--micro_batch_size", "8"]),
    "mixed images": (
        "image_classification",
        [*IMAGES[:-1], "randaugment", "cutmix", "mixup", "--global_batch_size", "16", "--micro_batch_size", "8"],
    ),
    "text": ("language_modeling", [*TEXT, "--loss", "full", "--global_batch_size", "4", "--micro_batch_size", "4"]),
    "adapters": ("language_modeling", [*TEXT, "--lora", "--loss", "full", "--global_batch_size", "4"]),
    "lockstep": (
        "image_classification",
        ["--model", "vgg_small_bn", *IMAGES[2:], *BITWISE, "--global_batch_size", "22", "--micro_batch_size", "4"],
    ),
    "classes": (
        "text_classification",
        ["--model_type", "bert", "--config_overrides", BERT, "--max_length", "64", "--global_batch_size", "16"],
    ),
}
SLOW = ("text", "lockstep", "adapters")
"""Cases whose kind another test has: adapters train the same model, and a plan for lockstep is trained below."""
NUM_CLASSES = 4000
LAUNCH = Launch(target=find_target("cpu"))


def recipe_of(name):
    specification = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("strategy", ["none", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in CASES])
def test_the_peak_that_is_predicted_is_that_of_the_run(case, strategy, tmp_path):
    name, flags = CASES[case]
    flags = [*flags, "--activation_checkpointing", strategy]
    (candidate,) = choose_for_target(read_task(RECIPES / f"{name}.py", flags), LAUNCH, GIB).candidates
    AcceleratorState._reset_state(reset_partial_state=True)
    short = ["--max_steps", "3", "--report_to", "none", "--output_dir", str(tmp_path / "run")]
    results = recipe_of(name).main([*flags, *short])
    peak_bytes = results["memory"]["peak_allocated_gib"] * GIB
    # On a CPU the recipe's figure is without the batch, which the loader made; images are the largest of these.
    assert candidate.peak_bytes == pytest.approx(peak_bytes, rel=0.04 if case == "adapters" else 0.03)


LOSSES = {
    "plain": LabelLoss(),
    "smoothed": LabelLoss(label_smoothing=0.1),
    "weighted": LabelLoss(class_weights=(1.5,) * NUM_CLASSES),
    "smoothed and weighted": LabelLoss(label_smoothing=0.1, class_weights=(1.5,) * NUM_CLASSES),
    "several labels": LabelLoss(problem_type=MULTI),
    "regression": LabelLoss(problem_type=REGRESSION),
}


@pytest.mark.parametrize("strategy", ["none", "full"])
@pytest.mark.parametrize("name", LOSSES)
def test_no_peak_of_a_loss_of_labels_is_predicted_low(name, strategy):
    """With many classes the loss takes most of the memory."""
    loss = LOSSES[name]
    num_labels = 1 if loss.problem_type == REGRESSION else NUM_CLASSES

    def build_model(**options):
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)), nn.Linear(32, num_labels)
        )

    def micro_batch(size):
        return {"x": torch.empty(size, 32, device="meta"), "labels": loss.labels_for(size, num_labels)}

    flags = RecipeArguments(output_dir="out", global_batch_size=128, activation_checkpointing=strategy)
    loss_of = partial(summed_loss, logits_of=lambda model, batch: model(batch["x"]), loss=loss)
    task = Task(run=flags, optim=flags, build_model=build_model, loss_of=loss_of, micro_batch=micro_batch)
    (candidate,) = choose_for_target(task, LAUNCH, GIB).candidates
    measured = measured_bytes(task, candidate)
    assert measured <= candidate.peak_bytes
    assert candidate.peak_bytes == pytest.approx(measured, rel=0.03)


def measured_bytes(task, candidate):
    """The peak of a step on samples of ones, which are valid classes, too."""
    model = task.planned_model()
    trained = task.trained(model, candidate.loss, CPU)

    def ones(batch):
        return {name: torch.ones(one.shape, dtype=one.dtype) for name, one in batch.items()}

    make_batch = inputs_of(task, candidate.layout, ones)
    return step_bytes(candidate.forecast, candidate.static, model, lambda: task.loss_of(trained, make_batch()), CPU)


def test_further_losses_are_estimated_alike_in_a_process_of_their_own(monkeypatch):
    begun = []
    monkeypatch.setattr(task_module, "ahead", lambda items, **named: begun.append(items) or ahead(items, **named))
    flags = [*TEXT, "--micro_batch_size", "auto", "--global_batch_size", "2", "--activation_checkpointing", "full"]
    task = read_task(RECIPES / "language_modeling.py", flags)
    launch = Launch(target=find_target("a100"))
    here, there = (choose_for_target(task, launch, GIB, in_processes=own).candidates for own in (False, True))
    assert len(begun) == 2
    losses = ("full", "chunked:8192", "chunked:1024")
    assert [(one.layout.micro_batch_size, one.loss) for one in here] == [*product((1, 2), losses)]
    assert [one.parts for one in there] == [one.parts for one in here]
    assert [one.step_s for one in there] == [one.step_s for one in here]


@pytest.mark.compiles_ahead
def test_layers_are_compiled_with_ratios_only_where_that_may_be_faster(monkeypatch):
    seconds, largest, asked = {1: 3.0, 2: 2.0, 4: 1.99, 8: 1.0}, 2, []

    def candidates(space, costs, layout, loss):
        size = layout.micro_batch_size
        asked.append((size, bool(space.compiled_ratios)))
        keep = SimpleNamespace(strategy="none", fits=size <= largest, step_s=seconds[size], layout=layout)
        return [keep, SimpleNamespace(strategy="full", fits=True, step_s=4.0, layout=layout)]

    monkeypatch.setattr(task_module.Estimates, "of", lambda *_: None)
    flags = [*TEXT, "--micro_batch_size", "auto", "--global_batch_size", "8", "--activation_checkpointing", "budget"]
    task = read_task(RECIPES / "language_modeling.py", [*flags, "--loss", "full", "--compile"])
    choose_for_target(task, Launch(target=find_target("a100")), GIB, candidates=candidates)
    assert asked == [(1, False), (2, False), (4, False), (8, False), (8, True)]


def test_losses_to_compare_are_those_of_the_device():
    def losses(device, words, *flags):
        shape = f"{GPT2},vocab_size={words}"
        flags = [*TEXT, "--config_overrides", shape, "--global_batch_size", "4", *flags]
        return read_task(RECIPES / "language_modeling.py", flags).losses_on(device)

    assert losses(CPU, "301") == ("full", "chunked")
    assert losses(CUDA, "320") == ("full", "chunked:8192", "chunked:1024")
    assert losses(CUDA, "301") == ("chunked:8192", "chunked:1024")  # which pad it
    assert losses(CUDA, "301", "--loss", "chunked:64") == ("chunked:64",)


@pytest.mark.slow
def test_a_plan_on_paper_for_micro_batches_in_lockstep_is_that_of_the_run(tmp_path):
    """One forward of 6 micro-batches, the last one of 2 samples."""
    name, flags = CASES["lockstep"]
    recipe, budget = RECIPES / f"{name}.py", ["--activation_checkpointing", "budget:bitwise", "--memory_budget_gib"]
    task = read_task(recipe, [*flags, *budget, "1"])
    workload = fake_workload(task, LAUNCH, fake_planned_model(task, LAUNCH.target), task.run.layout(1), None)
    assert workload.resident_bytes - workload.weights_bytes == 22 * (3 * 32 * 32 + 8)
    plain, *_ = choose_for_target(task, LAUNCH, GIB).candidates
    chosen = choose_for_target(task, LAUNCH, int(0.75 * plain.needed_bytes)).chosen
    assert chosen.forecast.plan.recomputed
    (tmp_path / "plan.json").write_text(chosen.forecast.plan.to_json())
    AcceleratorState._reset_state(reset_partial_state=True)
    short = ["--max_steps", "3", "--report_to", "none", "--output_dir", str(tmp_path / "run")]
    given = ["--activation_checkpointing", str(tmp_path / "plan.json")]
    peak_bytes = recipe_of(name).main([*flags, *given, *short])["memory"]["peak_allocated_gib"] * GIB
    assert peak_bytes <= chosen.peak_bytes <= 1.02 * peak_bytes
    assert chosen.step_s == chosen.forecast.micro_batch_s + chosen.device_update_s


@pytest.mark.parametrize("strategy", OFFLOADING_STRATEGIES)
def test_the_host_memory_of_offload_is_told_before_training(strategy):
    sizes = "n_layer=4,n_head=4,n_embd=256,vocab_size=512"
    flags = ["--model_type", "gpt2", "--config_overrides", sizes, "--block_size", "256"]
    flags += ["--global_batch_size", "4", "--activation_checkpointing", strategy]
    given = read_task(RECIPES / "language_modeling.py", flags), (lambda: Launch(target=find_target("a100")))
    state = torch.get_rng_state()
    told, num_bytes = predicted_host_memory(*given, Host(GIB))
    flag = f"--activation_checkpointing {strategy}"
    assert re.fullmatch(rf"{flag}: at most \d+\.?\d* MiB of the host's memory for a rank, of 1 GiB .*", told)
    assert format_bytes(num_bytes) in told
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(InputError, match=rf"{strategy}: a rank would move .* MiB to its host, which has 1 B"):
        predicted_host_memory(*given, Host(1))


def test_a_recipe_that_fake_tensors_cannot_run_trains_all_the_same():
    task = read_task(RECIPES / "image_classification.py", ["--model", "vgg_small"])
    task = replace(task, build_model=lambda: 1 / 0)
    told = predicted_host_memory(task, lambda: Launch(target=find_target("a100")))
    assert told == ("offload: how much of the host's memory it takes cannot be predicted (ZeroDivisionError)", 0)


def test_a_task_takes_no_memory_for_weights():
    flags = ["--model_type", "gpt2", "--config_overrides", "n_layer=48,n_embd=1600,n_head=25"]
    task = read_task(RECIPES / "language_modeling.py", flags)
    model = fake_model(task.planned_model)
    assert sum(parameter.numel() for parameter in model.parameters()) > 1.4e9
    assert all(isinstance(parameter, torch._subclasses.FakeTensor) for parameter in model.parameters())


def test_flags_may_leave_out_the_folder_but_no_recipe(tmp_path):
    assert read_task(RECIPES / "image_classification.py", ["--model", "vgg_small"]).run.output_dir
    with pytest.raises(InputError, match="is not a file"):
        read_task(tmp_path / "nothing.py", [])
    (tmp_path / "plain.py").write_text("x = 1\n")
    with pytest.raises(InputError, match="has no function task"):
        read_task(tmp_path / "plain.py", [])
