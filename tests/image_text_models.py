"""Small models of images and text by their types, each with two rows of an image and a text."""

import inspect
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from lives import write_rows
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from zoo.batches import tokens, values
from zoo.tiny import IMAGE_SIZE, VOCABULARY, tiny_config

from memsave_recipes.data.processors import TEMPLATE
from memsave_recipes.data.text.chat_template import CHATML_END
from memsave_recipes.data.text.tokenizers import load_tokenizer

IMAGE = VOCABULARY - 1
M_ROPE = {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}}
OF_GEMMA = {"text_config": {"model_type": "gemma3_text"}, "vision_config": {"model_type": "siglip_vision_model"}}
TOWER = {"out_hidden_size": 32, "depth": 2}
TILES = {"max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]], "num_global_layers": 2}
WHOLE = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
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
    "pixtral": (64, {"vision_config": {"model_type": "pixtral"}, **WHOLE}),
    "mllama": (0, {"vision_config": {**TILES, **STATES}, "text_config": {"cross_attention_layers": [1, 3]}}),
}
"""The image tokens of a row, and changes of the tiny configuration."""
CONFIGS = {"pixtral": "llava"}
"""Those of types that are named for their tower."""


def build(model_type: str) -> transformers.PreTrainedModel:
    """In training mode, always with the same weights; gates of zeros, which would hide a tower, are filled."""
    torch.manual_seed(0)
    config = tiny_config(CONFIGS.get(model_type, model_type), **TYPES[model_type][1])
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
    if model_type == "pixtral":
        made["image_sizes"] = torch.full((2, 2), IMAGE_SIZE)
    ahead = (2, 1) if model_type in ("idefics3", "smolvlm") else (2,)
    return made | {"pixel_values": values(*ahead, 3, IMAGE_SIZE, IMAGE_SIZE)}


WORDS = ["user system assistant What is in the picture ? I see a red green blue square , and nothing else . 0 1 2 3 4"]
TILE = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
OF_IDEFICS = {
    **{"image_token": "<image>", "fake": "<fake_token_around_image>", "global": "<global-img>"},
    "end": "<end_of_utterance>",
    **{f"tile_{number}": token for number, token in enumerate(TILE)},
}
OF_QWEN = {
    **{"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    **{"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"},
}
OF_INTERNVL = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
OF_AYA = {"patch": "<|IMG_PATCH|>", "before": "<|START_OF_IMG|>", "behind": "<|END_OF_IMG|>", "whole": "TILE_GLOBAL"}
VIDEOS = {
    "qwen2_5_vl": OF_QWEN,
    "qwen3_vl": OF_QWEN,
    "smolvlm": {**OF_IDEFICS, "video_token": "<video>"},
    "internvl": {**OF_INTERNVL, "video_token": "<video>"},
    "pixtral": {"image_token": "[IMG]", "break": "[IMG_BREAK]", "end": "[IMG_END]"},
}
"""Of the types whose processors need torchvision: all but the last one's take videos, too."""
TOKENS: dict[str, dict[str, str]] = {
    "llava": {"image_token": "<image>"},
    "gemma3": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    "idefics3": OF_IDEFICS,
    "aya_vision": {"image_token": "<image>", **OF_AYA, **{f"tile_{number}": f"TILE_{number}" for number in (1, 2, 3)}},
    **VIDEOS,
}
"""The special tokens of the types that have a small processor."""


def picture(width: int = 24, height: int = 24, seed: int = 0) -> Image.Image:
    """Noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def png(*size: int, seed: int = 0) -> bytes:
    """The file of a picture."""
    file = BytesIO()
    picture(*size, seed=seed).save(file, "PNG")
    return file.getvalue()


def rows_with_images(folder):
    """Conversations of one image, of two, and of none."""
    for number in range(6):
        (folder / f"{number}.png").write_bytes(png(24 + 8 * number, 90 - 8 * number, seed=number))
    rows = []
    for number in range(40):
        places = [{"type": "image", "path": f"{(number + at) % 6}.png"} for at in range(number % 3)]
        asked = [*places, {"type": "text", "text": f"What is in {number} ?"}]
        replies = [
            {"role": "assistant", "content": "red " * (number % 4 + 1)},
            {"role": "assistant", "content": "blue"},
        ]
        rows.append(
            {"messages": [{"role": "user", "content": asked}, replies[0], {"role": "user", "content": "?"}, replies[1]]}
        )
    return write_rows(folder / "rows.jsonl", rows)


def make_processor(model_type: str, *, marks: bool = False) -> Any:
    """One with a template that ``marks`` the assistant's turns by ``{% generation %}``, or does not."""
    if model_type in VIDEOS:
        pytest.importorskip("torchvision")
    if model_type == "smolvlm":
        pytest.importorskip("num2words")
    own = TOKENS[model_type]
    learned = load_tokenizer(None, WORDS * 4, vocab_size=330)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=learned.backend_tokenizer,
        pad_token="<pad>",
        eos_token=CHATML_END,
        extra_special_tokens={**own, "start": "<|im_start|>"},
    )
    image = own.get("boi_token") or own.get("context_image_token") or own["image_token"]
    written = own.get("vision_start_token", "") + image + own.get("vision_end_token", "")
    template = TEMPLATE.replace("END", repr(CHATML_END)).replace("IMAGE", repr(written))
    if marks:
        start, stop = template.index("{% if message['content'] is"), template.index("{% endfor %}{% if add")
        content, is_reply = template[start:stop], "{% if message['role'] == 'assistant' %}"
        both = f"{is_reply}{{% generation %}}{content}{{% endgeneration %}}{{% else %}}{content}{{% endif %}}"
        template = template[:start] + both + template[stop:]
    parts, options = _parts_of(model_type)
    kind = getattr(transformers, PROCESSORS[model_type])
    return kind(parts[0], tokenizer, *parts[1:], chat_template=template, **options)


