"""Forty architectures of the library, chosen for how they differ from one another, each with a batch and a loss."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from zoo.batches import (
    CAUSAL,
    CLASSIFICATION,
    CTC,
    DEPTH,
    IMAGES,
    MASKED,
    SEGMENTATION,
    SEQ2SEQ,
    SPEECH_SEQ2SEQ,
    Batch,
    batch_of,
)
from zoo.tiny import tiny_config


class Model(Protocol):
    """A model to try, each time the same; it takes a step for each of the seeds."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """One step for each."""

    def build(self) -> nn.Module:
        """In training mode."""

    def batch(self) -> Batch:
        """The arguments of a forward."""


@dataclass(frozen=True)
class Architecture:
    """A model of transformers.

    Args:
        auto_class: its name in ``transformers``.
        model_type: the type of its configuration.
        changes: entries of the configuration that the rules of ``tiny_config`` do not set right.
        seeds: one training step for each of them: several where what a step does is drawn.
    """

    auto_class: str
    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (7,)

    def build(self) -> nn.Module:
        """In training mode, always with the same weights."""
        torch.manual_seed(0)
        config = tiny_config(self.model_type, **self.changes)
        return getattr(transformers, self.auto_class).from_config(config).train()

    def batch(self) -> Batch:
        """Always the same."""
        return batch_of(self.auto_class, self.model_type)


def mean_loss(output: Any) -> Tensor:
    """The model's own loss; where it has none, of the first tensor that it returns."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    return next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)).square().mean()


DRAWN = tuple(range(6))  # LayerDrop skips layers in some of them

causal = partial(Architecture, CAUSAL)
masked = partial(Architecture, MASKED)
seq2seq = partial(Architecture, SEQ2SEQ)
classes = partial(Architecture, CLASSIFICATION)
picture = partial(Architecture, IMAGES)

ARCHITECTURES: dict[str, Architecture] = {
    # causal language models
    "gpt2": causal("gpt2"),
    "llama": causal("llama"),
    "bloom: ALiBi": causal("bloom"),
    "falcon: attention beside the MLP": causal("falcon"),
    "opt: LayerDrop": causal("opt", {"layerdrop": 0.3}, seeds=DRAWN),
    "mixtral: mixture of experts": causal("mixtral"),
    "gpt_oss: experts, attention sinks": causal("gpt_oss"),
    "mamba: state space": causal("mamba"),
    "rwkv: recurrent": causal("rwkv"),
    "falcon_h1: attention and state space": causal("falcon_h1"),
    "recurrent_gemma: hybrid": causal("recurrent_gemma"),
    "qwen3_next: linear attention, experts": causal("qwen3_next"),
    "zamba2: shared layers": causal("zamba2"),
    "hrm_text: layers in cycles": causal("hrm_text"),
    "inkling2_text: reads earlier states": causal("inkling2_text"),
    "gemma3: text alone": causal("gemma3"),
    # masked language models
    "bert": masked("bert"),
    "modernbert": masked("modernbert"),
    "albert: one layer for all": masked("albert"),
    "deberta-v2: relative positions": masked("deberta-v2"),
    "mpnet: layers called by keyword": masked("mpnet"),
    # sequence to sequence
    "t5": seq2seq("t5"),
    "bart: LayerDrop": seq2seq("bart", {"encoder_layerdrop": 0.3, "decoder_layerdrop": 0.3}, seeds=DRAWN),
    "m2m_100: LayerDrop": seq2seq("m2m_100", seeds=DRAWN),
    # sequence classification
    "funnel: shortens the sequence": classes("funnel"),
    "xlnet: two streams": classes("xlnet"),
    # images
    "vit": picture("vit"),
    "resnet: BatchNorm": picture("resnet"),
    "mobilevit: BatchNorm": picture("mobilevit"),
    "swin: windows": picture("swin"),
    "poolformer: lists of lists": picture("poolformer"),
    "pvt: lists of lists": picture("pvt"),
    # maps
    "beit: reads single layers": Architecture(SEGMENTATION, "beit"),
    "upernet: U-shaped": Architecture(SEGMENTATION, "upernet"),
    "dpt: reads single layers": Architecture(DEPTH, "dpt"),
    "glpn: lists of lists": Architecture(DEPTH, "glpn"),
    # several kinds of data
    "llava: an image and text": Architecture("AutoModelForImageTextToText", "llava"),
    "wav2vec2: LayerDrop": Architecture(CTC, "wav2vec2", seeds=DRAWN),
    "whisper": Architecture(SPEECH_SEQ2SEQ, "whisper"),
    "videomae: films": Architecture("AutoModelForVideoClassification", "videomae"),
}
