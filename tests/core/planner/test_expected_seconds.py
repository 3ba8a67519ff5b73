"""What ``memsave plan`` says of speed: beside two runs that were measured, and beside what a run counts."""

from pathlib import Path

import pytest
import torch
from torch import nn

from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.costs.throughput import ModelFlops
from memsave_recipes.core.planner.budget import static_memory_of
from memsave_recipes.core.planner.task import Estimates, Launch, Task, choose_for_target
from memsave_recipes.core.plans.chain import CUDA
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.core.text import GIB
from memsave_recipes.tools.fit.frontier import speed_of
from memsave_recipes.tools.fit.recipe_task import read_task
from memsave_recipes.training.arguments import OptimizerArguments, RunArguments

RECIPES = Path(__file__).parents[3] / "recipes"
ROWS = "--block_size 1024 --activation_checkpointing none --loss full"
GPT2 = f"--model_type gpt2 --global_batch_size 64 --micro_batch_size 16 {ROWS}"
LLAMA = (
    "--model_type llama --config_overrides hidden_size=1024,intermediate_size=4096,num_hidden_layers=12,"
    f"num_attention_heads=16,num_key_value_heads=16 --global_batch_size 32 --micro_batch_size 8 {ROWS}"
)
WORDS = "--model_type gpt2 --config_overrides vocab_size=50257 --block_size 1024 --global_batch_size 64"
WORDS += " --micro_batch_size 16 --activation_checkpointing budget --loss chunked:8192"
LLAMA_1B = (
    "--model_type llama --config_overrides hidden_size=2048,intermediate_size=8192,num_hidden_layers=16,"
    "num_attention_heads=32,num_key_value_heads=8,vocab_size=128256,tie_word_embeddings=true --block_size 2048"
    " --global_batch_size 64 --micro_batch_size 4 --activation_checkpointing budget --loss chunked:1024"
)


def planned(flags, card, recipe="language_modeling", precision="bf16", gib=80):
    task = read_task(RECIPES / f"{recipe}.py", flags.split())
    launch = Launch(target=find_target(card), mixed_precision=precision)
    chosen = choose_for_target(task, launch, int(gib * GIB)).chosen
    assert chosen is not None
    return chosen, speed_of(task, launch, chosen)


@pytest.mark.parametrize(
    ("flags", "card", "bound_ms", "expected_ms", "measured_ms", "most_off"),
    [
        pytest.param(GPT2, "h100", 224, 317, 316.2, 0.01, id="README's launch, to which a rate was fitted"),
        pytest.param(LLAMA, "h200", 117, 172, 190, 0.1, id="the kernels of another run"),
    ],
)
def test_a_measured_step_is_expected_as_the_page_says(flags, card, bound_ms, expected_ms, measured_ms, most_off):
    """Their operators were not fused."""
    candidate, speed = planned(f"{flags} --fused_ops none", card)
    assert 1000 * candidate.step_s == pytest.approx(expected_ms, abs=0.5)
    assert 1000 * speed.bound_s == pytest.approx(bound_ms, abs=0.5)
    assert candidate.step_s == pytest.approx(measured_ms / 1000, rel=most_off)
    page = " ".join((RECIPES.parent / "docs/design/predictions.md").read_text(encoding="utf-8").split())
    assert f"| {bound_ms} ms | {expected_ms} ms | {measured_ms} ms |" in page


def test_the_same_launch_with_fused_operators():
    candidate, speed = planned(GPT2, "h100")
    assert 1000 * candidate.step_s == pytest.approx(142, abs=0.5)
    assert 1000 * speed.bound_s == pytest.approx(91, abs=0.5)
    assert candidate.peak_bytes < 8.5 * GIB


@pytest.mark.compiles_ahead
def test_the_same_launch_with_compiled_layers():
    candidate, speed = planned(GPT2.replace("full", "chunked:8192"), "h100")
    assert candidate.forecast.plan.compiled
    assert 1000 * candidate.step_s == pytest.approx(126, abs=0.5)
    assert 1000 * speed.bound_s == pytest.approx(79, abs=0.5)
    assert candidate.peak_bytes < 8.5 * GIB


