"""Models that people train, for the page of ``memsave fit``: sizes of each from its config.json on the Hub.

Entries that change no size are left out. ``parameters_m`` is the known count of the model, in millions, that the sizes
have to give within 1 %: ``tests/benchmarks/test_fit_page.py``. Of models of images and text it was counted here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import known_processors


@dataclass(frozen=True)
class KnownModel:
    """A model by the name that people know, the word that ``memsave fit`` takes for it, and its configuration.

    Args:
        word: its id on the Hub; of a network that ``memsave`` has itself, its name there.
        parameters_m: in millions.
        config: empty for a network of ``memsave``.
        make_processor: of a model of images and text.
        flags: for ``memsave fit``.
    """

    name: str
    word: str
    parameters_m: float
    config: dict[str, Any]
    make_processor: Callable[[], Any] | None = None
    flags: tuple[str, ...] = ()

    def write(self, folder: Path) -> str:
        """The word for ``memsave fit`` without the Hub: a folder below ``folder``, or the network's name."""
        if not self.config:
            return self.word
        path = folder / self.word
        path.mkdir(parents=True, exist_ok=True)
        entries = self.config
        if self.make_processor is not None:
            processor = self.make_processor()
            processor.save_pretrained(path)
            entries = entries | known_processors.ids_of(processor, entries)
        (path / "config.json").write_text(json.dumps(entries, indent=1), encoding="utf-8")
        return str(path)


