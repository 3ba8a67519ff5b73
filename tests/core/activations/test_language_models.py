"""Language models, whole or with adapters: every plan gives the plain gradients, bit for bit."""

from itertools import product

import pytest
import torch
from samples import sample
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.modeling_layers import GradientCheckpointingLayer

from memsave_recipes.core.activations import apply_plan, block_names, find_stacks, plan_blocks
from memsave_recipes.models.adapters import LoraArguments, add_lora
from memsave_recipes.models.causal_lm import CausalLMLoss

VOCABULARY = 96
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "global_attn_every_n_layers": 2,
    "local_attention": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
LANGUAGE_MODELS = [
    "gpt2",
    "llama",
    "qwen3",
    "gemma3_text",
    "gpt_neox",
]  # the last two promise no tensor, and return one
ENCODERS = ["bert", "modernbert"]


def build(model_type):
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32} if model_type == "gpt2" else SHAPE
    config = AutoConfig.for_model(model_type, vocab_size=VOCABULARY, **shape)
    auto = AutoModelForCausalLM if model_type in LANGUAGE_MODELS else AutoModelForSequenceClassification
    return auto.from_config(config).train()


def batch_for(model_type):
    tokens = torch.randint(3, VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(1))
    if model_type in LANGUAGE_MODELS:
        position_ids = torch.cat([torch.arange(10), torch.arange(14)]).expand(3, -1)  # two documents a row
        return {"input_ids": tokens, "labels": tokens, "position_ids": position_ids}
    lengths = torch.tensor([24, 17, 9])
    mask = (torch.arange(24) < lengths[:, None]).long()
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": torch.tensor([0, 1, 1])}


def train_step(model_type, strategy, *, lora):
    model = build(model_type)
    task = "CAUSAL_LM" if model_type in LANGUAGE_MODELS else "SEQ_CLS"
    add_lora(model, LoraArguments(lora=lora, lora_rank=4, lora_entries={"lora_dropout": 0.1}), task_type=task)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # it begins at zero, and would hide what goes through it
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
    forward = CausalLMLoss(model, "chunked") if model_type in LANGUAGE_MODELS else model
    torch.manual_seed(7)
    with apply_plan(model, plan_blocks(model, strategy)):
        output = forward(**batch_for(model_type))
        getattr(output, "loss", output).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {"loss": getattr(output, "loss", output).detach(), "rng": torch.get_rng_state(), **gradients}


FAST = [
    ("llama", False),
    ("gemma3_text", True),
    ("bert", True),
]


@pytest.mark.parametrize(("model_type", "lora"), sample(FAST, product([*LANGUAGE_MODELS, *ENCODERS], [False, True])))
def test_every_strategy_gives_the_plain_gradients(model_type, lora):
    expected = train_step(model_type, "none", lora=lora)
    assert all(gradient is not None for gradient in expected.values())
    assert any(("lora_A" in name) for name in expected) == lora
    (stack,) = block_names(find_stacks(build(model_type)))
    num_blocks = len(stack)
    assert num_blocks == 4
    for strategy in ["full", *(f"{word}:{k}" for word in ("every", "segments") for k in range(1, num_blocks + 1))]:
        record = train_step(model_type, strategy, lora=lora)
        different = [name for name, tensor in expected.items() if not torch.equal(record[name], tensor)]
        assert not different, (strategy, different)


class Layer(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)


class ReturnsASum(Layer):
    def forward(self, states, mask=None):
        residual = states
        states = self.linear(states)
        states = residual + states
        return states


class ReturnsAPair(Layer):
    def forward(self, states):
        states = states + self.linear(states)
        return states, None


class ReturnsATupleByName(Layer):
    def forward(self, states):
        states = (states + self.linear(states),)
        states = states + (None,)  # noqa: RUF005, as models write it
        return states


class ReturnsAnotherName(Layer):
    def forward(self, states):
        outputs = states + self.linear(states)
        return outputs


class MayReturnAPair(Layer):
    def forward(self, states, wanted=False):
        states = states + self.linear(states)
        if wanted:
            return states, None
        return states


@pytest.mark.parametrize(
    ("kind", "num_stacks"),
    [(ReturnsASum, 1), (ReturnsAPair, 3), (ReturnsATupleByName, 3), (ReturnsAnotherName, 3), (MayReturnAPair, 3)],
)
def test_layers_that_add_to_their_input_recompute_together(kind, num_stacks):
    model = nn.Module()
    model.layers = nn.ModuleList(kind() for _ in range(3))
    assert len(find_stacks(model)) == num_stacks
