"""The models whose layers are compiled: those on the page of ``memsave fit``, but for some.

VGG and DenseNet have no configuration there: their blocks are in sequence, and plans compile none such.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from known_models import MODELS, KnownModel

from memsave_recipes.tools.fit.subject import IMAGES, LANGUAGE, TEXTS, find_subject

OF_IMAGES_AND_TEXT = {"gemma3", "smolvlm", "qwen3_vl"}
"""Types that read values of their inputs in a forward, which fake tensors do not have."""
LENGTH = 1024
MOST_LAYERS = 7
"""As many layers have one of each kind; the others have the kernels of these."""
LAYERS = ("num_hidden_layers", "n_layer")
NO_DROPOUT = {"bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}}


def compiled_models() -> dict[str, KnownModel]:
    """By name."""
    return {
        model.name: model for model in MODELS if model.config and model.config["model_type"] not in OF_IMAGES_AND_TEXT
    }


def flags_of(model: KnownModel, folder: Path) -> tuple[str, list[str]]:
    """The recipe of a model, and the flags to train it; ``folder`` is for its configuration."""
    fewer = {name: min(MOST_LAYERS, model.config[name]) for name in LAYERS if name in model.config}
    fewer |= NO_DROPOUT.get(model.config["model_type"], {})
    subject = find_subject(replace(model, config={**model.config, **fewer}).write(folder))
    flags = [*subject.flags, "--global_batch_size", "221"]  # 13 x 17: NOTE [ what grows with tokens ]
    if subject.recipe in (LANGUAGE, TEXTS):
        flags += [f"--{subject.length_flag}", str(min(LENGTH, subject.length or LENGTH))]
    if subject.recipe == LANGUAGE:
        flags += ["--loss", "full"]  # in one piece: test_loss.py has the compiled one
    if subject.recipe == IMAGES and subject.image_size is not None:
        flags += ["--image_size", str(subject.image_size)]
    return subject.recipe, flags
