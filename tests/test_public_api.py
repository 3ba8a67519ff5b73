"""What ``import memsave_recipes as memsave`` gives to a script of one's own, and how its errors speak."""

import ast
import json
import logging
import pkgutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import memsave_recipes as memsave
from memsave_recipes.core.step.settings import OptimizerSettings, StepSettings

HEAVY = ("torch", "numpy", "transformers", "accelerate", "datasets", "rich", "yaml")


def modules_after(statements):
    """The top-level modules that a fresh process has loaded, of ``HEAVY`` and our own."""
    script = f"{statements}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_every_name_is_there_and_typed():
    tree = ast.parse(Path(memsave.__file__).read_text(encoding="utf-8"))
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    seen_by_types = {alias.name: node.module for node in typed.body for alias in node.names}
    assert sorted(seen_by_types) == memsave.__all__
    for name, module in seen_by_types.items():
        assert getattr(memsave, name) is getattr(sys.modules[module], name)
    assert set(memsave.__all__) <= set(dir(memsave))
    assert Path(memsave.__file__).with_name("py.typed").exists()
    with pytest.raises(AttributeError, match="has no attribute 'make_plans'"):
        memsave.make_plans  # noqa: B018


def test_no_package_hides_a_public_name():
    ours = {module.name for module in pkgutil.iter_modules(memsave.__path__)}
    assert not ours & set(memsave.__all__)


@pytest.mark.parametrize(
    ("statements", "may_load"),
    [
        ("import memsave_recipes", ()),
        ("from memsave_recipes import Plan, InputError\nPlan.from_json", ()),
        ("from memsave_recipes.tools.cli import main\ntry: main(['plan', '--help'])\nexcept SystemExit: pass", ()),
        ("from memsave_recipes import linear_cross_entropy, apply_plan", ("torch", "numpy")),
    ],
    ids=["package", "plans", "help", "activations"],
)
def test_light_parts_load_little(statements, may_load):
    assert not set(HEAVY) - set(may_load) & set(modules_after(statements))


def model_of(num_blocks=6, width=64):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_blocks)))


BATCH = torch.ones(512, 64)


@pytest.mark.parametrize(
    ("call", "message", "line"),
    [
        (
            lambda: memsave.make_plan(model_of(), strategy="segment:2"),
            "strategy segment:2: no such strategy; choose none, full, ",
            "--activation_checkpointing segment:2: no such strategy; ",
        ),
        (
            lambda: memsave.make_plan(model_of(), strategy="segments:9"),
            "strategy segments:9: K in segments:K is a whole number from 1 to 6, the blocks of this model",
            "--activation_checkpointing segments:9: K in ",
        ),
        (
            lambda: memsave.make_plan(model_of(), strategy="compiled:2"),
            "strategy compiled:2: RATIO in compiled:RATIO is a number from 0 to 1",
            "--activation_checkpointing compiled:2: RATIO in ",
        ),
        (
            lambda: memsave.make_plan(nn.Linear(2, 2), strategy="full"),
            "strategy full: Linear has no blocks for it; use none",
            "--activation_checkpointing full: Linear has no blocks",
        ),
        (
            lambda: memsave.make_plan(model_of(), strategy="away/plan.json"),
            "strategy away/plan.json is not a file: check the path",
            "--activation_checkpointing away/plan.json is not a file",
        ),
        (
            lambda: memsave.make_plan(model_of(), BATCH, strategy="budget"),
            "strategy budget: needs a batch and budget_gib",
            "--activation_checkpointing budget: needs ",
        ),
        (
            lambda: memsave.make_plan(nn.Linear(64, 2), BATCH, strategy="budget:bitwise", budget_gib=1),
            "strategy budget:bitwise: Linear has no blocks for it; use none",
            "--activation_checkpointing budget:bitwise: Linear has no blocks",
        ),
        (
            lambda: memsave.make_plan(model_of(), BATCH, strategy="budget:bitwise", budget_gib=2**-13),
            "budget_gib 0.00012207 is too small for any plan: the smallest that works is ",
            "--memory_budget_gib 0.00012207 is too small for any plan",
        ),
        (
            lambda: memsave.estimate(task(), target="tpu"),
            "target tpu: no figures of such a device",
            "--target tpu: no ",
        ),
        (
            lambda: memsave.estimate(task(), target="h100", mixed_precision="int8"),
            "mixed_precision int8: choose one of no, bf16, fp16",
            "mixed_precision int8: ",
        ),
        (
            lambda: memsave.estimate(task(), target="h100", budget_gib=0),
            "budget_gib 0: it must be above 0",
            "--memory_budget_gib 0: ",
        ),
        (
            lambda: memsave.estimate(task(), target="h100", num_processes=0),
            "num_processes 0: it must be at least 1",
            "num_processes 0",
        ),
    ],
)
def test_errors_name_the_argument_and_for_recipes_the_flag(call, message, line):
    with pytest.raises(memsave.InputError) as refusal:
        call()
    assert str(refusal.value).startswith(message)
    assert "--" not in str(refusal.value)
    assert refusal.value.one_line.startswith(line)