@pytest.mark.slow
@pytest.mark.compiles_ahead
@pytest.mark.parametrize(
    ("flags", "card", "gib", "least_pct"),
    [
        pytest.param(WORDS, "h100", 80, 36, id="GPT-2 on an H100"),
        pytest.param(WORDS, "rtx4090", 22.8, 36, id="GPT-2 on a 4090"),
        pytest.param(LLAMA_1B, "h100", 76, 45, id="Llama on an H100"),
        pytest.param(LLAMA_1B, "rtx4090", 22.8, 45, id="Llama on a 4090"),
    ],
)
def test_a_budget_of_the_whole_card_reaches_a_share_of_its_peak(flags, card, gib, least_pct):
    candidate, speed = planned(f"{flags} --memory_budget_gib {gib}", card, gib=gib)
    assert candidate.forecast.plan.compiled
    assert speed.mfu_pct >= least_pct
    half_gib = (candidate.needed_bytes - candidate.parts["activations"] / 2) / GIB
    half, speed_of_half = planned(f"{flags} --memory_budget_gib {half_gib}", card, gib=half_gib)
    assert half.needed_bytes <= half_gib * GIB
    assert speed_of_half.mfu_pct >= 0.93 * speed.mfu_pct


def test_the_share_of_the_peak_is_what_the_measured_run_had():
    _, speed = planned(f"{GPT2} --fused_ops none", "h100")
    assert speed.mfu_pct == pytest.approx(13.7, abs=0.15)
    assert speed.tokens_per_s == pytest.approx(207_016, rel=0.01)


@pytest.mark.slow
def test_images_have_no_tokens_and_convolutions_round_to_tf32():
    flags = "--model densenet121 --image_size 64 --global_batch_size 64 --micro_batch_size 64"
    candidate, speed = planned(f"{flags} --activation_checkpointing none", "h100", "image_classification", "no")
    assert speed.tokens_per_s is None
    flops = 3 * 2 * 2.83e9 * (64 / 224) ** 2 * candidate.samples_per_s  # of DenseNet-121's paper, in TF32
    assert speed.mfu_pct == pytest.approx(100 * flops / 494.5e12, rel=0.1)


class Rows(nn.Module):
    """An embedding, attention and a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(32, 16), nn.ModuleList(), nn.Linear(16, 32)
        self.layers.extend(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def task_of(*flags):
    return Task(
        run=RunArguments(output_dir="x", global_batch_size=8, micro_batch_size=4, activation_checkpointing="none"),
        optim=OptimizerArguments(**dict(flags)),
        build_model=lambda **_: Rows(),
        loss_of=lambda model, batch: model(batch["input_ids"]).square().sum(),
        micro_batch=lambda size: {"input_ids": torch.zeros(size, 64, dtype=torch.long, device="meta")},
    )


def test_fake_tensors_count_the_flops_of_a_run():
    estimates = Estimates(task_of(), Launch(target=find_target("cpu")))
    with ModelFlops() as counted:
        Rows()(torch.zeros(4, 64, dtype=torch.long)).square().sum().backward()
    assert estimates.model_flops(BatchLayout.of(8, 4, 1), None) == counted.by_precision
    assert counted.total > 0


def test_no_share_of_a_peak_that_is_not_known():
    launch = Launch(target=find_target("cpu"))
    (candidate,) = choose_for_target(task_of(), launch, GIB).candidates
    speed = speed_of(task_of(), launch, candidate)
    assert (speed.mfu_pct, speed.bound_s) == (None, candidate.step_s)
    assert speed.tokens_per_s == 64 * candidate.samples_per_s


@pytest.mark.parametrize(
    ("optimizer", "touched"),
    [({"optimizer": "adamw"}, 40), ({"optimizer": "sgd"}, 32), ({"optimizer": "adamw_8bit"}, 28)],
)
def test_an_update_touches_weights_gradients_and_state(optimizer, touched):
    """Four bytes a parameter: read and written each, gradients once, and three times before for clipping."""
    model = nn.Linear(1024, 1024, bias=False)
    optim = OptimizerArguments(**optimizer)
    static = static_memory_of(optim, model, BatchLayout.of(8, 4, 1), device=CUDA)
    parameters = 1024 * 1024
    assert static.device_updated_bytes == pytest.approx(touched * parameters, rel=0.01)
    assert static.adding_bytes == 12 * parameters
    on_host = OptimizerArguments(optimizer="adamw", offload_optimizer="step")
    assert static_memory_of(on_host, model, BatchLayout.of(8, 4, 1), device=CUDA).device_updated_bytes == 0
    halves = static_memory_of(optim, model, BatchLayout.of(8, 4, 2), device=CUDA, num_shards=2)
    assert halves.device_updated_bytes == pytest.approx(static.device_updated_bytes / 2, rel=0.01)
