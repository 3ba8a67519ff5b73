"""Tiny configurations of the library's models: every entry that says how large something is, by its name."""

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY = 96
IMAGE_SIZE = 64

WIDTH = ("hidden_size", "d_model", "n_embd", "dim", "decoder_hidden_size")
INNER = ("intermediate_size", "d_inner", "d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
SIZES: dict[str, Any] = {
    **dict.fromkeys(WIDTH, 32),
    **dict.fromkeys(INNER, 48),
    **dict.fromkeys((name.replace("num", "decoder_num") for name in ("num_attention_heads", "num_hidden_layers")), 2),
    **dict.fromkeys(HEADS, 4),
    **dict.fromkeys(LAYERS, 4),
    **dict.fromkeys(("num_key_value_heads", "num_decoder_layers", "num_experts_per_tok"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "sliding_window", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "context_length"), 64),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id", "forced_eos_token_id"), 2),
    "decoder_intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "image_size": IMAGE_SIZE,
    "patch_size": 16,
}
DROPOUT = ("dropout", "drop", "pdrop")


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of ``model_type`` with tiny sizes and a dropout of 0.1; ``changes`` are its own entries.

    A change that is a dictionary with a ``model_type`` is the tiny configuration of a part (a vision tower, say).
    """
    defaults = CONFIG_MAPPING[model_type]().to_dict()
    entries = {
        name: size for name, size in SIZES.items() if isinstance(defaults.get(name, size), int) and name in defaults
    }
    entries |= {name: SIZES[name] for name in defaults if name.endswith("_token_id") and name in SIZES}
    entries |= {name: 0.1 for name, value in defaults.items() if _is_dropout(name, value)}
    parts = {
        name: tiny_config(**part) for name, part in changes.items() if isinstance(part, dict) and "model_type" in part
    }
    return CONFIG_MAPPING[model_type](**{**entries, **changes, **parts})


def _is_dropout(name: str, value: Any) -> bool:
    is_rate = isinstance(value, int | float) and not isinstance(value, bool)
    return is_rate and ("dropout" in name or "pdrop" in name)
