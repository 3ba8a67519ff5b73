"""Models of images and text: their tiny configurations, and a batch of two rows, an image and a text in each."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from zoo.architectures import Architecture
from zoo.batches import Batch, tokens, values
from zoo.exceptions import CHANGES
from zoo.tiny import IMAGE_SIZE, SIZES, VOCABULARY, Rules, tiny_config

from memsave_recipes.models.image_text import train_part_of_image_text
from memsave_recipes.models.what_trains import TrainedPartArguments

IMAGE_TEXT = "AutoModelForImageTextToText"
IMAGE = VOCABULARY - 1  # the token that stands for a part of an image
WIDE = dict.fromkeys(("embed_dim", "out_hidden_size", "text_hidden_size", "projection_dim"), 32)
LONG = {"depth": 4, "max_position_embeddings": 512, "num_position_embeddings": 64, "sliding_window": 64}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
ON_AXES = {"text_config": {"rope_parameters": AXES}}
DEEP = {**ON_AXES, "vision_config": {"deepstack_visual_indexes": [0, 1, 2]}}
GLM = {
    "text_config": {"rope_parameters": {**AXES, "partial_rotary_factor": 1.0}},
    "vision_config": {"out_hidden_size": 32, "attention_dropout": 0.1},
}
CODES = {"latent_channels": 8, "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1}
QUERIES = {"image_token_index": IMAGE, "image_token_id": IMAGE, "num_query_tokens": 8}
TILES = {"image_grid_pinpoints": [[128, 128]]}
GEMMA4_TOWER = {"vision_config": {"model_type": "gemma4_vision"}}
OF_TYPES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {64: 16}},
    "blip-2": QUERIES,
    "blip_2_qformer": {"num_attention_heads": 4},
    "chameleon": {
        "vocabulary_map": {**{f"IMGIMG{chr(65 + number)}Z": 87 + number for number in range(8)}, "<image>": IMAGE},
        "vq_config": {**CODES, "embed_dim": 8, "num_embeddings": 8, "resolution": 64, "attn_resolutions": []},
    },
    "cosmos3_edge": ON_AXES,
    "diffusion_gemma": {
        **GEMMA4_TOWER,
        "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    },
    "florence2": {
        "vision_config": {
            **{"depths": [1, 1, 1, 1], "embed_dim": [16, 16, 32, 32], "num_heads": [2, 2, 4, 4]},
            **{"num_groups": [2, 2, 4, 4], "projection_dim": 32, "window_size": 4},
        },
        "text_config": {"model_type": "bart", "vocab_size": VOCABULARY},
    },
    "gemma3": {**CHANGES["gemma3"], "mm_tokens_per_image": 16},
    "gemma4": GEMMA4_TOWER,
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga"), GLM),
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0}},
    "hunyuan_vl": {"text_config": {"head_dim": 8, "rope_parameters": {**AXES, "mrope_section": [1, 1, 1, 1]}}},
    "instructblip": QUERIES,
    "instructblipvideo": {**QUERIES, "video_token_index": IMAGE, "video_token_id": IMAGE},
    "janus": {
        "vision_config": {"projection_dim": 32, "num_image_tokens": 64, "depth": 2},
        "vq_config": {**CODES, "num_embeddings": 16, "projection_dim": 32, "image_token_embed_dim": 32},
    },
    "kimi_k25": {"vision_config": {"projection_hidden_size": 32}, "projection_hidden_size": 32},
    "kosmos-2.5": {"latent_query_num": 8},
    "llama4": {
        "vision_config": {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32}
        | {"intermediate_size": 128}
    },
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), TILES),
    "mllama": {
        "vision_config": {"intermediate_layers_indices": [1, 2], "vision_output_dim": 96, "num_global_layers": 2}
        | {"max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]},
        "text_config": {"cross_attention_layers": [1, 3]},
    },
    "muse_glimmer": {"projector_hidden_size": 32, "out_hidden_size": 128, "vision_config": {"patch_temporal": 1}},
    "paddleocr_vl": ON_AXES,
    "qwen2_5_omni_thinker": {**ON_AXES, "vision_start_token_id": 90},
    "qwen2_5_vl": {**ON_AXES, "vision_config": {"window_size": 32, "fullatt_block_indexes": [1, 3]}},
    "qwen2_vl": {**ON_AXES, "vision_config": {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}},
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), DEEP),
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 90},
    "shieldgemma2": {**CHANGES["gemma3"], "mm_tokens_per_image": 16},
    "step3p7": {"text_config": {"sliding_window": 64}},
    "pix2struct": {"text_config": {"decoder_start_token_id": 0}},
    "t5gemma2_encoder": {"mm_tokens_per_image": 16},
    "udop": {"decoder_start_token_id": 0},
    "vipllava": {"vision_feature_layers": [-2, -3, -4]},
    "vision-encoder-decoder": {"pad_token_id": 0, "decoder_start_token_id": 1},
}
RULES = Rules({**SIZES, **WIDE, **LONG}, {**CHANGES, **OF_TYPES})


def whole(config: Any) -> dict[str, Any]:
    """(2, 3, H, W)."""
    return {"pixel_values": values(2, 3, *2 * [_size(config)])}


def one_a_row(config: Any) -> dict[str, Any]:
    """(2, 1, 3, H, W)."""
    return {"pixel_values": values(2, 1, 3, *2 * [_size(config)])}


def of_known_size(config: Any) -> dict[str, Any]:
    """(2, 3, H, W), and H and W as numbers."""
    return {**whole(config), "image_sizes": torch.full((2, 2), _size(config))}


def in_tiles(config: Any) -> dict[str, Any]:
    """(2, 5, 3, H, W): the image, and its four quarters."""
    size = _size(config)
    return {"pixel_values": values(2, 5, 3, size, size), "image_sizes": torch.full((2, 2), 2 * size)}


def in_patches(config: Any, frames: int = 1, height: int = 8, width: int = 8) -> dict[str, Any]:
    """Patches of all rows, one after the other, and how many there are in each direction."""
    tower = getattr(config, "vision_config", config)
    names = ("in_channels", "in_chans", "num_channels")
    channels = next((found for name in names if (found := getattr(tower, name, None))), 3)
    inner = channels * (getattr(tower, "temporal_patch_size", 1) or 1) * getattr(tower, "patch_size", 8) ** 2
    grid = torch.tensor([[frames, height, width]] * 2)
    return {"pixel_values": values(2 * frames * height * width, inner), "image_grid_thw": grid}


def in_square_patches(config: Any) -> dict[str, Any]:
    """The same, each patch (3, P, P)."""
    return {**in_patches(config), "pixel_values": values(128, 3, *2 * [getattr(config.vision_config, "patch_size", 8)])}


def in_strips(config: Any) -> dict[str, Any]:
    """64 patches a row side by side, and how many of them there are in each direction."""
    return {"pixel_values": values(1, 3, 8, 2 * 64 * 8), "target_sizes": torch.full((2, 2), 8, dtype=torch.int32)}


def with_places(config: Any) -> dict[str, Any]:
    """144 patches a row, and where each of them is."""
    across = torch.arange(12)
    places = torch.stack(torch.meshgrid(across, across, indexing="xy"), -1).view(1, 144, 2)
    return {"pixel_values": values(2, 144, 3 * 8 * 8).sigmoid(), "image_position_ids": places.repeat(2, 1, 1)}


def padded_patches(config: Any) -> dict[str, Any]:
    """64 patches a row, none of them padding."""
    mask, shapes = torch.ones(2, 64, dtype=torch.long), torch.full((2, 2), 8)
    inner = 3 * config.vision_config.patch_size**2
    return {"pixel_values": values(2, 64, inner), "pixel_attention_mask": mask, "spatial_shapes": shapes}


def tiled_for_mllama(config: Any) -> dict[str, Any]:
    """An image in one tile of several."""
    tower = config.vision_config
    tiles, size = tower.max_num_tiles, tower.image_size
    return {
        "pixel_values": values(2, 1, tiles, 3, size, size),
        "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.tensor([[[1] + [0] * (tiles - 1)]] * 2),
        "cross_attention_mask": lambda ids: torch.ones(2, ids.shape[1], 1, tiles, dtype=torch.long),
    }


def for_a_robot(config: Any) -> dict[str, Any]:
    """An image and a text, a state, and actions to learn."""
    return {
        "pixel_values": values(2, 1, 3, 64, 64),
        "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool),
        "state": values(2, config.max_state_dim),
        "actions": values(2, config.chunk_size, config.max_action_dim),
        "noise": values(2, config.chunk_size, config.max_action_dim),
        "timestep": torch.tensor([0.3, 0.6]),
        **dict.fromkeys(("labels", "use_cache")),
    }


def at_image_tokens(name: str) -> Callable[[Any], dict[str, Any]]:
    """Whole images, and under ``name`` where a text has their tokens."""
    return lambda config: {**whole(config), name: lambda ids: (ids == _image_token(config)).long()}


def _size(config: Any) -> int:
    size = getattr(getattr(config, "vision_config", config), "image_size", None) or IMAGE_SIZE
    return size if isinstance(size, int) else size[0]


BATCHES: dict[str, Callable[[Any], dict[str, Any]]] = {
    **dict.fromkeys(("diffusion_gemma", "gemma4"), with_places),
    **dict.fromkeys(("idefics2", "idefics3", "smolvlm"), one_a_row),
    **dict.fromkeys(("kimi_k25", "paddleocr_vl"), in_square_patches),
    **dict.fromkeys(("lighton_ocr", "mistral3", "mistral_large4"), of_known_size),
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), in_tiles),
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), in_strips),
    "deepseek_vl_hybrid": lambda config: {
        **whole(config),
        "high_res_pixel_values": values(2, 3, *2 * [config.high_res_vision_config.image_size]),
    },
    "fuyu": lambda config: {"pixel_values": values(2, 64, 3 * 8 * 8)},
    "granite_docling": lambda config: {**one_a_row(config), "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool)},
    "idefics": lambda config: {
        "pixel_values": values(2, 1, 3, 64, 64),
        "image_attention_mask": lambda ids: torch.ones(2, ids.shape[1], 1, dtype=torch.long),
    },
    "inkling2": lambda config: {"pixel_values": values(32, 16, 16, 3), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)},
    "instructblip": lambda config: {**whole(config), "qformer_input_ids": tokens()[:, :4]},
    "instructblipvideo": lambda config: {
        "pixel_values": values(2, 2, 3, 64, 64),
        "qformer_input_ids": tokens()[:, :4],
    },
    "kosmos-2": at_image_tokens("image_embeds_position_mask"),
    "kosmos-2.5": lambda config: {
        "flattened_patches": values(2, 16, 2 + 3 * 16 * 16).abs(),
        **dict.fromkeys(("width", "height"), torch.full((2,), 4)),
        "image_embeds_position_mask": lambda ids: (ids == _image_token(config)).long(),
    },
    "lfm2_vl": padded_patches,
    "pix2struct": lambda config: {
        "flattened_patches": values(2, 16, 2 + 3 * 16 * 16).abs(),
        **dict.fromkeys(("input_ids", "use_cache", "attention_mask")),
    },
    "mllama": tiled_for_mllama,
    "pi0": for_a_robot,
    "udop": lambda config: {**whole(config), "bbox": torch.zeros(2, 24, 4), "use_cache": None},
    "video_llama_3": lambda config: {**in_patches(config), "image_merge_sizes": torch.full((2,), 2)},
    "vision-encoder-decoder": lambda config: {
        **whole(config),
        **dict.fromkeys(("input_ids", "use_cache", "attention_mask")),
    },
}
"""The entries of a batch for the images; those that are ``None`` are left out, and functions take the tokens."""
NUM_TOKENS = {
    **dict.fromkeys(("mllama", "blip", "git", "udop", "pix2struct"), 0),
    **dict.fromkeys(("vision-encoder-decoder", "pp_formulanet", "idefics", "mistral4"), 0),
    **dict.fromkeys(("blip-2", "instructblip", "kosmos-2.5"), 8),
    **dict.fromkeys(("kimi_k25", "paddleocr_vl", "video_llama_3", "gemma4", "diffusion_gemma", "inkling2"), 16),
    **dict.fromkeys(("fuyu", "kosmos-2", "pi0"), 64),
}
"""Of tokens that stand for an image, where the model does not name their number."""


@dataclass(frozen=True)
class ImageText(Architecture):
    """A model of images and text."""

    def build(self) -> nn.Module:
        """In training mode; a gate or projector of zeros, which would hide gradients of its tower, has other values."""
        torch.manual_seed(0)
        config = tiny_config(self.model_type, RULES, **self.changes)
        model = getattr(transformers, self.auto_class).from_config(config).train()
        for number, (name, weight) in enumerate(model.named_parameters()):
            if not name.endswith("bias") and weight.numel() and not weight.is_meta and bool((weight == 0).all()):
                weight.data.copy_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
        return model

    def batch(self) -> Batch:
        """Always the same."""
        made = _made(self) if self.changes else _batch_of(self.model_type)
        return {name: one.clone() if isinstance(one, Tensor) else one for name, one in made.items()}


@dataclass(kw_only=True)
class Flags(TrainedPartArguments):
    """What trains of it, as the recipe's flags say."""

    freeze: str = "vision"


