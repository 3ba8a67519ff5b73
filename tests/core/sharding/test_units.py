"""Which weights are gathered together, and what is refused."""

import pytest
import torch
from small_runs import build_model
from torch import nn

from memsave_recipes.core.activations import find_stacks, plan_blocks
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans.chain import CPU, CUDA
from memsave_recipes.core.sharding import ShardGroups, shard
from memsave_recipes.core.sharding.units import joint_blocks, sharded_units, units_of


def names_of_units(model, strategy="none"):
    names = {module: name for name, module in model.named_modules()}
    return [
        [names[module] for module in unit.modules] for unit in units_of(model, plan_blocks(model, strategy), "full")
    ]


def test_layers_embedding_and_the_norm_with_the_head():
    layers = [[f"model.layers.{number}"] for number in range(4)]
    assert names_of_units(build_model("llama")) == [*layers, ["model.embed_tokens"], ["model.norm", "lm_head"]]


def test_a_tied_embedding_is_gathered_with_the_head():
    tail = ["transformer.wte", "transformer.ln_f", "lm_head"]
    assert names_of_units(build_model("gpt2"))[-2:] == [["transformer.wpe"], tail]
    assert units_of(build_model("gpt2"), plan_blocks(build_model("gpt2"), "none"), "full")[-1].stays


def test_layers_that_recompute_together_are_one_unit():
    model = build_model("llama")
    assert names_of_units(model, "segments:2")[:3] == [
        ["model.layers.0", "model.layers.1"],
        ["model.layers.2"],
        ["model.layers.3"],
    ]
    assert joint_blocks(plan_blocks(model, "segments:2")) == [("model.layers.0", "model.layers.1")]


def test_a_device_gives_each_gathered_weight_whole_blocks():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))  # 5 rows are 3 each of 2 ranks
    (first, second), (on_cpu, _) = (
        sharded_units(model, plan_blocks(model, "none"), 2, "full", device) for device in (CUDA, CPU)
    )
    assert (first.gathered_bytes, first.rounding_bytes) == (4 * (6 * 3 + 6), 2 * 512 - 96)
    assert (second.gathered_bytes, second.rounding_bytes) == (4 * (4 * 5 + 4), 2 * 512 - 96)
    assert on_cpu.rounding_bytes == 0


def test_blocks_of_a_sequence_stay_units_under_any_plan():
    model = build_model("vgg")
    assert names_of_units(model) == names_of_units(model, "segments:2")
    assert len(names_of_units(model)) > 3


@pytest.mark.parametrize("strategy", ["offload", "full_offload", "full_tiled:8", "full_tiled_offload:8"])
def test_a_layer_that_runs_in_parts_stays_a_unit(strategy):
    model = build_model("llama")
    assert names_of_units(model, strategy) == names_of_units(model)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(InputError, match=r"shard full: Linear has 0 blocks with weights, so whole weights"):
        units_of(nn.Linear(2, 2), plan_blocks(nn.Linear(2, 2), "none"), "full")


def test_a_weight_in_two_layers_is_refused():
    model = build_model("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.up_proj\.weight and .*layers\.1\.mlp.* are one weight"):
        names_of_units(model)


def test_a_weight_in_a_layer_and_outside_is_refused():
    model = build_model("vit")
    layer = find_stacks(model)[0].blocks[0].module
    model.classifier.weight = next(parameter for parameter in layer.parameters() if parameter.ndim == 2)
    with pytest.raises(InputError, match="are one weight"):
        names_of_units(model)


def test_masters_are_refused_for_weights_of_two_dtypes():
    """As of adapters in float32 on a model in bfloat16; and whatever is refused is as it was."""
    model = build_model("llama").bfloat16()
    model.model.norm.float()
    groups = ShardGroups.of("full", 2)
    with pytest.raises(InputError, match=r"of one dtype, and these have torch\.bfloat16 and torch\.float32"):
        shard(model, model, plan_blocks(model, "none"), groups, torch.device("cpu"), with_masters=True)
    assert model.lm_head.weight.dtype == torch.bfloat16
