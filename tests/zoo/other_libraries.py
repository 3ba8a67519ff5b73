"""A small model of every kind in timm, and of every kind of denoiser and autoencoder in diffusers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn
from zoo.batches import Batch, values


@dataclass(frozen=True)
class TimmModel:
    """A model of timm with ten classes; its sizes are those that timm gives it."""

    name: str
    size: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (7,)

    def build(self) -> nn.Module:
        """In training mode, always with the same weights."""
        torch.manual_seed(0)
        timm: Any = import_module("timm")
        return timm.create_model(self.name, num_classes=10, drop_rate=0.1, **self.options).train()

    def batch(self) -> Batch:
        """Two images."""
        return {"x": values(2, 3, self.size, self.size)}


CONVOLUTIONAL = (
    *("test_resnet", "test_byobnet", "test_efficientnet", "test_convnext", "test_mambaout", "test_nfnet"),
    *("resnetv2_18", "densenet121", "dla34", "dpn48b", "ese_vovnet19b_slim", "regnetx_002", "fastvit_t8"),
)
ATTENTION = ("test_vit", "coat_lite_tiny", "convit_tiny", "eva02_tiny_patch14_224", "xcit_nano_12_p16_224")
"""Built for one size of images."""
TIMM: dict[str, TimmModel] = {name: TimmModel(name) for name in CONVOLUTIONAL}
TIMM |= {name: TimmModel(name, size=224) for name in ATTENTION}

SAMPLE = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
UNET = {**SAMPLE, "sample_size": 16, "attention_head_dim": 8}
DOWN_UP = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
CROSS = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 32}
CROSS_UP = {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 3}


def _noisy(*shape: int, **others: Any) -> Callable[[], Batch]:
    return lambda: {"sample": values(*shape), "timestep": torch.tensor([3, 7]), **{k: v() for k, v in others.items()}}


def _text() -> torch.Tensor:
    return values(2, 6, 32)


@dataclass(frozen=True)
class DiffusersModel:
    """A class of diffusers with the arguments that make it small."""

    kind: str
    options: dict[str, Any]
    make_batch: Callable[[], Batch]
    seeds: tuple[int, ...] = (7,)

    def build(self) -> nn.Module:
        """In training mode, always with the same weights."""
        torch.manual_seed(0)
        return getattr(import_module("diffusers"), self.kind)(**self.options).train()

    def batch(self) -> Batch:
        """Two noisy samples, or two images."""
        return self.make_batch()


def _images() -> Batch:
    return {"sample": values(2, 3, 32, 32)}


MODELS = (
    DiffusersModel(
        "UNet2DModel",
        {
            **UNET,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        _noisy(2, 3, 16, 16),
    ),
    DiffusersModel(
        "UNet2DConditionModel", {**UNET, **CROSS, **CROSS_UP}, _noisy(2, 4, 16, 16, encoder_hidden_states=_text)
    ),
    DiffusersModel(
        "UNet3DConditionModel",
        {
            **UNET,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
            "cross_attention_dim": 32,
        },
        _noisy(2, 4, 4, 16, 16, encoder_hidden_states=_text),
    ),
    DiffusersModel(
        "UNet1DModel",
        {
            "block_out_channels": (16, 32),
            "in_channels": 14,
            "out_channels": 14,
            "time_embedding_type": "positional",
            "flip_sin_to_cos": False,
            "use_timestep_embedding": True,
            "out_block_type": "OutConv1DBlock",
            "down_block_types": ("DownResnetBlock1D", "DownResnetBlock1D"),
            "up_block_types": ("UpResnetBlock1D",),
            "mid_block_type": "MidResTemporalBlock1D",
            "norm_num_groups": 8,
            "layers_per_block": 1,
            "act_fn": "swish",
        },
        _noisy(2, 14, 16),
    ),
    DiffusersModel("AutoencoderKL", {**SAMPLE, **DOWN_UP, "latent_channels": 4}, _images),
    DiffusersModel("VQModel", {**SAMPLE, **DOWN_UP, "latent_channels": 3, "num_vq_embeddings": 16}, _images),
    DiffusersModel(
        "AsymmetricAutoencoderKL",
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "down_block_out_channels": (32, 64),
            "layers_per_down_block": 1,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "up_block_out_channels": (32, 64),
            "layers_per_up_block": 1,
            "latent_channels": 4,
            "norm_num_groups": 8,
            "sample_size": 32,
        },
        _images,
    ),
    DiffusersModel(
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (16, 16),
            "decoder_block_out_channels": (16, 16),
            "num_encoder_blocks": (1, 2),
            "num_decoder_blocks": (2, 1),
        },
        _images,
    ),
    DiffusersModel(
        "DiTTransformer2DModel",
        {**HEADS, "in_channels": 4, "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 100},
        lambda: {
            "hidden_states": values(2, 4, 8, 8),
            "timestep": torch.tensor([3, 7]),
            "class_labels": torch.tensor([1, 2]),
        },
    ),
    DiffusersModel(
        "PixArtTransformer2DModel",
        {**HEADS, "in_channels": 4, "sample_size": 8, "cross_attention_dim": 32, "caption_channels": 32}
        | {"use_additional_conditions": False},
        lambda: {
            "hidden_states": values(2, 4, 8, 8),
            "timestep": torch.tensor([3, 7]),
            "encoder_hidden_states": _text(),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    DiffusersModel(
        "SD3Transformer2DModel",
        {**HEADS, "num_layers": 4, "sample_size": 8, "in_channels": 4, "out_channels": 4}  # two more blocks embed
        | {"caption_projection_dim": 32, "joint_attention_dim": 32, "pooled_projection_dim": 16},
        lambda: {
            "hidden_states": values(2, 4, 8, 8),
            "timestep": torch.tensor([3, 7]),
            "encoder_hidden_states": _text(),
            "pooled_projections": values(2, 16),
        },
    ),
    DiffusersModel(
        "FluxTransformer2DModel",
        {**HEADS, "num_single_layers": 3, "in_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 16}
        | {"axes_dims_rope": (4, 4, 8)},
        lambda: {
            "hidden_states": values(2, 16, 4),
            "timestep": torch.tensor([0.3, 0.7]),
            "encoder_hidden_states": _text(),
            "pooled_projections": values(2, 16),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(6, 3),
        },
    ),
    DiffusersModel(
        "ControlNetModel",
        {**SAMPLE, **CROSS, "attention_head_dim": 8, "conditioning_embedding_out_channels": (16, 32)},
        lambda: {
            "sample": values(2, 4, 16, 16),
            "timestep": torch.tensor([3, 7]),
            "encoder_hidden_states": _text(),
            "controlnet_cond": values(2, 3, 32, 32),
        },
    ),
    DiffusersModel(
        "PriorTransformer",
        {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 3, "embedding_dim": 32, "num_embeddings": 6},
        lambda: {
            "hidden_states": values(2, 32),
            "timestep": torch.tensor([3, 7]),
            "proj_embedding": values(2, 32),
            "encoder_hidden_states": _text(),
        },
    ),
)
DIFFUSERS: dict[str, DiffusersModel] = {model.kind: model for model in MODELS}
