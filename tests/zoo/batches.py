"""A batch for every kind of model, always the same, by the name of its auto class or by its type."""

from collections.abc import Callable

import torch
from torch import Tensor
from zoo.tiny import IMAGE_SIZE, VOCABULARY

LENGTH = 24
CAUSAL = "AutoModelForCausalLM"
MASKED = "AutoModelForMaskedLM"
SEQ2SEQ = "AutoModelForSeq2SeqLM"
CLASSIFICATION = "AutoModelForSequenceClassification"
IMAGES = "AutoModelForImageClassification"
SEGMENTATION = "AutoModelForSemanticSegmentation"
DEPTH = "AutoModelForDepthEstimation"
SPEECH_SEQ2SEQ = "AutoModelForSpeechSeq2Seq"
CTC = "AutoModelForCTC"

Batch = dict[str, Tensor]


def tokens(rows: int = 2) -> Tensor:
    """(rows, LENGTH), none of them a special token."""
    return torch.randint(3, VOCABULARY - 3, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


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
    """Two texts, which end in the token of their end, and their classes."""
    batch = masked_text()
    ends = batch["attention_mask"].sum(dim=1) - 1
    ids = batch["input_ids"].scatter(1, ends[:, None], 2)
    return {**batch, "input_ids": ids, "labels": torch.tensor([1, 0])}


def pixels() -> Batch:
    """Two sequences of colours, and their classes."""
    return {"input_ids": tokens(), "labels": torch.tensor([1, 0])}


def images(size: int = IMAGE_SIZE) -> Batch:
    """Two images and their classes."""
    return {"pixel_values": values(2, 3, size, size), "labels": torch.tensor([1, 0])}


def patches() -> Batch:
    """Two images as 16 patches each, and their classes."""
    return {
        "pixel_values": values(2, 16, 3 * 8 * 8),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
        "labels": torch.tensor([1, 0]),
    }


def maps(size: int = IMAGE_SIZE) -> Batch:
    """Two images and a class for each of their pixels."""
    return {**images(size), "labels": torch.arange(2 * size**2).view(2, size, size) % 2}


def image_alone() -> Batch:
    """Two images without labels."""
    return {"pixel_values": values(2, 3, IMAGE_SIZE, IMAGE_SIZE)}


def image_and_text() -> Batch:
    """A text that begins with an image of 64 patches."""
    ids = torch.cat([torch.full((2, 64), VOCABULARY - 1), tokens() % (VOCABULARY - 1)], dim=1)
    return {"input_ids": ids, "labels": ids, "pixel_values": values(2, 3, IMAGE_SIZE, IMAGE_SIZE), "use_cache": False}


def speech() -> Batch:
    """Two pieces of sound and what is said."""
    return {"input_values": values(2, 2000), "labels": tokens()[:, :3]}


def frames(length: int = 40) -> Batch:
    """Two spectra, frame by frame, and what is said."""
    return {"input_features": values(2, length, 16), "labels": tokens()[:, :3]}


def masked_frames() -> Batch:
    """The same with a mask."""
    return {**frames(80), "attention_mask": torch.ones(2, 80, dtype=torch.long)}


def sound_and_text() -> Batch:
    """Two pieces of sound, and a text that is its own labels."""
    return {"input_values": values(2, 2000), "labels": tokens(), "use_cache": False}


def spectrum() -> Batch:
    """Two spectra and what is said."""
    return {"input_features": values(2, 16, 40), "labels": tokens(), "use_cache": False}


def frames_and_text() -> Batch:
    """The same, frame by frame."""
    return {"input_features": values(2, 40, 16), "labels": tokens(), "use_cache": False}


def video() -> Batch:
    """Two films of four images, and their classes."""
    return {"pixel_values": values(2, 4, 3, IMAGE_SIZE, IMAGE_SIZE), "labels": torch.tensor([1, 0])}


BATCHES: dict[str, Callable[[], Batch]] = {
    CAUSAL: text,
    SEQ2SEQ: text,
    MASKED: masked_text,
    CLASSIFICATION: labelled_text,
    IMAGES: images,
    SEGMENTATION: maps,
    DEPTH: image_alone,
    "AutoModelForImageTextToText": image_and_text,
    CTC: speech,
    SPEECH_SEQ2SEQ: spectrum,
    "AutoModelForVideoClassification": video,
}
BATCHES_OF_TYPES: dict[tuple[str, str], Callable[[], Batch]] = {
    (IMAGES, "imagegpt"): pixels,
    (IMAGES, "siglip2"): patches,
    (IMAGES, "mobilevitv2"): lambda: images(128),
    (SEGMENTATION, "mobilevitv2"): lambda: maps(128),
    (CTC, "lasr_ctc"): masked_frames,
    (CTC, "parakeet_ctc"): masked_frames,
    (CTC, "granite_speech5_ctc"): masked_frames,
    (CTC, "wav2vec2-bert"): frames,
    (SPEECH_SEQ2SEQ, "moonshine"): sound_and_text,
    (SPEECH_SEQ2SEQ, "moonshine_streaming"): sound_and_text,
    (SPEECH_SEQ2SEQ, "speech-encoder-decoder"): sound_and_text,
    (SPEECH_SEQ2SEQ, "speech_to_text"): frames_and_text,
    (SPEECH_SEQ2SEQ, "canary"): frames_and_text,
    (SPEECH_SEQ2SEQ, "cohere_asr"): frames_and_text,
    (SPEECH_SEQ2SEQ, "seamless_m4t"): lambda: frames_and_text() | {"input_features": values(2, 40, 160)},
    (SPEECH_SEQ2SEQ, "seamless_m4t_v2"): lambda: frames_and_text() | {"input_features": values(2, 40, 160)},
    (SPEECH_SEQ2SEQ, "pop2piano"): lambda: frames_and_text() | {"input_features": values(2, 40, 32)},
    **{
        (SPEECH_SEQ2SEQ, name): text
        for name in ("granite_speech", "granite_speech_plus", "qwen3_asr", "vibevoice", "vibevoice_asr", "voxtral")
    },
}


def batch_of(auto_class: str, model_type: str) -> Batch:
    """Always the same."""
    return BATCHES_OF_TYPES.get((auto_class, model_type), BATCHES[auto_class])()
