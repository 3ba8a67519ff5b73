"""Works that are measured for the results table: a recipe with a small matrix of plans.

Each plan is one launch of the recipe into out/results/WORK/PLAN; a plan that has finished is not run again.
"""

import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import harness
from harness import ROOT


@dataclass(frozen=True)
class Work:
    """A recipe with the flags that all of its runs share, and those of each plan by its name."""

    recipe: str
    flags: str
    plans: dict[str, str] = field(default_factory=dict)


PLANS = {"plain": "--activation_checkpointing none", "full": "--activation_checkpointing full"}
WORKS = {
    "gpt2": Work(
        "language_modeling",
        "--model_type gpt2 --config_overrides n_layer=6,n_head=4,n_embd=128,vocab_size=1024 --block_size 256 "
        "--global_batch_size 8 --micro_batch_size 8 --max_steps 20 --logging_steps 5",
        {**PLANS, "budget": "--activation_checkpointing budget:bitwise --memory_budget_gib 0.09"},
    ),
    "llama": Work(
        "language_modeling",
        "--model_type llama --block_size 512 --global_batch_size 8 --micro_batch_size 4 "
        "--config_overrides hidden_size=128,intermediate_size=512,num_hidden_layers=6,num_attention_heads=4,"
        "vocab_size=1024 "
        "--max_steps 20 --logging_steps 5",
        {
            **PLANS,
            "full_tiled": "--activation_checkpointing full_tiled",
            "budget": "--activation_checkpointing budget:bitwise --memory_budget_gib 0.09",
        },
    ),
    "vit": Work(
        "image_classification",
        "--model_type vit --config_overrides hidden_size=128,num_hidden_layers=6,num_attention_heads=4,"
        "intermediate_size=512,patch_size=4 --dataset digits --global_batch_size 32 --max_steps 20 --logging_steps 5",
        {
            **PLANS,
            "budget": "--activation_checkpointing budget:bitwise --memory_budget_gib 0.07",
        },
    ),
    "vgg_small_bn": Work(
        "image_classification",
        "--model vgg_small_bn --dataset digits --global_batch_size 64 --max_steps 20 --logging_steps 5",
        {
            **PLANS,
            "segments": "--activation_checkpointing segments:4",
            "budget": "--activation_checkpointing budget:bitwise --memory_budget_gib 0.05",
        },
    ),
    "densenet": Work(
        "image_classification",
        "--config recipes/configs/demo.yaml",
        {
            **PLANS,
            "bottleneck": "--activation_checkpointing bottleneck",
            "budget": "--activation_checkpointing budget --memory_budget_gib 0.025",
        },
    ),
    "chats": Work(
        "language_modeling",
        "--dataset docstring-chats --model_type gpt2 --config_overrides n_layer=4,n_head=4,n_embd=128,"
        "vocab_size=2048 --block_size 256 --global_batch_size 16 --micro_batch_size 8 --learning_rate 2e-3 "
        "--warmup_steps 20 --max_steps 100 --activation_checkpointing none",
        {f"seed-{seed}": f"--seed {seed}" for seed in range(3)},
    ),
}


def command_of(work: Work, plan: str, folder: Path) -> list[str]:
    """The launch of one run."""
    flags = [*shlex.split(work.flags), *shlex.split(work.plans[plan])]
    return harness.launch_command(work.recipe, *flags, "--report_to", "none", "--overwrite", "--output_dir", folder)


def measure(work: str) -> Path:
    """Train with those plans of a work that have not finished yet; returns the folder of its runs."""
    runs = ROOT / "out/results" / work
    for plan in WORKS[work].plans:
        if not (runs / plan / "results.json").is_file():
            subprocess.run(command_of(WORKS[work], plan, runs / plan), check=True, cwd=ROOT)
    return runs
