"""Small models of images and text by their types, each with two rows of an image and a text."""

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor
from zoo.batches import tokens, values
from zoo.tiny import IMAGE_SIZE, VOCABULARY, tiny_config

IMAGE = VOCABULARY - 1
M_ROPE = {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}}
OF_GEMMA = {"text_config": {"model_type": "gemma3_text"}, "vision_config": {"model_type": "siglip_vision_model"}}
TOWER = {"out_hidden_size": 32, "depth": 2}
TILES = {"max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]], "num_global_layers": 2}
STATES = {"intermediate_layers_indices": [1, 2], "vision_output_dim": 96}
TYPES: dict[str, tuple[int, dict[str, Any]]] = {
    "llava": (64, {}),
    "qwen2_5_vl": (16, M_ROPE | {"vision_config": {**TOWER, "window_size": 32, "fullatt_block_indexes": [1]}}),
    "qwen3_vl": (16, M_ROPE | {"vision_config": {**TOWER, "deepstack_visual_indexes": [0, 1]}}),
    "gemma3": (16, {**OF_GEMMA, "mm_tokens_per_image": 16}),
    "internvl": (16, {"vision_config": {"image_size": [IMAGE_SIZE, IMAGE_SIZE], "patch_size": [8, 8]}}),
    "idefics3": (16, {}),
    "smolvlm": (16, {}),
    "aya_vision": (16, {}),
    "mllama": (0, {"vision_config": {**TILES, **STATES}, "text_config": {"cross_attention_layers": [1, 3]}}),
}
"""The image tokens of a row, and changes of the tiny configuration."""


def build(model_type: str) -> transformers.PreTrainedModel:
    """In training mode, always with the same weights; gates of zeros, which would hide a tower, are filled."""
    torch.manual_seed(0)
    config = tiny_config(model_type, **TYPES[model_type][1])
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        if parameter.numel() and not parameter.detach().any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def batch(model_type: str, model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """The arguments of a forward, and labels of the text."""
    ids = tokens() % (IMAGE - 16)
    ids = torch.cat([ids[:, :1], torch.full((2, TYPES[model_type][0]), IMAGE), ids[:, 1:]], dim=1)
    made = {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "attention_mask": torch.ones_like(ids)}
    named = inspect.signature(model.forward).parameters
    made |= {name: (ids == IMAGE).long() for name in ("mm_token_type_ids", "token_type_ids") if name in named}
    if "image_grid_thw" in named:
        patch = model.config.vision_config
        size = patch.temporal_patch_size * 3 * patch.patch_size**2
        return made | {"pixel_values": values(128, size), "image_grid_thw": torch.tensor([[1, 8, 8]] * 2)}
    if model_type == "mllama":
        made |= {
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.tensor([[[1, 0]]] * 2),
        }
        made["cross_attention_mask"] = torch.ones(2, ids.shape[1], 1, 2, dtype=torch.long)
        return made | {"pixel_values": values(2, 1, 2, 3, IMAGE_SIZE, IMAGE_SIZE)}
    ahead = (2, 1) if model_type in ("idefics3", "smolvlm") else (2,)
    return made | {"pixel_values": values(*ahead, 3, IMAGE_SIZE, IMAGE_SIZE)}
