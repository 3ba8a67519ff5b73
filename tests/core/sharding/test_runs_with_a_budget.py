"""A run in shards that is given a budget: its plan is found before the weights are cut up, and tried afterwards."""

import json
from functools import partial

import pytest
import torch
from launches import RECIPE, exit_codes, launch, results, write_text
from small_runs import VOCABULARY
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.planner.search import Candidate
from memsave_recipes.core.planner.task import Launch, Task, choose_for_target
from memsave_recipes.core.sharding import ShardGroups, shard
from memsave_recipes.core.sharding.units import units_of
from memsave_recipes.core.step.batch_layout import SampleOrder
from memsave_recipes.core.text import GIB
from memsave_recipes.models.causal_lm import CausalLMLoss
from memsave_recipes.run import run_plan
from memsave_recipes.run.run_plan import choose_by_estimates, plan_run
from memsave_recipes.run.step_on_device import StepOnDevice
from memsave_recipes.tools.cli import main
from memsave_recipes.training.arguments import OptimizerArguments, RunArguments
from memsave_recipes.training.batching import GlobalBatches
from memsave_recipes.training.checkpoints.resume import with_previous_plan

CONFIG = "cpu_fsdp2.yaml"
MODEL = (
    *("--model_type", "gpt2", "--config_overrides", "n_layer=6,n_head=2,n_embd=64,vocab_size=300"),
    *("--block_size", "128", "--global_batch_size", "8", "--loss", "full"),
)
SHORT = ("--max_steps", "4", "--logging_steps", "1", "--report_to", "none")
SOLVED = ("--micro_batch_size", "2", "--activation_checkpointing", "budget")
SAYS = "--shard full: planning by estimates for this CPU, before the weights are cut up: seconds are not measured"


LET_GO_LATE = 4
"""Units that a reading of a step may hold too much: buffers that a thread of gloo is the last to let go."""


def needed_by_a_unit():
    """The bytes of a layer's weights: 12 squares of the width, and biases and norms."""
    return 4 * (12 * 64**2 + 13 * 64)


