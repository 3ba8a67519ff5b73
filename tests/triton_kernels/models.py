"""The models whose layers are compiled: one of a type on the page of ``memsave fit``.

Models of a type have the same layers, of other widths and heads; DINOv2 giant's MLP is another one.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from known_models import MODELS, KnownModel

from memsave_recipes.tools.fit.subject import IMAGES, LANGUAGE, TEXTS, find_subject

CHOSEN = {
    "gpt2": "GPT-2",
    "llama": "Llama 3.2 1B",
    "vit": "ViT-B/16",
    "bert": "BERT base",
    "qwen3": "Qwen3 0.6B",
    "gemma3_text": "Gemma 3 270M",
    "qwen2": "Qwen2.5 0.5B",
    "mistral": "Mistral 7B v0.3",
    "gemma2": "Gemma 2 2B",
    "phi3": "Phi-3 mini",
    "olmo2": "OLMo 2 1B",
    "phi": "Phi-2",
    "modernbert": "ModernBERT base",
    "dinov2": "DINOv2 base",
    "swin": "Swin-B",
    "convnext": "ConvNeXt-T",
    "resnet": "ResNet-50",
}
"""By type: all that the page has but ``OF_IMAGES_AND_TEXT``, and VGG and DenseNet, whose blocks are in sequence and
never compiled."""
OF_IMAGES_AND_TEXT = {"gemma3", "smolvlm", "qwen3_vl"}
"""Types that read values of their inputs in a forward, which fake tensors do not have."""
LENGTH = 1024
MOST_LAYERS = 7
"""As many layers have one of each kind; the others have the kernels of these."""
LAYERS = ("num_hidden_layers", "n_layer")
NO_DROPOUT = {"bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}}


def model_of_types() -> dict[str, KnownModel]:
    """By type, one of its models."""
    named = {model.name: model for model in MODELS}
    return {kind: named[name] for kind, name in CHOSEN.items()}


def larger_than_smallest() -> list[str]:
    """The chosen models that are not the smallest of their types."""
    least: dict[str, float] = {}
    for model in MODELS:
        if kind := model.config.get("model_type"):
            least[kind] = min(model.parameters_m, least.get(kind, model.parameters_m))
    return [model.name for kind, model in model_of_types().items() if model.parameters_m > least[kind]]


def flags_of(model: KnownModel, folder: Path) -> tuple[str, list[str]]:
    """The recipe of a model, and the flags to train it; ``folder`` is for its configuration."""
    fewer = {name: min(MOST_LAYERS, model.config[name]) for name in LAYERS if name in model.config}
    fewer |= NO_DROPOUT.get(model.config["model_type"], {})
    subject = find_subject(replace(model, config={**model.config, **fewer}).write(folder))
    flags = [*subject.flags, "--global_batch_size", "221"]  # 13 x 17: NOTE [ what grows with tokens ]
    if subject.recipe in (LANGUAGE, TEXTS):
        flags += [f"--{subject.length_flag}", str(min(LENGTH, subject.length or LENGTH))]
    if subject.recipe == IMAGES and subject.image_size is not None:
        flags += ["--image_size", str(subject.image_size)]
    return subject.recipe, flags
