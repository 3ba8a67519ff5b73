"""The bytes that each saving frees, by hand, and which ones a run is offered."""

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.core.step.memory import state_bytes
from memsave_recipes.models.adapters import added_by_lora
from memsave_recipes.models.what_trains import ClassifierTrainingArguments, train_part
from memsave_recipes.tools.fit.savings import SAME_CURVE, Setup, savings_of
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.exact.batch_layouts import IndexedLayout
from memsave_recipes.training.optimizers import make_optimizer
from tests.decoders import causal_model, layers_of

WEIGHT = 64 * 128  # numbers
IMAGE_FLAGS = {"activation_checkpointing": "none", "optimizer": "adamw", "momentum": 0.9, "dtype": "float32"}
TEXT_FLAGS = {**IMAGE_FLAGS, "optimizer_in_backward": False, "lora": False, "lora_rank": 2, "loss": "auto"}


def model():
    return nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))


def freed(flags, *, network=None, micro=8, accumulation=1, ranks=1, mixed_precision="no", **figures):
    """Bytes by the flags that free them."""
    layout = BatchLayout(global_batch_size=micro * accumulation * ranks, micro_batch_size=micro, num_processes=ranks)
    found = savings_of(
        Setup(
            flags=flags,
            layout=layout,
            model=network or model(),
            mixed_precision=mixed_precision,
            **{"activations_bytes": 1000, "freed_by_recomputation_bytes": 600, **figures},
        )
    )
    return {saving.flags: saving.freed_bytes for saving in found}


def test_an_image_recipe():
    parameters = 2 * 4 * WEIGHT
    assert freed(IMAGE_FLAGS) == {
        "--micro_batch_size 2": 750,
        "--activation_checkpointing full": 600,
        "--micro_batch_size 4": 500,
        "--dtype bfloat16": 2 * parameters,  # half of parameters, gradients and twice that for AdamW
        "--optimizer adamw_8bit": 2 * 8 * WEIGHT - 2 * 2 * (WEIGHT + 4 * WEIGHT // 256),
        "--optimizer adafactor": 2 * (8 * WEIGHT - 4 * (64 + 128)),
        "--optimizer muon": 4 * WEIGHT,  # the last layer is the head, which AdamW steps
        "accelerate launch --mixed_precision bf16": None,
    }


def test_optimizer_state_waits_on_the_host():
    flags = {**TEXT_FLAGS, "offload_optimizer": "none"}
    assert "--offload_optimizer state" not in freed(flags)  # on a CPU
    assert freed(flags, device_type="cuda")["--offload_optimizer state"] == 2 * 2 * 4 * WEIGHT
    there = freed({**flags, "offload_optimizer": "state"}, device_type="cuda")
    assert not there.keys() & {"--offload_optimizer state", "--optimizer adamw_8bit"}  # none of it is on the device


def test_frozen_weights_of_layers_wait_on_the_host():
    network = causal_model("llama")
    flags = {**TEXT_FLAGS, "lora": True, "stream_weights": "none"}
    assert "--stream_weights host" not in freed(flags, network=network, device_type="cuda")  # none is frozen
    for parameter in network.model.parameters():
        parameter.requires_grad_(False)
    of_layer = sum(parameter.nbytes for parameter in layers_of(network)[0].parameters())
    assert freed(flags, network=network, device_type="cuda")["--stream_weights host"] == of_layer  # of three
    assert "--stream_weights host" not in freed(flags, network=network)
    assert "--stream_weights host" not in freed(flags | {"stream_weights": "host"}, network=network, device_type="cuda")


def test_the_same_curve_comes_first():
    found = list(freed(TEXT_FLAGS))
    assert found[:3] == ["--micro_batch_size 2", "--activation_checkpointing full", "--micro_batch_size 4"]


def test_adapters_take_the_place_of_gradients_and_state():
    adapters = 2 * 2 * (64 + 128)  # numbers: rank 2, two layers
    assert freed(TEXT_FLAGS)["--lora"] == 2 * 12 * WEIGHT - 16 * adapters
    assert "--lora" not in freed({**TEXT_FLAGS, "lora": True})


def test_adapters_of_a_classifier_leave_its_head_in_training():
    """By hand: a head of 2 labels is copied; the four matrices of attention and the two of the MLP have adapters."""
    head, matrices = 2 * 16 + 2, [(16, 16)] * 4 + [(16, 24), (24, 16)]
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    network = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes))
    weights = sum(parameter.numel() for parameter in network.parameters())
    added = head + 2 * sum(map(sum, matrices))
    found = freed({**TEXT_FLAGS, "freeze_backbone": False}, network=network)
    assert found["--lora"] == 3 * 4 * (weights - added) - 4 * added
    assert "--lora" not in freed({**TEXT_FLAGS, "freeze_backbone": False})  # of a network of ours