def test_a_plan_for_other_blocks_is_refused():
    plan = memsave.make_plan(model_of(3), strategy="full")
    with pytest.raises(memsave.InputError, match="the plan full was made for other blocks"):
        memsave.apply_plan(model_of(2), plan)


def test_a_plan_is_applied_for_a_while_and_proven():
    model = model_of().train()
    plan = memsave.make_plan(model, strategy="segments:3")

    def step():
        loss = model(BATCH).square().mean()
        loss.backward()
        return loss.detach()

    with memsave.apply_plan(model, plan) as handle:
        assert "forward" in vars(model)
        assert memsave.verify(model, handle, step).status == "identical"
    assert "forward" not in vars(model)
    verdict = memsave.verify(model, plan, step)
    assert (verdict.status, verdict.passed) == ("identical", True)
    assert "forward" not in vars(model)


FLAGS = {"output_dir": "out", "global_batch_size": 4096}


def task(run=None, optim=None, **flags):
    def micro_batch(size):
        labels = torch.empty(size, dtype=torch.int64, device="meta")
        return {"features": torch.empty(size, 64, device="meta"), "labels": labels}

    return memsave.Task(
        run=run or memsave.RunArguments(**FLAGS, **flags),
        optim=optim or memsave.OptimizerArguments(),
        build_model=model_of,
        loss_of=lambda model, batch: cross_entropy(model(batch["features"]), batch["labels"], reduction="sum"),
        micro_batch=micro_batch,
    )


def test_an_estimate_compares_what_the_task_leaves_open():
    open_task = task(micro_batch_size="auto", activation_checkpointing="budget")
    choice = memsave.estimate(open_task, target="h100", budget_gib=78, num_processes=2, mixed_precision="bf16")
    assert choice.chosen is not None
    assert choice.chosen.needed_bytes <= 78 * 2**30
    assert {candidate.strategy for candidate in choice.candidates} >= {"none", "full"}
    assert len({candidate.layout.micro_batch_size for candidate in choice.candidates}) > 1
    (named,) = memsave.estimate(task(micro_batch_size=256), target="h100").candidates
    assert (named.strategy, named.layout.micro_batch_size) == ("none", 256)
    assert memsave.estimate(task(micro_batch_size=256), target="h100", budget_gib=1e-3).chosen is None


@dataclass(frozen=True)
class Step(StepSettings):
    global_batch_size: int = 4096
    micro_batch_size: int | str | None = "auto"
    shard: str | None = None
    activation_checkpointing: str | None = "budget"
    memory_budget_gib: float | None = None
    logging_steps: int = 10


@dataclass(frozen=True)
class Muon(OptimizerSettings):
    optimizer: str = "muon"
    optimizer_in_backward: bool = False
    weight_decay: float = 0.0
    momentum: float = 0.0


def test_an_estimate_takes_values_that_are_no_flags():
    flags = {"micro_batch_size": "auto", "activation_checkpointing": "budget"}
    tasks = task(Step(), Muon()), task(optim=memsave.OptimizerArguments(optimizer="muon"), **flags)
    found, expected = (memsave.estimate(one, target="h100", budget_gib=0.02).candidates for one in tasks)
    assert [(one.strategy, one.parts, one.step_s) for one in found] == [
        (one.strategy, one.parts, one.step_s) for one in expected
    ]


def test_bitsandbytes_does_not_tell_of_kernels_for_4_bits():
    assert logging.getLogger("bitsandbytes.backends.cpu.ops").level == logging.ERROR
