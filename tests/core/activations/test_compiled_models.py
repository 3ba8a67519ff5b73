"""Compiled layers of other models than GPT-2, whole or with adapters: the plain gradients within rounding."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.models.adapters import LoraArguments, add_lora

VOCABULARY = 96
TOKENS = torch.randint(0, VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(1))
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


def other_model(model_type):
    """A model in training mode and a batch: packed documents for decoders, padded ones for encoders, images."""
    torch.manual_seed(0)
    labels = torch.tensor([0, 1, 1])
    if model_type == "vit":
        sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
        model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8))
        return model.train(), {"pixel_values": torch.randn(3, 3, 32, 32), "labels": labels}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if model_type == "bert" else {}
    config = AutoConfig.for_model(model_type, vocab_size=VOCABULARY, **SHAPE, **dropout)
    if model_type in ("llama", "qwen3"):
        documents = torch.cat([torch.arange(10), torch.arange(14)]).expand(3, -1)
        batch = {"input_ids": TOKENS, "labels": TOKENS, "position_ids": documents, "use_cache": False}
        return AutoModelForCausalLM.from_config(config).train(), batch
    mask = (torch.arange(24) < torch.tensor([24, 17, 9])[:, None]).long()
    batch = {"input_ids": TOKENS * mask, "attention_mask": mask, "labels": labels}
    return AutoModelForSequenceClassification.from_config(config).train(), batch


def record_of(model_type, strategy, *, lora, dtype=torch.float32):
    model, batch = other_model(model_type)
    task = "CAUSAL_LM" if model_type in ("llama", "qwen3") else "SEQ_CLS"
    add_lora(model, LoraArguments(lora=lora, lora_rank=4), task_type=task)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # it begins at zero, and would hide what goes through it
            torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(2))
    model.to(dtype)
    batch = {name: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for name, x in batch.items()}
    with apply_plan(model, plan_blocks(model, strategy)):
        loss = model(**batch).loss
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {"loss": loss.detach()}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("model_type", "num_kinds"), [("llama", 1), ("qwen3", 1), ("bert", 1), ("modernbert", 2), ("vit", 1)]
)
def test_other_models(graphs, assert_three_way, model_type, num_kinds, lora):
    """ModernBERT has two kinds of layers. With adapters the first layer's input needs no gradient: one graph more."""
    ours = record_of(model_type, "compiled:0.3", lora=lora)
    assert graphs() <= num_kinds + lora
    plain, exact = (record_of(model_type, "none", lora=lora, dtype=dtype) for dtype in (torch.float32, torch.float64))
    assert_three_way(ours, plain, exact, ulps=64 if lora else 16)