def gib(num_bytes):
    return repr(num_bytes / GIB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("budgets")
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def needed(folder):
    """The bytes of a rank by strategy, as ``memsave plan`` has them."""
    file = folder / "choice.json"
    words = ["plan", RECIPE, *MODEL, *SOLVED, "--shard", "full", "--num_processes", "2", "--target", "cpu"]
    assert main([*map(str, words), "--memory_budget_gib", "1", "--json", str(file)]) == 0
    candidates = json.loads(file.read_text())["candidates"]
    return {one["strategy"]: one["needed_bytes"] for one in candidates if not one["reduces_once"]}


@pytest.fixture
def train(folder):
    """Launch the recipe on two ranks, into a folder of this name."""

    def run(name, *flags, **options):
        fixed = [*MODEL, *SHORT, "--train_file", folder / "text.txt", "--output_dir", folder / name]
        return launch(CONFIG, *fixed, *flags, **options)

    return run


@pytest.fixture(scope="module")
def within_a_budget(folder, needed):
    """A run between the least memory and that without checkpointing: its flags, its folder and what it said."""
    flags = [*SOLVED, "--memory_budget_gib", gib((needed["full"] + needed["none"]) // 2)]
    fixed = [*MODEL, *SHORT, "--train_file", folder / "text.txt", "--output_dir", folder / "found"]
    done = launch(CONFIG, *fixed, *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    return flags, folder / "found", done.stdout


@pytest.mark.slow
def test_a_run_finds_a_plan_that_fits(within_a_budget, needed):
    flags, run, said = within_a_budget
    budget_bytes = float(flags[-1]) * GIB
    assert needed["full"] < budget_bytes < needed["none"]
    assert SAYS in said
    assert "predicted peak" in said
    assert "falling back" not in said
    found, plan = results(run), json.loads((run / "plan.json").read_text())
    assert {span["action"] for span in plan["spans"]} > {"keep"}
    assert found["micro_batch_size"] == 2
    assert found["memory"]["peak_allocated_gib"] * GIB <= budget_bytes + LET_GO_LATE * needed_by_a_unit()
    assert found["memory"]["peak_allocated_gib"] * GIB < 0.9 * needed["none"]
    assert found["memory"]["predicted_peak_gib"] * GIB <= budget_bytes
    assert json.loads((run / "config.json").read_text())["memory_budget_gib"] == float(flags[-1])


NO_MEMORY_ON_RANK_1 = """
import os, sys
import torch
from memsave_recipes.run.step_on_device import StepOnDevice
from memsave_recipes.run.failures import run_recipe
sys.path.insert(0, {recipes!r})
import language_modeling as recipe

def forward_without_memory(self, layout):
    forward = forward_of(self, layout)
    def fails():
        if os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")
        return forward()
    return fails

forward_of, StepOnDevice.forward = StepOnDevice.forward, forward_without_memory
run_recipe(recipe.main)
"""


@pytest.mark.slow
def test_no_memory_in_the_trial_step_of_one_rank_ends_both(train, needed, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(NO_MEMORY_ON_RANK_1.format(recipes=str(RECIPE.parent)))
    done = train("ended", *SOLVED, "--memory_budget_gib", gib(needed["none"]), program=program)
    assert exit_codes(done) == ["3", "3"]
    assert "error: no memory left in the trial step, so the prediction of " in done.stderr


LENGTH, GLOBAL_BATCH = 64, 8


def build_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 6, "num_attention_heads": 4}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, num_key_value_heads=2, use_cache=False)).train()


class Rows(Dataset):
    def __getitem__(self, key):
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(key.index))
        return {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(LENGTH) % 40}  # two documents


def micro_batch(size):
    names = ("input_ids", "labels", "position_ids")
    return {name: torch.empty(size, LENGTH, dtype=torch.int64, device="meta") for name in names}


def loss_of(trained, batch):
    return trained(**batch)


def task_of(budget_bytes, strategy="budget:bitwise", size="auto"):
    run = RunArguments(
        output_dir="out",
        shard="full",
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=size,
        activation_checkpointing=strategy,
        memory_budget_gib=budget_bytes / GIB,
    )
    return Task(
        run=run,
        optim=OptimizerArguments(),
        build_model=build_model,
        trained=lambda model, loss, device: CausalLMLoss(model, "full"),
        loss_of=loss_of,
        micro_batch=micro_batch,
    )


def planned(accelerator, *, budget_bytes, too_large=GLOBAL_BATCH, once=0.0, once_is_too_large=False, **flags):
    """A plan as a run in shards finds and tries it; micro-batches of ``too_large`` samples seem to need too much.

    Args:
        once: the seconds that a step seems to save where it reduces gradients once.
        once_is_too_large: whether that seems to need too much, too.
    """
    said = []
    accelerator.print = said.append
    # Larger micro-batches are always faster here, whatever this machine has to do besides.
    Candidate.step_s = property(lambda self: self.layout.accumulation_steps - once * self.reduces_once)
    measured, readings = run_plan.run_trial_step, []

    def with_more(candidate, *args):
        readings.append((candidate.peak_bytes, measured(candidate, *args)))
        seems = candidate.layout.micro_batch_size >= too_large or (candidate.reduces_once and once_is_too_large)
        return readings[-1][1] + (budget_bytes if seems else 0)

    run_plan.run_trial_step = with_more
    model, task = build_model(), task_of(budget_bytes, **flags)
    trained = CausalLMLoss(model, "full")
    try:
        chosen = choose_by_estimates(accelerator, task)
        groups = ShardGroups.of("full", accelerator.num_processes)
        units = len(units_of(model, chosen.forecast.plan, "full"))
        shard(trained, model, chosen.forecast.plan, groups, accelerator.device)
        batches = GlobalBatches(
            accelerator,
            Rows(),
            order=SampleOrder(num_samples=4 * GLOBAL_BATCH, global_batch_size=GLOBAL_BATCH, seed=0),
            layout=task.run.layout(accelerator.num_processes),
            num_steps=2,
            seed=0,
        )
        step = StepOnDevice(accelerator, model, batches, trained, partial(loss_of, trained))
        found = plan_run(task, step, chosen)
    except InputError as refused:
        return {"refused": refused.one_line}
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return {
        "plan": found.plan,
        "first_plan": chosen.forecast.plan,
        "size": batches.layout.micro_batch_size,
        "reduces_once": found.reduces_once,
        "predicted_bytes": found.predicted_peak_bytes,
        "readings": readings,
        "units": units,
        "gradients": len(gradients),
        "said": said,
    }


@pytest.fixture(scope="module")
def by_size():
    """The bytes that a rank of two needs under no plan, and under ``full``, by micro-batch."""

    choices = {
        strategy: choose_for_target(task_of(GIB, strategy), Launch(target=find_target("cpu"), num_processes=2), GIB)
        for strategy in ("none", "full")
    }

    def needs(strategy, *, once):
        found = choices[strategy].candidates
        return {one.layout.micro_batch_size: one.needed_bytes for one in found if one.reduces_once == once}

    return {**{strategy: needs(strategy, once=False) for strategy in choices}, "once": needs("none", once=True)}


@pytest.mark.slow
def test_all_ranks_have_the_plan_of_the_first(run_on_ranks, by_size):
    budget = (by_size["none"][4] + by_size["full"][4]) // 2
    ranks = run_on_ranks(partial(planned, budget_bytes=budget), 2)
    assert ranks[0]["plan"] == ranks[1]["plan"] == ranks[0]["first_plan"]
    assert {one["size"] for one in ranks} == {4}
    assert ranks[0]["plan"].strategy != "none"
    assert ranks[0]["units"] >= 3
    for one in ranks:
        ((predicted, measured),) = one["readings"]
        assert measured <= budget
        assert measured == pytest.approx(predicted, rel=0.05)
        assert one["gradients"] == 0


@pytest.mark.slow
def test_a_trial_step_has_the_gradients_of_earlier_micro_batches(run_on_ranks, by_size):
    budget = by_size["none"][1]
    for one in run_on_ranks(partial(planned, budget_bytes=budget, size=1), 2):
        ((predicted, measured),) = one["readings"]
        assert measured <= budget
        assert measured == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_gradients_are_reduced_once_a_step_where_that_fits_and_is_faster(run_on_ranks, by_size, size):
    assert by_size["once"].keys() == {1, 2}  # nothing accumulates with 4
    budget = by_size["once"][size]
    assert budget > by_size["none"][size]
    for one in run_on_ranks(partial(planned, budget_bytes=budget, size=size, once=0.5), 2):
        ((predicted, measured),) = one["readings"]
        assert one["reduces_once"]
        assert measured <= budget
        assert measured == pytest.approx(predicted, rel=0.05)
        assert one["gradients"] == 0


@pytest.mark.slow
def test_gradients_are_reduced_for_every_micro_batch_where_whole_ones_do_not_fit(run_on_ranks, by_size):
    flags = {"strategy": "none", "size": "auto", "once": 0.5}
    budget = (by_size["none"][1] + min(by_size["once"][1], by_size["none"][2])) // 2
    for one in run_on_ranks(partial(planned, budget_bytes=budget, **flags), 2):
        assert (one["size"], one["reduces_once"]) == (1, False)


@pytest.mark.slow
def test_a_step_that_takes_more_reduces_every_micro_batch_before_it_is_halved(run_on_ranks, by_size):
    faster = partial(planned, budget_bytes=by_size["once"][2], size=2, once=0.5)
    for one in run_on_ranks(partial(faster, once_is_too_large=True), 2):
        assert (one["size"], one["reduces_once"]) == (2, False)
        assert one["readings"][1][0] < one["readings"][0][0]
        assert one["plan"] == one["first_plan"]
        (line,) = (line for line in one["said"] if "the prediction of" in line)
        assert line.endswith(", so gradients are reduced after every micro-batch")


@pytest.mark.slow
def test_a_step_that_takes_more_is_halved_under_the_same_plan(run_on_ranks, by_size):
    budget = (by_size["none"][4] + by_size["full"][4]) // 2
    ranks = run_on_ranks(partial(planned, budget_bytes=budget, too_large=4), 2)
    assert {one["size"] for one in ranks} == {2}
    assert ranks[0]["plan"] == ranks[1]["plan"] == ranks[0]["first_plan"]
    (line,) = (line for line in ranks[0]["said"] if "falling back" in line)
    assert "falling back to micro-batches of 2 under the same plan" in line
    assert ranks[0]["predicted_bytes"] < budget


def test_a_step_that_can_never_fit_is_refused_on_all_ranks(run_on_ranks, by_size):
    for one in run_on_ranks(partial(planned, budget_bytes=by_size["none"][1], too_large=1, size=1), 2):
        assert "and the micro-batch cannot be halved: raise --memory_budget_gib above" in one["refused"]


@pytest.mark.slow
def test_a_budget_without_a_plan_is_refused_on_all_ranks(run_on_ranks):
    for one in run_on_ranks(partial(planned, budget_bytes=1000), 2):
        assert "is too small for any plan: the smallest that works is" in one["refused"]


def test_a_model_that_cannot_be_estimated_is_one_line(run_on_ranks):
    for one in run_on_ranks(planned_without_estimates, 2):
        assert one["refused"] == (
            "--shard full: the step of this model cannot be estimated (KeyError), by which its plan is found: name a "
            "plan and a --micro_batch_size"
        )


def planned_without_estimates(accelerator):
    def fails(*args, **options):
        raise KeyError("no fake kernel")

    run_plan.choose_for_target = fails
    return planned(accelerator, budget_bytes=GIB)


def test_another_way_to_shard_searches_again(tmp_path):
    run = task_of(GIB).run
    search = {name: getattr(run, name) for name in ("micro_batch_size", "activation_checkpointing")}
    earlier = {
        **search,
        "memory_budget_gib": run.memory_budget_gib,
        "shard": "full",
        "geometry": {"micro_batch_size": 2, "num_processes": 4},
    }
    previous = partial(with_previous_plan, run, plan=tmp_path / "plan.json")
    again = previous(earlier, num_processes=4)
    assert (again.micro_batch_size, again.activation_checkpointing) == (2, str(tmp_path / "plan.json"))
    assert again.reduces_once is False  # as an earlier version did
    for entry in ({"reduces_once": True}, {"reduce_gradients": "step"}):  # a flag of earlier versions
        once = previous({**earlier, **entry}, num_processes=4)
        assert (once.micro_batch_size, once.reduces_once) == (2, True)
    assert previous({**earlier, "shard": "2"}, num_processes=4) is run
    assert previous(earlier, num_processes=2) is run
