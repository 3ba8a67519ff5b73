"""A model by one word: the recipe that trains it, and the flags that name it there.

NOTE [ which recipe ]
The classes that a configuration names (``architectures``) decide, else its type. A type that has a masked language
model is an encoder, and is trained as a text classifier.
"""

import os
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from memsave_recipes.errors import InputError
from memsave_recipes.hub import ask_hub_for, reason
from memsave_recipes.models.image_classifiers import MODELS, read_convnet
from memsave_recipes.models.pretrained import LOADING_ERRORS
from memsave_recipes.models.saved import KINDS

IMAGES, TEXTS, LANGUAGE = "image_classification", "text_classification", "language_modeling"
RECIPES = {"image-classification": IMAGES, "text-classification": TEXTS, "text-generation": LANGUAGE}
CONFIG = "config.json"
LENGTHS = {TEXTS: 512, LANGUAGE: 2048}
LENGTH_FLAGS = {TEXTS: "max_length", LANGUAGE: "block_size"}
PIXELS = 224
WAYS = "name a folder with a config.json, a type of transformers such as llama, one of ours such as vgg16, or a Hub id"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that is to be trained.

    Args:
        recipe: the name of its recipe.
        flags: of the recipe, that name the model; one from scratch has its own vocabulary.
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
    """The model that ``word`` names: a folder or its config.json, a model of ours, a type of transformers, a Hub id.

    Raises:
        InputError: no such model, or no recipe trains it.
    """
    path = Path(word)
    if os.path.isfile(path):
        if path.name != CONFIG:
            raise InputError(f"MODEL {word} is a file: {WAYS}")
        word = str(path.parent)
    if os.path.isdir(word):
        return _in_folder(word)
    if word in MODELS:
        return Subject(recipe=IMAGES, flags=("--model", word), image_size=PIXELS)
    if word in CONFIG_MAPPING:
        return _by_type(word)
    return _pretrained(word, _configuration(word))


def _in_folder(folder: str) -> Subject:
    if not os.path.isfile(os.path.join(folder, CONFIG)):
        raise InputError(f"MODEL {folder} has no {CONFIG}: {WAYS}")
    saved = read_convnet(folder)
    if saved is not None:
        flags = ("--model_name_or_path", folder)
        return Subject(recipe=IMAGES, flags=flags, is_pretrained=True, image_size=saved.image_size)
    has_weights = any(Path(folder).glob("*.safetensors"))
    remark = f"{folder} has no weights (*.safetensors): put them there before launching"
    return _pretrained(folder, _configuration(folder), () if has_weights else (remark,))


def _pretrained(word: str, config: Any, remarks: tuple[str, ...] = ()) -> Subject:
    recipe = _recipe_of(word, config)
    return Subject(
        recipe=recipe,
        flags=("--model_name_or_path", word),
        is_pretrained=True,
        length=_length(recipe, config),
        image_size=_image_size(recipe, config),
        remarks=remarks,
    )


def _by_type(word: str) -> Subject:
    config = AutoConfig.for_model(word)
    recipe = _recipe_of(word, config)
    vocabulary = getattr(config, "vocab_size", None)
    named = () if recipe == IMAGES or vocabulary is None else ("--vocab_size", str(vocabulary))
    return Subject(
        recipe=recipe,
        flags=("--model_type", word, *named),
        length=_length(recipe, config),
        image_size=_image_size(recipe, config),
        remarks=(f"{word}: a model from scratch, of the sizes that transformers gives the type",),
    )


def _configuration(word: str) -> Any:
    """
    Raises:
        InputError: it cannot be read, or is neither at hand nor on a Hub that answers.
    """
    ask_hub_for(word)
    try:
        return AutoConfig.from_pretrained(word)
    except LOADING_ERRORS as error:
        raise InputError(f"MODEL {word} cannot be read: {reason(error)}; {WAYS}") from error


def _recipe_of(word: str, config: Any) -> str:
    """NOTE [ which recipe ]."""
    named, kind = set(config.architectures or ()), config.model_type
    for task, (_, classes) in KINDS.items():
        if named & set(chain.from_iterable([one] if isinstance(one, str) else one for one in classes.values())):
            return RECIPES[task]
    types = [task for task, (_, classes) in KINDS.items() if kind in classes]
    if "text-generation" in types and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return LANGUAGE
    if not types:
        raise InputError(
            f"MODEL {word} is of type {kind}, which no recipe trains: take a causal language model, or a model that "
            "classifies texts or images"
        )
    return RECIPES[types[0]]


def _length(recipe: str, config: Any) -> int | None:
    """The recipe's default, or as many positions as the model has, if these are fewer."""
    if recipe not in LENGTHS:
        return None
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(LENGTHS[recipe], positions) if isinstance(positions, int) and positions > 0 else LENGTHS[recipe]


def _image_size(recipe: str, config: Any) -> int | None:
    if recipe != IMAGES:
        return None
    size = getattr(config, "image_size", None)
    return size if isinstance(size, int) and size > 0 else PIXELS
