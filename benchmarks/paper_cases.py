"""Models up to 8 billion parameters that are planned for on paper, each with the shapes of a batch and its loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from memsave_recipes.estimation.targets import Target
from memsave_recipes.losses import default_chunk_bytes, linear_cross_entropy
from memsave_recipes.models import MODELS

COMPARED = "llama-3.2-3b"

LLAMA_8B: dict[str, Any] = {
    **{"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8},
}
LLAMA_3B: dict[str, Any] = {
    **{"vocab_size": 128_256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "head_dim": 128},
    **{"num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True},
}
QWEN_8B: dict[str, Any] = {
    **{"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
}
VIT_H: dict[str, Any] = {
    **{"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16},
    **{"image_size": 224, "patch_size": 14, "num_labels": 1000},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with a batch: of images in pixels, or of tokens, packed, and its dtype of parameters.

    Those in float32 train under bf16 autocast.
    """

    build: Callable[[], nn.Module]
    batch_size: int
    size: int  # of an image, or tokens of a sequence
    dtype: torch.dtype = torch.float32

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Of mixed precision."""
        return torch.bfloat16 if self.dtype == torch.float32 else None


CASES: dict[str, Case] = {
    "vgg16": Case(build=lambda: MODELS["vgg16"](num_classes=1000), batch_size=64, size=224),
    "densenet121": Case(build=lambda: MODELS["densenet121"](num_classes=1000), batch_size=64, size=224),
    "vit-h": Case(build=lambda: ViTForImageClassification(ViTConfig(**VIT_H)), batch_size=32, size=224),
    "bert": Case(build=lambda: BertForSequenceClassification(BertConfig()), batch_size=32, size=512),
    "gpt2": Case(build=lambda: GPT2LMHeadModel(GPT2Config()), batch_size=8, size=1024),
    "llama-3.1-8b": Case(
        build=lambda: LlamaForCausalLM(LlamaConfig(**LLAMA_8B)), batch_size=1, size=4096, dtype=torch.bfloat16
    ),
    "qwen3-8b": Case(
        build=lambda: Qwen3ForCausalLM(Qwen3Config(**QWEN_8B)), batch_size=1, size=4096, dtype=torch.bfloat16
    ),
    COMPARED: Case(
        build=lambda: LlamaForCausalLM(LlamaConfig(**LLAMA_3B, attn_implementation="without_mask")),
        batch_size=2,
        size=4096,
        dtype=torch.bfloat16,
    ),
}
# A name that transformers makes no mask for, as it makes none for flash and flex attention.
AttentionInterface.register("without_mask", sdpa_attention_forward)


def batch_of(model: nn.Module, case: Case) -> dict[str, Tensor]:
    """Shapes without values: packed rows of tokens with their positions, texts with their mask, or images."""

    def empty(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    tokens = case.batch_size, case.size
    if hasattr(model, "lm_head"):
        return {"input_ids": empty(*tokens), "position_ids": empty(*tokens), "labels": empty(*tokens)}
    if isinstance(model, BertForSequenceClassification):
        return {"input_ids": empty(*tokens), "attention_mask": empty(*tokens), "labels": empty(case.batch_size)}
    images = empty(case.batch_size, 3, case.size, case.size, dtype=torch.float32)
    return {"images": images.to(case.dtype), "labels": empty(case.batch_size)}


def loss_of(model: Any, batch: dict[str, Tensor], target: Target) -> Tensor:
    """As the recipes have it: cross-entropy, that of a language model in chunks."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    if hasattr(model, "lm_head"):
        hidden = model.get_decoder()(**inputs, use_cache=False).last_hidden_state  # (B, T, D)
        return linear_cross_entropy(
            hidden.flatten(0, 1),
            model.lm_head.weight,
            batch["labels"].flatten(),
            chunk_bytes=default_chunk_bytes(target.device),
        )
    output = model(batch["images"]) if "images" in batch else model(**inputs)
    return F.cross_entropy(getattr(output, "logits", output), batch["labels"])