def _decoder(
    kind: str, architecture: str, sizes: tuple[int, int, int, int, int, int], positions: int, **others: Any
) -> dict[str, Any]:
    """Sizes: vocabulary, width, width of MLPs, layers, heads, heads of keys."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {
        "model_type": kind,
        "architectures": [architecture],
        **dict(zip((*names, "num_key_value_heads"), sizes, strict=True)),
        "max_position_embeddings": positions,
        **others,
    }


def _llama(sizes: tuple[int, int, int, int, int, int], positions: int, **others: Any) -> dict[str, Any]:
    return _decoder("llama", "LlamaForCausalLM", sizes, positions, **{"tie_word_embeddings": False, **others})


def _qwen2(sizes: tuple[int, int, int, int, int, int], **others: Any) -> dict[str, Any]:
    tied = sizes[0] == 151936
    return _decoder("qwen2", "Qwen2ForCausalLM", sizes, 32768, tie_word_embeddings=tied, **others)


def _qwen3(*sizes: int, tied: bool) -> dict[str, Any]:
    of_all = (151936, *sizes, 8)
    return _decoder("qwen3", "Qwen3ForCausalLM", of_all, 40960, head_dim=128, tie_word_embeddings=tied)  # type: ignore[arg-type]


def _mistral(sizes: tuple[int, int, int, int, int, int], positions: int) -> dict[str, Any]:
    others = {"head_dim": 128, "sliding_window": None, "tie_word_embeddings": False}
    return _decoder("mistral", "MistralForCausalLM", sizes, positions, **others)


def _gemma2(sizes: tuple[int, int, int, int, int, int], head_dim: int) -> dict[str, Any]:
    return _decoder("gemma2", "Gemma2ForCausalLM", sizes, 8192, head_dim=head_dim, sliding_window=4096)


def _gemma3(sizes: tuple[int, int, int, int, int, int], positions: int, window: int) -> dict[str, Any]:
    others = {"head_dim": 256, "sliding_window": window, "sliding_window_pattern": 6}
    return _decoder("gemma3_text", "Gemma3ForCausalLM", sizes, positions, **others)


def _phi3(sizes: tuple[int, int, int, int, int, int], positions: int) -> dict[str, Any]:
    others = {"tie_word_embeddings": False, "pad_token_id": 0, "original_max_position_embeddings": positions}
    return _decoder("phi3", "Phi3ForCausalLM", sizes, positions, **others)


def _olmo2(width: int, mlp: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = (100352, width, mlp, layers, heads, heads)
    return _decoder("olmo2", "Olmo2ForCausalLM", sizes, 4096, tie_word_embeddings=False)


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"vocab_size": 50257, "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024}
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}


def _modernbert(width: int, mlp: int, layers: int, heads: int) -> dict[str, Any]:
    config = _decoder("modernbert", "ModernBertForMaskedLM", (50368, width, mlp, layers, heads, heads), 8192)
    del config["num_key_value_heads"]
    return config | {"global_attn_every_n_layers": 3, "local_attention": 128}


def _vit(kind: str, architecture: str, width: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": kind, "architectures": [architecture], **sizes, **others}


def _google_vit(width: int, layers: int, heads: int, patch_size: int) -> dict[str, Any]:
    others = {"intermediate_size": 4 * width, "image_size": 224, "patch_size": patch_size, "num_labels": 1000}
    return _vit("vit", "ViTForImageClassification", width, layers, heads, **others)


def _dinov2(width: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    return _vit("dinov2", "Dinov2Model", width, layers, heads, image_size=518, patch_size=14, mlp_ratio=4, **others)


def _convnext(depth: int, width: int) -> dict[str, Any]:
    sizes = {"depths": [3, 3, depth, 3], "hidden_sizes": [width, 2 * width, 4 * width, 8 * width], "image_size": 224}
    return {"model_type": "convnext", "architectures": ["ConvNextForImageClassification"], **sizes, "num_labels": 1000}


def _resnet(*depths: int) -> dict[str, Any]:
    sizes = {"embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048], "layer_type": "bottleneck"}
    kind = {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}
    return {**kind, "depths": list(depths), **sizes, "num_labels": 1000}


_SWIN_B: dict[str, Any] = {
    **{"model_type": "swin", "architectures": ["SwinForImageClassification"], "image_size": 224, "patch_size": 4},
    **{"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32], "window_size": 7, "num_labels": 1000},
}
_BERT: dict[str, Any] = {
    **{"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 30522, "hidden_size": 768},
    **{"intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 512},
}

_ROPE_OF_QWEN = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
_QWEN3_VL: dict[str, Any] = {
    **{"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": True},
    "text_config": {
        **_qwen3(2560, 9728, 36, 32, tied=True),
        **{"model_type": "qwen3_vl_text", "rope_parameters": _ROPE_OF_QWEN, "max_position_embeddings": 262144},
    },
    "vision_config": {
        **{"model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16},
        **{"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 2560},
        **{"num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]},
    },
}
_SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
_GEMMA3_OF_IMAGES: dict[str, Any] = {
    **{"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 256},
    "text_config": _gemma3((262208, 2560, 10240, 34, 8, 4), 131072, 1024),
    "vision_config": {"model_type": "siglip_vision_model", **_SIGLIP, "image_size": 896, "patch_size": 14}
    | {"vision_use_head": False},
}
_SMOLVLM: dict[str, Any] = {
    **{"model_type": "smolvlm", "architectures": ["SmolVLMForConditionalGeneration"], "scale_factor": 3},
    **{"tie_word_embeddings": False, "text_config": _llama((49155, 2048, 8192, 24, 32, 32), 16384)},
    "vision_config": {"model_type": "smolvlm_vision", **_SIGLIP, "image_size": 384, "patch_size": 14},
}
MILLION_PIXELS = ("--max_pixels", "1000000")

MODELS = tuple(
    KnownModel(*one)
    for one in (
        (
            "SmolLM2 135M",
            "HuggingFaceTB/SmolLM2-135M",
            134.5,
            _llama((49152, 576, 1536, 30, 9, 3), 8192, tie_word_embeddings=True),
        ),
        (
            "SmolLM2 360M",
            "HuggingFaceTB/SmolLM2-360M",
            361.8,
            _llama((49152, 960, 2560, 32, 15, 5), 8192, tie_word_embeddings=True),
        ),
        (
            "SmolLM2 1.7B",
            "HuggingFaceTB/SmolLM2-1.7B",
            1711.4,
            _llama((49152, 2048, 8192, 24, 32, 32), 8192, tie_word_embeddings=True),
        ),
        ("TinyLlama 1.1B", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1100.0, _llama((32000, 2048, 5632, 22, 32, 4), 2048)),
        (
            "Llama 3.2 1B",
            "meta-llama/Llama-3.2-1B",
            1235.8,
            _llama((128256, 2048, 8192, 16, 32, 8), 131072, head_dim=64, tie_word_embeddings=True),
        ),
        (
            "Llama 3.2 3B",
            "meta-llama/Llama-3.2-3B",
            3212.7,
            _llama((128256, 3072, 8192, 28, 24, 8), 131072, head_dim=128, tie_word_embeddings=True),
        ),
        ("Llama 2 7B", "meta-llama/Llama-2-7b-hf", 6738.4, _llama((32000, 4096, 11008, 32, 32, 32), 4096)),
        ("Llama 3.1 8B", "meta-llama/Llama-3.1-8B", 8030.3, _llama((128256, 4096, 14336, 32, 32, 8), 131072)),
        (
            "Llama 3.3 70B",
            "meta-llama/Llama-3.3-70B-Instruct",
            70553.7,
            _llama((128256, 8192, 28672, 80, 64, 8), 131072),
        ),
        ("Qwen3 0.6B", "Qwen/Qwen3-0.6B", 596.0, _qwen3(1024, 3072, 28, 16, tied=True)),
        ("Qwen3 1.7B", "Qwen/Qwen3-1.7B", 1720.6, _qwen3(2048, 6144, 28, 16, tied=True)),
        ("Qwen3 4B", "Qwen/Qwen3-4B", 4022.5, _qwen3(2560, 9728, 36, 32, tied=True)),
        ("Qwen3 8B", "Qwen/Qwen3-8B", 8190.7, _qwen3(4096, 12288, 36, 32, tied=False)),
        ("Qwen3 14B", "Qwen/Qwen3-14B", 14768.3, _qwen3(5120, 17408, 40, 40, tied=False)),
        ("Qwen3 32B", "Qwen/Qwen3-32B", 32762.1, _qwen3(5120, 25600, 64, 64, tied=False)),
        ("Qwen2.5 0.5B", "Qwen/Qwen2.5-0.5B", 494.0, _qwen2((151936, 896, 4864, 24, 14, 2))),
        ("Qwen2.5 1.5B", "Qwen/Qwen2.5-1.5B", 1543.7, _qwen2((151936, 1536, 8960, 28, 12, 2))),
        ("Qwen2.5 3B", "Qwen/Qwen2.5-3B", 3085.9, _qwen2((151936, 2048, 11008, 36, 16, 2))),
        ("Qwen2.5 7B", "Qwen/Qwen2.5-7B", 7615.6, _qwen2((152064, 3584, 18944, 28, 28, 4))),
        ("Qwen2.5 14B", "Qwen/Qwen2.5-14B", 14770.0, _qwen2((152064, 5120, 13824, 48, 40, 8))),
        ("Qwen2.5 32B", "Qwen/Qwen2.5-32B", 32763.9, _qwen2((152064, 5120, 27648, 64, 40, 8))),
        ("Qwen2.5 72B", "Qwen/Qwen2.5-72B", 72706.2, _qwen2((152064, 8192, 29568, 80, 64, 8))),
        ("Mistral 7B v0.3", "mistralai/Mistral-7B-v0.3", 7248.0, _mistral((32768, 4096, 14336, 32, 32, 8), 32768)),
        (
            "Mistral Nemo 12B",
            "mistralai/Mistral-Nemo-Base-2407",
            12247.8,
            _mistral((131072, 5120, 14336, 40, 32, 8), 131072),
        ),
        (
            "Mistral Small 24B",
            "mistralai/Mistral-Small-24B-Base-2501",
            23572.4,
            _mistral((131072, 5120, 32768, 40, 32, 8), 32768),
        ),
        ("Gemma 3 270M", "google/gemma-3-270m", 268.1, _gemma3((262144, 640, 2048, 18, 4, 1), 32768, 512)),
        ("Gemma 3 1B", "google/gemma-3-1b-pt", 999.9, _gemma3((262144, 1152, 6912, 26, 4, 1), 32768, 512)),
        ("Gemma 3 4B", "google/gemma-3-4b-it", 4300.1, _GEMMA3_OF_IMAGES, known_processors.gemma3),
        ("SmolVLM 2.2B", "HuggingFaceTB/SmolVLM-Instruct", 2246.3, _SMOLVLM, known_processors.smolvlm),
        ("Qwen3-VL 4B", "Qwen/Qwen3-VL-4B-Instruct", 4437.8, _QWEN3_VL, known_processors.qwen3_vl, MILLION_PIXELS),
        ("Yi 1.5 9B", "01-ai/Yi-1.5-9B", 8829.4, _llama((64000, 4096, 11008, 48, 32, 4), 4096)),
        ("Yi 1.5 34B", "01-ai/Yi-1.5-34B", 34388.9, _llama((64000, 7168, 20480, 60, 56, 8), 4096)),
        ("Gemma 2 2B", "google/gemma-2-2b", 2614.3, _gemma2((256000, 2304, 9216, 26, 8, 4), 256)),
        ("Gemma 2 9B", "google/gemma-2-9b", 9241.7, _gemma2((256000, 3584, 14336, 42, 16, 8), 256)),
        ("Gemma 2 27B", "google/gemma-2-27b", 27227.1, _gemma2((256000, 4608, 36864, 46, 32, 16), 128)),
        ("Phi-3 mini", "microsoft/Phi-3-mini-4k-instruct", 3821.1, _phi3((32064, 3072, 8192, 32, 32, 32), 4096)),
        ("Phi-4", "microsoft/phi-4", 14659.5, _phi3((100352, 5120, 17920, 40, 40, 10), 16384)),
        ("OLMo 2 1B", "allenai/OLMo-2-0425-1B", 1484.9, _olmo2(2048, 8192, 16, 16)),
        ("OLMo 2 7B", "allenai/OLMo-2-1124-7B", 7298.6, _olmo2(4096, 11008, 32, 32)),
        ("OLMo 2 13B", "allenai/OLMo-2-1124-13B", 13716.2, _olmo2(5120, 13824, 40, 40)),
        (
            "Phi-2",
            "microsoft/phi-2",
            2779.7,
            _decoder("phi", "PhiForCausalLM", (51200, 2560, 10240, 32, 32, 32), 2048, partial_rotary_factor=0.4),
        ),
        ("GPT-2", "openai-community/gpt2", 124.4, _gpt2(768, 12, 12)),
        ("GPT-2 medium", "openai-community/gpt2-medium", 354.8, _gpt2(1024, 24, 16)),
        ("GPT-2 large", "openai-community/gpt2-large", 774.0, _gpt2(1280, 36, 20)),
        ("GPT-2 XL", "openai-community/gpt2-xl", 1557.6, _gpt2(1600, 48, 25)),
        ("BERT base", "google-bert/bert-base-uncased", 109.5, _BERT),
        ("ModernBERT base", "answerdotai/ModernBERT-base", 149.6, _modernbert(768, 1152, 22, 12)),
        ("ModernBERT large", "answerdotai/ModernBERT-large", 395.8, _modernbert(1024, 2624, 28, 16)),
        ("ViT-B/16", "google/vit-base-patch16-224", 86.6, _google_vit(768, 12, 12, 16)),
        ("ViT-L/16", "google/vit-large-patch16-224", 304.3, _google_vit(1024, 24, 16, 16)),
        ("ViT-H/14", "google/vit-huge-patch14-224-in21k", 632.0, _google_vit(1280, 32, 16, 14)),
        ("DINOv2 base", "facebook/dinov2-base", 86.6, _dinov2(768, 12, 12)),
        ("DINOv2 large", "facebook/dinov2-large", 304.4, _dinov2(1024, 24, 16)),
        ("DINOv2 giant", "facebook/dinov2-giant", 1136.5, _dinov2(1536, 40, 24, use_swiglu_ffn=True)),
        ("ConvNeXt-T", "facebook/convnext-tiny-224", 28.6, _convnext(9, 96)),
        ("ConvNeXt-B", "facebook/convnext-base-224", 88.6, _convnext(27, 128)),
        ("ConvNeXt-L", "facebook/convnext-large-224", 197.8, _convnext(27, 192)),
        ("Swin-B", "microsoft/swin-base-patch4-window7-224", 87.8, _SWIN_B),
        ("ResNet-50", "microsoft/resnet-50", 25.6, _resnet(3, 4, 6, 3)),
        ("ResNet-152", "microsoft/resnet-152", 60.2, _resnet(3, 8, 36, 3)),
        ("VGG16", "vgg16", 138.4, {}),
        ("DenseNet-121", "densenet121", 7.98, {}),
        ("DenseNet-201", "densenet201", 20.0, {}),
    )
)
