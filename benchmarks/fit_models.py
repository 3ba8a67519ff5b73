"""Nine models by their configurations, for ``memsave fit``: entries and sizes are those of the published config.json.

Entries that name tokens, initialise weights or generate text are left out: they change no size. VGG and DenseNet are
torchvision's, which ``memsave`` knows by name.
"""

import json
from pathlib import Path
from typing import Any

CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {  # meta-llama/Llama-3.1-8B
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "Qwen3-4B": {  # Qwen/Qwen3-4B
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
    },
    "Gemma-3-4B": {  # google/gemma-3-4b-pt, its text_config
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "Mistral-7B": {  # mistralai/Mistral-7B-v0.1
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "ModernBERT-base": {  # answerdotai/ModernBERT-base
        "architectures": ["ModernBertForMaskedLM"],
        "model_type": "modernbert",
        "vocab_size": 50368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "global_attn_every_n_layers": 3,
        "local_attention": 128,
        "max_position_embeddings": 8192,
    },
    "ViT-L-16-384": {  # google/vit-large-patch16-384
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 16,
    },
    "ConvNeXt-L": {  # facebook/convnext-large-224
        "architectures": ["ConvNextForImageClassification"],
        "model_type": "convnext",
        "depths": [3, 3, 27, 3],
        "hidden_sizes": [192, 384, 768, 1536],
        "image_size": 224,
    },
}
BY_NAME = {"VGG16": "vgg16", "DenseNet-201": "densenet201"}
MODELS = (*CONFIGS, *BY_NAME)


def write(name: str, folder: Path, **changes: Any) -> str:
    """The word that ``memsave fit`` takes for a model: its folder below ``folder``, or its name.

    Args:
        changes: entries of its configuration.
    """
    if name in BY_NAME:
        return BY_NAME[name]
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIGS[name] | changes, indent=1), encoding="utf-8")
    return str(path)