def test_adapters_of_convolutions_are_counted_where_there_are_no_linear_layers():
    sizes = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}
    network = ResNetForImageClassification(ResNetConfig(**sizes))
    added = added_by_lora(network, 2, is_classifier=True)
    flags = ClassifierTrainingArguments(lora=True, lora_rank=2)
    trained = [one for one in train_part(network, flags, task_type=None).parameters() if one.requires_grad]
    assert sorted(one.numel() for one in added) == sorted(one.numel() for one in trained)


def test_an_optimizer_in_the_backward_leaves_one_gradient():
    flags = "--optimizer_in_backward --max_grad_norm 0"
    assert freed(TEXT_FLAGS)[flags] == 4 * WEIGHT
    assert flags not in freed(TEXT_FLAGS, accumulation=2)
    assert flags not in freed(TEXT_FLAGS, ranks=2)
    assert flags not in freed(TEXT_FLAGS, mixed_precision="fp16")
    already = freed({**TEXT_FLAGS, "optimizer_in_backward": True})
    assert flags not in already
    assert not any("micro_batch" in flags for flags in already)  # it cannot accumulate


def test_a_convnet_steps_in_the_backward_too():
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 4))
    found = freed({**IMAGE_FLAGS, "optimizer_in_backward": False}, network=network)
    sizes = [parameter.nbytes for parameter in network.parameters()]
    assert found["--optimizer_in_backward --max_grad_norm 0"] == sum(sizes) - max(sizes)


def test_flags_that_need_all_gradients_are_respected():
    flags = "--optimizer_in_backward --max_grad_norm 0"
    layout = IndexedLayout(global_batch_size=8, micro_batch_size=8, num_processes=1)
    assert flags not in {saving.flags for saving in savings_of(Setup(flags=TEXT_FLAGS, layout=layout, model=model()))}


def test_half_precision_is_offered_with_stochastic_rounding():
    flags = {**IMAGE_FLAGS, "bf16_stochastic_round": False}
    assert "--dtype bfloat16 --bf16_stochastic_round" in freed(flags)
    assert "--dtype bfloat16" in freed({**flags, "optimizer": "sgd"})


def test_the_full_loss_holds_the_logits_twice():
    network = model()
    network.config = type("Config", (), {"vocab_size": 1000})
    found = freed({**TEXT_FLAGS, "loss": "full", "block_size": 16}, network=nn.Sequential(network))
    assert found["--loss auto"] == 2 * 8 * 16 * 1000 * 4
    assert "--loss auto" not in freed(TEXT_FLAGS, network=nn.Sequential(network))


def test_frozen_weights_have_nothing_to_free():
    network = model().requires_grad_(False)
    found = freed(TEXT_FLAGS, network=network)
    assert found["--dtype bfloat16"] == 4 * WEIGHT
    assert not any("optimizer" in flags or "lora" in flags for flags in found)


def test_what_cannot_be_known_has_no_figure():
    found = freed(IMAGE_FLAGS, activations_bytes=None, freed_by_recomputation_bytes=None)
    assert found["--micro_batch_size 4"] is None
    assert found["--activation_checkpointing full"] is None


def test_what_frees_nothing_is_not_offered():
    assert "--activation_checkpointing full" not in freed(IMAGE_FLAGS, freed_by_recomputation_bytes=0)
    assert not any("micro_batch" in flags for flags in freed(IMAGE_FLAGS, micro=1))
    assert list(freed({**IMAGE_FLAGS, "activation_checkpointing": "segments:2"}))[:2] == [
        "--micro_batch_size 2",
        "--micro_batch_size 4",
    ]


def test_batchnorm_sees_fewer_samples():
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    layout = BatchLayout(global_batch_size=8, micro_batch_size=8, num_processes=1)
    setup = Setup(
        flags={},
        layout=layout,
        model=network,
        mixed_precision="no",
        activations_bytes=8,
        freed_by_recomputation_bytes=None,
    )
    assert {saving.curve for saving in savings_of(setup)} == {"BatchNorm sees fewer samples"}
    network[1] = nn.LayerNorm(4)
    assert {saving.curve for saving in savings_of(setup)} == {SAME_CURVE}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd"])
def test_the_state_is_what_the_optimizer_makes(name, dtype):
    network = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64 * 36, 128)).to(dtype)
    optimizer = make_optimizer(OptimizerArguments(optimizer=name), network)
    network(torch.randn(2, 3, 8, 8, dtype=dtype)).sum().backward()
    optimizer.step()
    tensors = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    expected = sum(tensor.nbytes for tensor in tensors if tensor.ndim)  # not the counters of steps
    assert state_bytes(name, list(network.parameters()), momentum=0.9) == expected
    assert not state_bytes("sgd", list(network.parameters()))


def test_under_fp16_frozen_weights_go_to_float16():
    network = model()
    network[0].requires_grad_(False)
    found = freed(TEXT_FLAGS, network=network, mixed_precision="fp16")
    assert found["--dtype float16"] == 2 * WEIGHT
    assert not any("bf" in flags for flags in found)
    assert "--dtype float16" not in freed(TEXT_FLAGS, mixed_precision="fp16")
