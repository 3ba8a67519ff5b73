"""Forty architectures of the library, chosen for how they differ from one another, each with a batch and a loss."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from zoo.tiny import IMAGE_SIZE, VOCABULARY, tiny_config

LENGTH = 24
CAUSAL = "AutoModelForCausalLM"
SEQ2SEQ = "AutoModelForSeq2SeqLM"
CLASSIFICATION = "AutoModelForSequenceClassification"
IMAGES = "AutoModelForImageClassification"
SEGMENTATION = "AutoModelForSemanticSegmentation"
DEPTH = "AutoModelForDepthEstimation"

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """A model of the library.

    Args:
        auto_class: its name in ``transformers``.
        model_type: the type of its configuration.
        changes: entries of the configuration that the rules of ``tiny_config`` do not set right.
        make_batch: the batch; by default what suits the ``auto_class``.
        seeds: one training step for each of them: several where what a step does is drawn.
    """

    auto_class: str
    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    make_batch: Callable[[], Batch] | None = None
    seeds: tuple[int, ...] = (7,)

    def build(self) -> nn.Module:
        """In training mode, always with the same weights."""
        torch.manual_seed(0)
        config = tiny_config(self.model_type, **self.changes)
        return getattr(transformers, self.auto_class).from_config(config).train()

    def batch(self) -> Batch:
        """Always the same."""
        return (self.make_batch or BATCHES[self.auto_class])()


def mean_loss(output: Any) -> Tensor:
    """The model's own loss; where it has none, of the map that it predicts."""
    loss = getattr(output, "loss", None)
    return output.predicted_depth.square().mean() if loss is None else loss