@dataclass(frozen=True)
class InPart(ImageText):
    """One whose vision tower is frozen; or all but adapters of its decoder are."""

    lora: bool = False

    def build(self) -> nn.Module:
        """As the recipe does, but that adapters are not zeros, which would hide gradients."""
        model: Any = super().build()
        train_part_of_image_text(model, Flags(lora=self.lora, lora_rank=2))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        return model


@cache
def _batch_of(model_type: str) -> dict[str, Any]:
    return _made(ImageText(IMAGE_TEXT, model_type))


def _made(architecture: ImageText) -> dict[str, Any]:
    model_type, model = architecture.model_type, cast(Any, architecture.build())
    names = inspect.signature(model.forward).parameters
    images = BATCHES.get(model_type, in_patches if "image_grid_thw" in names else whole)(model.config)
    make = partial(_with_text, names=names, images=images, token=_image_token(model.config))
    batch = _counted(model, make) if model_type not in NUM_TOKENS else make(NUM_TOKENS[model_type])
    return {name: one for name, one in batch.items() if one is not None}


def _image_token(config: Any) -> int:
    tokens_of = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return next((token for token in tokens_of if token is not None), IMAGE)


def _with_text(num_image_tokens: int, *, names: Any, images: dict[str, Any], token: int) -> dict[str, Any]:
    """A text of which the first token is followed by so many that stand for its image, and labels for the others."""
    ids = tokens() % (VOCABULARY - 16)
    ids = torch.cat([ids[:, :1], torch.full((2, num_image_tokens), token), ids[:, 1:]], dim=1)
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == token, -100), "use_cache": False}
    of_images = (ids == token).long()
    if "attention_mask" in names:
        batch["attention_mask"] = torch.ones_like(ids)
    if kind := next((name for name in ("mm_token_type_ids", "token_type_ids") if name in names), None):
        batch[kind] = of_images
    return batch | {name: one(ids) if callable(one) else one for name, one in images.items()}


def _counted(model: Any, make: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """A batch with as many tokens for an image as the model, which names their number, takes."""
    number, tried = 16, [16]
    for _ in range(5):
        torch.manual_seed(7)
        try:
            with torch.no_grad():
                model(**make(number))
            break
        except ValueError as error:
            found = re.search(r"features:?\s*(\d+)", str(error)) or re.search(r"features[^0-9]*(\d+)", str(error))
            if found is None:
                raise
            of_row = int(found[1]) // 2
            number = of_row if of_row not in tried else of_row // model.config.get_text_config().hidden_size
            tried.append(number)
    return make(number)
