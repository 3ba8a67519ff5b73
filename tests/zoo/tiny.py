"""Tiny configurations of the library's models: every entry that says how large something is, by its name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from zoo.exceptions import CHANGES

VOCABULARY = 96
IMAGE_SIZE = 64

WIDTH = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "decoder_hidden_size", "embedding_dim")
INNER = ("intermediate_size", "d_inner", "d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "dim_ff")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
LATENT = ("q_lora_rank", "kv_lora_rank", "o_lora_rank")
SIZES: dict[str, Any] = {
    **dict.fromkeys(WIDTH, 32),
    **dict.fromkeys(INNER, 48),
    **dict.fromkeys((name.replace("num", "decoder_num") for name in ("num_attention_heads", "num_hidden_layers")), 2),
    **dict.fromkeys(HEADS, 4),
    **dict.fromkeys(LAYERS, 4),
    **dict.fromkeys(("num_key_value_heads", "num_decoder_layers", "num_experts_per_tok"), 2),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "sliding_window", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(LATENT, 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "context_length", "n_ctx"), 64),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id", "forced_eos_token_id"), 2),
    **dict.fromkeys(("n_group", "num_group", "topk_group"), 1),
    **dict.fromkeys(("num_kv_shared_layers", "first_k_dense_replace"), 1),
    **dict.fromkeys(("hidden_size_per_layer_input", "rotary_dim"), 8),
    **dict.fromkeys(("vocab_size_per_layer_input", "src_vocab_size", "tgt_vocab_size"), VOCABULARY),
    **dict.fromkeys(("image_token_id", "image_token_index"), VOCABULARY - 1),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), VOCABULARY - 2),
    **dict.fromkeys(("video_token_id", "video_token_index"), VOCABULARY - 3),
    "moe_k": 2,
    "qk_head_dim": 16,
    "decoder_intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "image_size": IMAGE_SIZE,
    "patch_size": 8,
    "num_mel_bins": 16,
}


@dataclass(frozen=True)
class Rules:
    """The sizes of entries by their names, and by model type the entries that these do not set right."""

    sizes: Mapping[str, Any]
    changes: Mapping[str, Mapping[str, Any]]


RULES = Rules(SIZES, CHANGES)


def tiny_config(model_type: str, rules: Rules = RULES, **changes: Any) -> PreTrainedConfig:
    """The configuration of ``model_type`` with tiny sizes and a dropout of 0.1; ``changes`` are its own entries.

    A part (a vision tower, say) is tiny, too; a change that is a dictionary with a ``model_type`` chooses the part, and
    one without changes its entries. Types that the rules do not suit have their own entries in ``exceptions.py``.
    """
    return _tiny(CONFIG_MAPPING[model_type], {**rules.changes.get(model_type, {}), **changes}, rules)


def _tiny(kind: type[PreTrainedConfig], changes: dict[str, Any], rules: Rules) -> PreTrainedConfig:
    default = kind()
    entries = _sizes(default.to_dict(), rules.sizes)
    for name, part in vars(default).items():
        if isinstance(part, PreTrainedConfig) and name not in changes:
            entries[name] = _tiny_part(type(part), {}, rules)
    for name, value in changes.items():
        is_part = isinstance(value, dict)
        entries[name] = _tiny_part(type(getattr(default, name, None)), value, rules) if is_part else value
    return kind(**entries)


def _tiny_part(kind: type, changes: dict[str, Any], rules: Rules) -> Any:
    """A part of a configuration; a dictionary that is none stays as it is."""
    if model_type := changes.get("model_type"):
        return tiny_config(**changes, rules=rules) if model_type in CONFIG_MAPPING else changes
    if not issubclass(kind, PreTrainedConfig):
        return changes
    return _tiny(kind, {**rules.changes.get(kind.model_type, {}), **changes}, rules)


def _sizes(defaults: dict[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Of the entries of a configuration, those that a rule knows."""
    entries = {
        name: size for name, size in sizes.items() if isinstance(defaults.get(name, size), int) and name in defaults
    }
    entries |= {name: sizes[name] for name in defaults if name.endswith("_token_id") and name in sizes}
    if "kv_lora_rank" in defaults and "num_key_value_heads" in defaults:  # multi-head latent attention
        entries["num_key_value_heads"] = entries["num_attention_heads"]
    return entries | {name: 0.1 for name, value in defaults.items() if _is_dropout(name, value)}


def _is_dropout(name: str, value: Any) -> bool:
    is_rate = isinstance(value, int | float) and not isinstance(value, bool)
    return is_rate and ("dropout" in name or "pdrop" in name)
