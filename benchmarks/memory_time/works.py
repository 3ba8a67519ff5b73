"""What the frontier is drawn for: six models with a batch and a loss, at a size for each kind of device.

Every method runs on a copy of the model that has its own modules and the same weights, so that all of them can wait in
memory for their turns. Dropout is off: a compiler draws other masks, and gradients could not be compared.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from memsave_recipes.models import MODELS
from memsave_recipes.models.causal_lm import CausalLMLoss, LossKind

CNNS = ("vgg16", "densenet121", "resnet50")
LANGUAGE_MODELS = ("gpt2", "llama")
TITLES = {
    "vgg16": "VGG16",
    "densenet121": "DenseNet-121",
    "resnet50": "ResNet-50",
    "vit": "ViT",
    "gpt2": "GPT-2",
    "llama": "Llama",
}
_NO_DROPOUT_IN_VIT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_NO_DROPOUT_IN_GPT2: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_END_TOKEN: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}  # in every vocabulary, however small
_LLAMA_1B = {
    **{"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
}

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "vgg16": {"batch_size": 3, "image_size": 96, "num_classes": 10},
        "densenet121": {"batch_size": 4, "image_size": 128, "num_classes": 10},
        "resnet50": {"batch_size": 4, "image_size": 128, "num_labels": 10},
        "vit": {"batch_size": 2, "image_size": 112, "patch_size": 8, "num_labels": 10}
        | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 4},
        "gpt2": {"batch_size": 2, "length": 256, "vocab_size": 32_768, "n_layer": 8, "n_embd": 256, "n_head": 4},
        "llama": {"batch_size": 2, "length": 256, "vocab_size": 32_768, "num_hidden_layers": 8, "hidden_size": 256}
        | {"intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2},
    },
    "cuda": {
        "vgg16": {"batch_size": 64, "image_size": 224, "num_classes": 2},
        "densenet121": {"batch_size": 64, "image_size": 224, "num_classes": 1000},
        "gpt2": {"batch_size": 8, "length": 1024, "dtype": "bfloat16"},
        "llama": {"batch_size": 4, "length": 2048, "dtype": "bfloat16", **_LLAMA_1B},
    },
    "tiny": {
        "vgg16": {"name": "vgg_small", "batch_size": 2, "image_size": 32, "num_classes": 10},
        "densenet121": {"name": "densenet_small", "batch_size": 2, "image_size": 64, "num_classes": 10},
        "resnet50": {"batch_size": 2, "image_size": 32, "num_labels": 10, "embedding_size": 8}
        | {"hidden_sizes": [16, 32, 32, 64], "depths": [2, 2, 2, 2]},
        "vit": {"batch_size": 2, "image_size": 32, "patch_size": 8, "num_labels": 10}
        | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
        "gpt2": {"batch_size": 2, "length": 32, "vocab_size": 2048, "n_layer": 4, "n_embd": 32, "n_head": 4},
        "llama": {"batch_size": 2, "length": 32, "vocab_size": 2048, "num_hidden_layers": 4, "hidden_size": 32}
        | {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    },
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model in training mode, one batch on the same device, and what is computed of them.

    ``size`` is the entry of ``SIZES`` that it was built from, ``model`` an ``nn.Module``.
    """

    name: str
    size: dict[str, Any]
    model: Any
    batch: dict[str, Tensor]

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return next(self.model.parameters()).device

    @property
    def is_language_model(self) -> bool:
        """Whether its loss can do without the logits."""
        return self.name in LANGUAGE_MODELS

    def copy(self, loss: LossKind = "full") -> Any:
        """Own modules, same parameters and buffers; a language model comes with its loss."""
        same = {id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        model = copy.deepcopy(self.model, same)
        return CausalLMLoss(model, loss).train() if self.is_language_model else model

    def loss_of(self, model: nn.Module) -> Tensor:
        """The mean loss that a copy has on the batch."""
        if self.is_language_model:
            return model(**self.batch) / self.batch["labels"].numel()
        output = model(self.batch["images"])
        return F.cross_entropy(getattr(output, "logits", output), self.batch["labels"])

    def clear_gradients(self) -> None:
        """As before a step."""
        self.model.zero_grad(set_to_none=True)


def build_work(name: str, size: dict[str, Any], device: torch.device) -> Work:
    """The same weights and batch at each call."""
    settings = dict(size)
    batch_size, dtype = settings.pop("batch_size"), getattr(torch, settings.pop("dtype", "float32"))
    torch.manual_seed(0)
    if name in LANGUAGE_MODELS:
        length = settings.pop("length")
        model = _BUILDERS[name](**settings)
        tokens = torch.randint(model.config.vocab_size, (batch_size, length))
        batch = {"input_ids": tokens, "labels": tokens}
    else:
        image_size = settings["image_size"]
        model = _BUILDERS[name](**settings)
        labels = torch.randint(settings.get("num_classes", 10), (batch_size,))
        batch = {"images": torch.randn(batch_size, 3, image_size, image_size), "labels": labels}
    model = model.train().to(device, dtype)
    return Work(name=name, size=size, model=model, batch={key: value.to(device) for key, value in batch.items()})


def _ours(default: str) -> Callable[..., nn.Module]:
    def build(*, image_size: int, num_classes: int, name: str = default) -> nn.Module:
        model = MODELS[name](num_classes=num_classes)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    return build


def _resnet50(*, image_size: int, **settings: Any) -> nn.Module:
    return ResNetForImageClassification(ResNetConfig(**settings))


def _vit(**settings: Any) -> nn.Module:
    return ViTForImageClassification(ViTConfig(**settings, **_NO_DROPOUT_IN_VIT))


def _gpt2(**settings: Any) -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(**settings, **_NO_DROPOUT_IN_GPT2, **_END_TOKEN, use_cache=False))


def _llama(**settings: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**settings, use_cache=False))


_BUILDERS: dict[str, Callable[..., Any]] = {
    "vgg16": _ours("vgg16"),
    "densenet121": _ours("densenet121"),
    "resnet50": _resnet50,
    "vit": _vit,
    "gpt2": _gpt2,
    "llama": _llama,
}
