"""The model that ``memsave fit`` is asked for: its recipe, and the flags of the recipe that name it."""

import os
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from memsave_recipes.core.errors import InputError
from memsave_recipes.models.hub import ask_hub_for, reason
from memsave_recipes.models.image_classifiers import MODELS, read_convnet
from memsave_recipes.models.pretrained import LOADING_ERRORS, check_configuration
from memsave_recipes.models.saved import IMAGE_TEXT, KINDS

IMAGES, TEXTS, LANGUAGE = "image_classification", "text_classification", "language_modeling"
IMAGES_AND_TEXT = "image_text"
RECIPES = {"image-classification": IMAGES, "text-classification": TEXTS, "text-generation": LANGUAGE}
CONFIG = "config.json"
LENGTHS = {TEXTS: 512, LANGUAGE: 2048, IMAGES_AND_TEXT: 2048}
LENGTH_FLAGS = {TEXTS: "max_length", LANGUAGE: "block_size", IMAGES_AND_TEXT: "block_size"}
PIXELS = 224
HINT = "name a folder with a config.json, a type of transformers such as llama, one of ours such as vgg16, or a Hub id"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to train: the name of its recipe, and the flags of the recipe that name it.

    Args:
        is_pretrained: whether it has weights to start from.
        length, image_size: of its samples by default; ``None`` where it has no such size.
        remarks: sentences about it.
    """

    recipe: str
    flags: tuple[str, ...]
    is_pretrained: bool = False
    length: int | None = None
    image_size: int | None = None
    remarks: tuple[str, ...] = ()

    @property
    def length_flag(self) -> str:
        """The recipe's flag for ``length``."""
        return LENGTH_FLAGS.get(self.recipe, "")


def find_subject(word: str) -> Subject:
    """Return the model that ``word`` names: a folder or its config.json, one of ours, a type of transformers, a Hub id.

    Raises:
        InputError: no such model, or no recipe trains it.
    """
    path = Path(word)
    if os.path.isfile(path):
        if path.name != CONFIG:
            raise InputError(f"MODEL {word} is a file: {HINT}")
        word = str(path.parent)
    if os.path.isdir(word):
        return _in_folder(word)
    if word in MODELS:
        return Subject(recipe=IMAGES, flags=("--model", word), image_size=PIXELS)
    if word in CONFIG_MAPPING:
        config = AutoConfig.for_model(word)
        remark = f"{word}: a model from scratch, of the sizes that transformers gives the type"
        subject = _configured(word, config, flags=("--model_type", word), remarks=(remark,))
        if subject.recipe == IMAGES_AND_TEXT:
            raise InputError(
                f"MODEL {word}: a type has no processor of images: name a folder that has one, or a Hub id"
            )
        vocabulary = getattr(config, "vocab_size", None)
        if subject.recipe == IMAGES or vocabulary is None:
            return subject
        return replace(subject, flags=(*subject.flags, "--config_overrides", f"vocab_size={vocabulary}"))
    return _pretrained(word)


def _in_folder(folder: str) -> Subject:
    if not os.path.isfile(os.path.join(folder, CONFIG)):
        raise InputError(f"MODEL {folder} has no {CONFIG}: {HINT}")
    saved = read_convnet(folder)
    if saved is not None:
        flags = ("--model_name_or_path", folder)
        return Subject(recipe=IMAGES, flags=flags, is_pretrained=True, image_size=saved.image_size)
    has_weights = any(Path(folder).glob("*.safetensors"))
    remark = f"{folder} has no weights (*.safetensors): put them there before launching"
    return _pretrained(folder, () if has_weights else (remark,))


def _pretrained(word: str, remarks: tuple[str, ...] = ()) -> Subject:
    ask_hub_for(word)
    try:
        config = AutoConfig.from_pretrained(word, trust_remote_code=False)
        check_configuration(config)
    except LOADING_ERRORS as error:
        brings_code = "trust_remote_code" in str(error)
        why = "it brings code of its own, which is not run" if brings_code else reason(error)
        raise InputError(f"MODEL {word} cannot be read: {why}; {HINT}") from error
    return _configured(word, config, flags=("--model_name_or_path", word), is_pretrained=True, remarks=remarks)


def _configured(word: str, config: Any, **known: Any) -> Subject:
    """Add what a configuration says of a model: its recipe and the sizes of its samples."""
    recipe = _recipe_of(word, config)
    if recipe == IMAGES:
        size = getattr(config, "image_size", None)
        return Subject(recipe=recipe, image_size=size if isinstance(size, int) and size > 0 else PIXELS, **known)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    has_fewer = isinstance(positions, int) and 0 < positions < LENGTHS[recipe]
    return Subject(recipe=recipe, length=positions if has_fewer else LENGTHS[recipe], **known)


def _recipe_of(word: str, config: Any) -> str:
    """Name the recipe by the classes in ``architectures``, else by the type.

    A type that has a masked language model is an encoder, which is trained as a text classifier. What has a vision
    tower beside its text model is trained on images and text.
    """
    if config.model_type in KINDS[IMAGE_TEXT][1] and hasattr(config, "vision_config"):
        return IMAGES_AND_TEXT
    named, kind = set(config.architectures or ()), config.model_type
    kinds = {task: classes for task, (_, classes) in KINDS.items() if task in RECIPES}
    for task, classes in kinds.items():
        if named & set(chain.from_iterable([one] if isinstance(one, str) else one for one in classes.values())):
            return RECIPES[task]
    types = [task for task, classes in kinds.items() if kind in classes]
    if "text-generation" in types and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return LANGUAGE
    if not types:
        raise InputError(
            f"MODEL {word} is of type {kind}, which no recipe trains: take a causal language model, a model of images "
            "and text, or one that classifies texts or images"
        )
    return RECIPES[types[0]]
