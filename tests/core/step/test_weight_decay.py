"""Weight decay is of matrices: norms, biases and other vectors keep their values, as under transformers' Trainer."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForSequenceClassification,
    Trainer,
    TrainingArguments,
)
from zoo.tiny import tiny_config

from memsave_recipes.models.convnets import build_densenet
from memsave_recipes.training.arguments import OptimizerArguments
from memsave_recipes.training.optimizers import make_optimizer

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
LLAMA = LlamaConfig(vocab_size=64, attention_bias=True, **SMALL)
T5 = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2)
MODELS = {
    "gpt2": partial(GPT2LMHeadModel, GPT2Config(vocab_size=64, n_layer=1, n_head=2, n_embd=32)),
    "llama": partial(LlamaForCausalLM, LLAMA),
    "bert": partial(BertForSequenceClassification, BertConfig(vocab_size=64, **SMALL)),
    "t5": partial(T5ForSequenceClassification, T5),
    "resnet": partial(
        ResNetForImageClassification, ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    ),
    **{name: partial(AutoModelForImageClassification.from_config, tiny_config(name)) for name in ("convnext", "beit")},
    "mamba": partial(AutoModelForCausalLM.from_config, tiny_config("mamba")),
    "deberta-v2": partial(AutoModelForSequenceClassification.from_config, tiny_config("deberta-v2")),
    "densenet": partial(build_densenet, "densenet_small", num_classes=3),
}
OPTIMIZERS = ["adamw", "adamw_bf16", "sgd", "adafactor", "muon", "adamw_8bit"]


def decayed(model, rule, **flags):
    """The names of the parameters that steps without gradients change."""
    if rule == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    optim = OptimizerArguments(optimizer=rule, learning_rate=1e-2, weight_decay=0.1, **flags)
    model.to(torch.bfloat16 if optim.rounds_at_random else torch.float32)
    optimizer = make_optimizer(optim, model)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.25)
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(20):
        optimizer.step()
    return {name for name, parameter in model.named_parameters() if (parameter != 0.25).any()}


@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_optimizer_decays_matrices_alone(name, rule):
    model = MODELS[name]()
    matrices = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
    assert 0 < len(matrices) < len(list(model.parameters()))
    assert decayed(model, rule) == matrices


@pytest.mark.parametrize("name", MODELS)
def test_what_trainer_does_not_decay_keeps_its_value(name, tmp_path):
    """Trainer knows norms by their names and ``LayerNorm``; the BatchNorms of a ResNet are vectors, too."""
    model = MODELS[name]()
    trainer = Trainer(model, TrainingArguments(str(tmp_path), weight_decay=0.1, report_to="none", use_cpu=True))
    kept = {one for group in trainer.create_optimizer().param_groups[1:] for one in group["params"]}
    vectors = {one for one in model.parameters() if one.ndim < 2}
    expected = {name for name, one in model.named_parameters() if one not in kept | vectors}
    assert decayed(model, "adamw") == expected
    assert name != "t5" or kept - vectors  # its relative positions are a bias in a matrix


def test_without_decay_there_is_one_group():
    assert len(make_optimizer(OptimizerArguments(), MODELS["gpt2"]()).param_groups) == 1
