"""Small models of images and text with a batch each, made without their processors, which need torchvision."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

IMAGE_TEXT_MODELS = {"gemma3": "Gemma 3", "smolvlm": "SmolVLM", "qwen3_vl": "Qwen3-VL"}
CHANNELS = 3


def build_image_text(
    name: str, batch_size: int, *, num_tokens: int, num_images: int, side: int, **settings: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model, all of which trains, and its batch: rows of ``num_tokens``, first those of the images.

    Args:
        side: of an image, in pixels.
        settings: entries of the configuration.
    """
    vocab_size = settings["text_config"]["vocab_size"]
    image = vocab_size - 1
    settings |= {"image_token_id": image, "pad_token_id": 0, "tie_word_embeddings": True}
    if name != "qwen3_vl":  # which takes images of any size
        settings["vision_config"] = settings["vision_config"] | {"image_size": side}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **settings))
    for weight in model.parameters():
        if weight.ndim > 1 and not weight.detach().any():  # Gemma 3's projection, whose norm of zeros has no gradient
            torch.nn.init.normal_(weight, std=0.02)
    ids = torch.randint(1, image, (batch_size, num_tokens))
    pixels, num_image_tokens = _pixels(model.config, batch_size, num_images, side)
    ids[:, :num_image_tokens] = image
    is_image = ids == image
    batch = {"input_ids": ids, "labels": ids.masked_fill(is_image, -100), **pixels}
    named = inspect.signature(model.forward).parameters
    kinds = {kind: is_image.long() for kind in ("token_type_ids", "mm_token_type_ids") if kind in named}
    return model, batch | kinds


def _pixels(config: Any, batch_size: int, num_images: int, side: int) -> tuple[dict[str, Tensor], int]:
    """Noise in the form that a model takes, and how many tokens the images of a row are."""
    vision = config.vision_config
    grid = side // vision.patch_size
    if config.model_type == "qwen3_vl":
        count, values = batch_size * num_images, CHANNELS * vision.temporal_patch_size * vision.patch_size**2
        grids = torch.tensor([[1, grid, grid]] * count)
        pixels = {"pixel_values": torch.randn(count * grid**2, values), "image_grid_thw": grids}
        return pixels, num_images * (grid // vision.spatial_merge_size) ** 2
    if config.model_type == "smolvlm":
        pixels = {"pixel_values": torch.randn(batch_size, num_images, CHANNELS, side, side)}
        return pixels, num_images * (grid // config.scale_factor) ** 2
    pixels = {"pixel_values": torch.randn(batch_size * num_images, CHANNELS, side, side)}
    return pixels, num_images * config.mm_tokens_per_image