PROCESSORS = {
    "llava": "LlavaProcessor",
    "gemma3": "Gemma3Processor",
    "idefics3": "Idefics3Processor",
    "aya_vision": "AyaVisionProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "smolvlm": "SmolVLMProcessor",
    "internvl": "InternVLProcessor",
    "pixtral": "PixtralProcessor",
}


def _parts_of(model_type: str) -> tuple[list[Any], dict[str, Any]]:
    """The processors of images, and of videos where there is one; and further arguments."""
    pil: Any = transformers
    square = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    longest, tile = {"longest_edge": 2 * IMAGE_SIZE}, {"longest_edge": IMAGE_SIZE}
    match model_type:
        case "llava":
            of_patches = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
            return [pil.CLIPImageProcessorPil(size=square, do_center_crop=False)], {"patch_size": 8, **of_patches}
        case "gemma3":
            return [pil.Gemma3ImageProcessorPil(size=square)], {"image_seq_length": 16}
        case "idefics3":
            return [pil.Idefics3ImageProcessorPil(size=longest, max_image_size=tile)], {"image_seq_len": 16}
        case "smolvlm":
            images = pil.SmolVLMImageProcessor(size=longest, max_image_size=tile)
            return [images, pil.SmolVLMVideoProcessor(size=longest)], {"image_seq_len": 16}
        case "aya_vision":
            images = pil.GotOcr2ImageProcessorPil(size=square, max_patches=3)
            return [images], {"patch_size": 8, "img_size": IMAGE_SIZE, "downsample_factor": 2}
        case "internvl":
            images = pil.GotOcr2ImageProcessor(size=square, max_patches=3)
            return [images, pil.InternVLVideoProcessor(size=square)], {"image_seq_length": 16}
        case "pixtral":
            return [pil.PixtralImageProcessor(size=tile, patch_size=8)], {"patch_size": 8}
    sizes = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 8}
    videos = pil.Qwen3VLVideoProcessor if model_type == "qwen3_vl" else pil.Qwen2VLVideoProcessor
    return [pil.Qwen2VLImageProcessor(**sizes), videos(**sizes)], {}


def save(model_type: str, folder: Any) -> str:
    """Write a tiny model in float64 and its processor; returns the folder."""
    processor = make_processor(model_type)
    tokenizer = processor.tokenizer
    special = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "eos", "bos")}
    changes = TYPES[model_type][1]
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, **special}
    config_type = CONFIGS.get(model_type, model_type)
    entries = transformers.CONFIG_MAPPING[config_type]().to_dict()
    own = TOKENS[model_type]
    tokens_of = {f"{name}_id": token for name, token in own.items() if f"{name}_id" in entries}
    named = "image_token_index" if "image_token_index" in entries else "image_token_id"
    image = own.get("patch") or own.get("context_image_token") or own["image_token"]
    torch.manual_seed(0)
    config = tiny_config(
        config_type,
        **{
            **changes,
            "text_config": {**changes.get("text_config", {}), **text},
            **{name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens_of.items()},
            named: tokenizer.convert_tokens_to_ids(image),
            **special,
        },
    )
    model = transformers.AutoModelForImageTextToText.from_config(config).double()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)