def tokens(rows: int = 2) -> Tensor:
    """(rows, LENGTH), none of them a special token."""
    return torch.randint(3, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def values(*shape: int) -> Tensor:
    """Standard normal."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def text() -> Batch:
    """Tokens that are their own labels; no cache, as a training has none."""
    return {"input_ids": tokens(), "labels": tokens(), "use_cache": False}


def masked_text() -> Batch:
    """Two texts of unequal length."""
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 7]])).long()
    return {"input_ids": tokens() * mask, "attention_mask": mask, "labels": tokens()}


def labelled_text() -> Batch:
    """Two texts and their classes."""
    return {**masked_text(), "labels": torch.tensor([1, 0])}


def images(size: int = IMAGE_SIZE) -> Batch:
    """Two images and their classes."""
    return {"pixel_values": values(2, 3, size, size), "labels": torch.tensor([1, 0])}


def maps() -> Batch:
    """Two images and a class for each of their pixels."""
    return {**images(), "labels": torch.arange(2 * IMAGE_SIZE**2).view(2, IMAGE_SIZE, IMAGE_SIZE) % 2}


def image_alone() -> Batch:
    """Two images without labels."""
    return {"pixel_values": values(2, 3, IMAGE_SIZE, IMAGE_SIZE)}


def image_and_text() -> Batch:
    """A text that begins with an image of 16 patches."""
    ids = torch.cat([torch.full((2, 16), VOCABULARY - 1), tokens() % (VOCABULARY - 1)], dim=1)
    return {"input_ids": ids, "labels": ids, "pixel_values": values(2, 3, IMAGE_SIZE, IMAGE_SIZE), "use_cache": False}


def speech() -> Batch:
    """Two pieces of sound and what is said."""
    return {"input_values": values(2, 2000), "labels": tokens()[:, :3]}


def spectrum() -> Batch:
    """Two spectra and what is said."""
    return {"input_features": values(2, 16, 40), "labels": tokens(), "use_cache": False}


def video() -> Batch:
    """Two films of four images, and their classes."""
    return {"pixel_values": values(2, 4, 3, IMAGE_SIZE, IMAGE_SIZE), "labels": torch.tensor([1, 0])}


BATCHES: dict[str, Callable[[], Batch]] = {
    CAUSAL: text,
    SEQ2SEQ: text,
    "AutoModelForMaskedLM": masked_text,
    CLASSIFICATION: labelled_text,
    IMAGES: images,
    SEGMENTATION: maps,
    DEPTH: image_alone,
    "AutoModelForImageTextToText": image_and_text,
    "AutoModelForCTC": speech,
    "AutoModelForSpeechSeq2Seq": spectrum,
    "AutoModelForVideoClassification": video,
}

DRAWN = tuple(range(6))  # LayerDrop skips layers in some of them
STAGES = {"hidden_sizes": [16, 32, 32, 64], "depths": [2, 2, 2, 2]}
HEADS_OF_STAGES = {"num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 32}
SMALL_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32, 32, 64], "depths": [1, 2, 2, 1]}

causal = partial(Architecture, CAUSAL)
masked = partial(Architecture, "AutoModelForMaskedLM")
seq2seq = partial(Architecture, SEQ2SEQ)
classes = partial(Architecture, CLASSIFICATION)
picture = partial(Architecture, IMAGES)

ARCHITECTURES: dict[str, Architecture] = {
    # causal language models
    "gpt2": causal("gpt2"),
    "llama": causal("llama"),
    "bloom: ALiBi": causal("bloom"),
    "falcon: attention beside the MLP": causal("falcon"),
    "opt: LayerDrop": causal("opt", {"layerdrop": 0.3, "word_embed_proj_dim": 32}, seeds=DRAWN),
    "mixtral: mixture of experts": causal("mixtral"),
    "gpt_oss: experts, attention sinks": causal(
        "gpt_oss", {"layer_types": ["sliding_attention", "full_attention"] * 2}
    ),
    "mamba: state space": causal("mamba", {"time_step_rank": 4}),
    "rwkv: recurrent": causal("rwkv", {"attention_hidden_size": 32}),
    "falcon_h1: attention and state space": causal(
        "falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}
    ),
    "recurrent_gemma: hybrid": causal("recurrent_gemma", {"lru_width": 32, "num_attention_heads": 4}),
    "qwen3_next: linear attention, experts": causal(
        "qwen3_next",
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
    ),
    "zamba2: shared layers": causal(
        "zamba2",
        {
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "adapter_rank": 4,
            "n_mamba_heads": 4,
            "mamba_headdim": 16,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
        },
    ),
    "hrm_text: layers in cycles": causal("hrm_text", {"num_layers_per_stack": 2}),
    "inkling2_text: reads earlier states": causal(
        "inkling2_text", {"n_layers_per_attn_res_block": 2, "d_rel": 4, "rel_extent": 8}
    ),
    "gemma3: text alone": causal(
        "gemma3", {"text_config": {"model_type": "gemma3_text"}, "vision_config": {"model_type": "siglip_vision_model"}}
    ),
    # masked language models
    "bert": masked("bert"),
    "modernbert": masked("modernbert"),
    "albert: one layer for all": masked("albert", {"embedding_size": 16}),
    "deberta-v2: relative positions": masked(
        "deberta-v2", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    ),
    "mpnet: layers called by keyword": masked("mpnet"),
    # sequence to sequence
    "t5": seq2seq("t5", {"decoder_start_token_id": 0}),
    "bart: LayerDrop": seq2seq("bart", {"encoder_layerdrop": 0.3, "decoder_layerdrop": 0.3}, seeds=DRAWN),
    "m2m_100: LayerDrop": seq2seq("m2m_100", seeds=DRAWN),
    # sequence classification
    "funnel: shortens the sequence": classes("funnel", {"block_sizes": [2, 2]}),
    "xlnet: two streams": classes("xlnet"),
    # images
    "vit": picture("vit", {"patch_size": 8}),
    "resnet: BatchNorm": picture("resnet", SMALL_RESNET),
    "mobilevit: BatchNorm": picture(
        "mobilevit", {"neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "hidden_sizes": [16, 24, 32]}
    ),
    "swin: windows": picture(
        "swin", {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}
    ),
    "poolformer: lists of lists": picture("poolformer", STAGES),
    "pvt: lists of lists": picture("pvt", {**STAGES, "num_attention_heads": [1, 2, 2, 4]}),
    # maps
    "beit: reads single layers": Architecture(SEGMENTATION, "beit", {"out_indices": [1, 2, 3, 4]}),
    "upernet: U-shaped": Architecture(
        SEGMENTATION,
        "upernet",
        {
            "backbone_config": {
                "model_type": "resnet",
                **SMALL_RESNET,
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
            },
            "auxiliary_channels": 16,
        },
    ),
    "dpt: reads single layers": Architecture(
        DEPTH,
        "dpt",
        {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 16, 32, 32], "fusion_hidden_size": 16},
    ),
    "glpn: lists of lists": Architecture(DEPTH, "glpn", {**STAGES, **HEADS_OF_STAGES}),
    # several kinds of data
    "llava: an image and text": Architecture(
        "AutoModelForImageTextToText",
        "llava",
        {
            "text_config": {"model_type": "llama"},
            "vision_config": {"model_type": "clip_vision_model"},
            "image_token_index": VOCABULARY - 1,
        },
    ),
    "wav2vec2: LayerDrop": Architecture(
        "AutoModelForCTC",
        "wav2vec2",
        {
            "apply_spec_augment": False,
            "conv_dim": [16] * 7,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
        },
        seeds=DRAWN,
    ),
    "whisper": Architecture(
        "AutoModelForSpeechSeq2Seq",
        "whisper",
        {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 40},
    ),
    "videomae: films": Architecture("AutoModelForVideoClassification", "videomae", {"num_frames": 4, "patch_size": 8}),
}
