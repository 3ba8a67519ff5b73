"""The model zoo of all benchmarks: models by name and size, and the flags with which the recipes build them.

* ``SIZES`` are models with a batch and a loss for the frontier, at a size for each kind of device; ``build_work`` makes
  them. Every method runs on a copy of the model that has its own modules and the same weights, so that all of them can
  wait in memory for their turns.
* ``CASES`` are models of up to 8 billion parameters, for estimates on fake tensors.
* ``RECIPES`` are the flags of a recipe; ``recipe_steps.py`` runs them.
* ``small_vit`` and ``RandomImages`` are for the cost of a loop.

Dropout is off where gradients are compared: a compiler draws other masks.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from image_text_works import IMAGE_TEXT_MODELS, build_image_text
from torch import Tensor, nn
from torch.utils.data import Dataset
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
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from memsave_recipes.core.activations import block_names, find_stacks
from memsave_recipes.core.costs.block_costs import Workload
from memsave_recipes.core.costs.estimate import fake_batch, fake_model
from memsave_recipes.core.losses import default_chunk_bytes, linear_cross_entropy
from memsave_recipes.models.causal_lm import CausalLMLoss, LossKind
from memsave_recipes.models.image_classifiers import MODELS

CNNS = ("vgg16", "densenet121", "resnet50")
LANGUAGE_MODELS = ("gpt2", "llama", *IMAGE_TEXT_MODELS)
TITLES = {
    "vgg16": "VGG16",
    "densenet121": "DenseNet-121",
    "resnet50": "ResNet-50",
    "vit": "ViT",
    "gpt2": "GPT-2",
    "llama": "Llama",
    **IMAGE_TEXT_MODELS,
}
_NO_DROPOUT_IN_GPT2: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_END_TOKEN: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}  # in every vocabulary, however small
_LLAMA_1B = {
    **{"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
}
_DECODER: dict[str, Any] = {
    **{"vocab_size": 32_768, "num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 704},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
}
_TOWER: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 768}
_SIGLIP = _TOWER | {"num_hidden_layers": 6, "num_attention_heads": 4}
_TOWER_OF_QWEN = _TOWER | {"depth": 6, "num_heads": 4, "out_hidden_size": 256, "deepstack_visual_indexes": [1, 3]}
_M_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 8, 8]}

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
        "gemma3": {"batch_size": 2, "num_tokens": 256, "num_images": 1, "side": 224, "mm_tokens_per_image": 64}
        | {"text_config": _DECODER, "vision_config": _SIGLIP | {"patch_size": 14}},
        "smolvlm": {"batch_size": 2, "num_tokens": 256, "num_images": 4, "side": 128, "scale_factor": 2}
        | {"text_config": _DECODER, "vision_config": _SIGLIP | {"patch_size": 16}},
        "qwen3_vl": {"batch_size": 2, "num_tokens": 256, "num_images": 1, "side": 256}
        | {"text_config": _DECODER | {"rope_parameters": _M_ROPE}, "vision_config": _TOWER_OF_QWEN},
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
    if name in IMAGE_TEXT_MODELS:
        model, batch = build_image_text(name, batch_size, **settings)
    elif name in LANGUAGE_MODELS:
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


def without_dropout(model: nn.Module) -> nn.Module:
    """``model``, in which no ``nn.Dropout`` drops anything."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _ours(default: str) -> Callable[..., nn.Module]:
    def build(*, image_size: int, num_classes: int, name: str = default) -> nn.Module:
        return without_dropout(MODELS[name](num_classes=num_classes))

    return build


def _resnet50(*, image_size: int, **settings: Any) -> nn.Module:
    return ResNetForImageClassification(ResNetConfig(**settings))


def _vit(**settings: Any) -> nn.Module:
    return ViTForImageClassification(ViTConfig(**settings))


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


def fake_batch_of(model: nn.Module, case: Case) -> dict[str, Tensor]:
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


def loss_of_case(model: Any, batch: dict[str, Tensor], device: torch.device) -> Tensor:
    """As the recipes have it: cross-entropy, that of a language model in chunks."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    if hasattr(model, "lm_head"):
        hidden = model.get_decoder()(**inputs, use_cache=False).last_hidden_state  # (B, T, D)
        return linear_cross_entropy(
            hidden.flatten(0, 1),
            model.lm_head.weight,
            batch["labels"].flatten(),
            chunk_bytes=default_chunk_bytes(device),
        )
    output = model(batch["images"]) if "images" in batch else model(**inputs)
    return F.cross_entropy(getattr(output, "logits", output), batch["labels"])


def workload_of_case(name: str, device: torch.device) -> Workload:
    """The model of a case on fake tensors, and its forward."""
    case = CASES[name]
    model = fake_model(lambda: case.build().to(case.dtype).train())
    batch = fake_batch(model, fake_batch_of(model, case))
    return Workload(
        model=model,
        forward=partial(loss_of_case, model, batch, device),
        batch=list(batch.values()),
        device=torch.device("cpu"),
        stacks=block_names(find_stacks(model)),
    )


@dataclass(frozen=True)
class Recipe:
    """A recipe by its name, its flags for a model, and the micro-batches that are tried."""

    name: str
    flags: str
    sizes: tuple[int, int]


IMAGES, TEXT = "image_classification", "language_modeling"
RECIPES = {
    "VGG16": Recipe(IMAGES, "--model vgg16 --image_size 96 --augmentation none", (2, 4)),
    "DenseNet-121": Recipe(IMAGES, "--model densenet121 --image_size 96 --augmentation none", (2, 4)),
    "ViT": Recipe(
        IMAGES,
        "--model_type vit --image_size 112 --augmentation none --config_overrides "
        "hidden_size=192,num_hidden_layers=8,num_attention_heads=4,intermediate_size=768,patch_size=8",
        (2, 4),
    ),
    "GPT-2": Recipe(
        TEXT, "--model_type gpt2 --config_overrides n_layer=6,n_embd=192,n_head=4 --block_size 256 --loss full", (2, 4)
    ),
    "Llama": Recipe(
        TEXT,
        "--model_type llama --block_size 256 --config_overrides hidden_size=192,intermediate_size=512,"
        "num_hidden_layers=6,num_attention_heads=4,num_key_value_heads=2",
        (2, 4),
    ),
    "BERT": Recipe(
        "text_classification",
        "--model_type bert --max_length 128 --config_overrides "
        "hidden_size=192,num_hidden_layers=6,num_attention_heads=4,intermediate_size=768",
        (4, 8),
    ),
}


def small_vit(*, hidden_size: int = 96, num_hidden_layers: int = 4, patch_size: int = 8) -> nn.Module:
    """A vision transformer for 32 px whose step is short; the same weights at each call."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=2,
        intermediate_size=4 * hidden_size,
        image_size=32,
        patch_size=patch_size,
        num_labels=10,
    )
    return ViTForImageClassification(config).train()


class RandomImages(Dataset):
    """One epoch of random images for ``small_vit`` out of a store of 64, indexed by a number or our ``SampleKey``."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(64, 3, 32, 32, generator=generator)
        self.labels = torch.randint(10, (64,), generator=generator)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, key: Any) -> dict[str, Tensor]:
        index = key if isinstance(key, int) else key.index
        return {"pixel_values": self.images[index % 64], "labels": self.labels[index % 64]}
