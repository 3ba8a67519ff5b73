"""Every architecture that the installed libraries build from a configuration, family by family.

A family is an auto class of transformers with all its model types, or timm or diffusers, where these are installed.
"""

import importlib.util

from transformers.models.auto import modeling_auto
from zoo.architectures import Architecture, Model
from zoo.image_text import IMAGE_TEXT, ImageText, InPart
from zoo.other_libraries import DIFFUSERS, TIMM

MAPPINGS = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSemanticSegmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "AutoModelForCTC": "MODEL_FOR_CTC_MAPPING_NAMES",
}
OTHERS = {"timm": TIMM, "diffusers": DIFFUSERS}


def families() -> dict[str, dict[str, Model]]:
    """Family to the name of each of its types to the model."""
    found: dict[str, dict[str, Model]] = {
        auto_class: {name: Architecture(auto_class, name) for name in getattr(modeling_auto, mapping)}
        for auto_class, mapping in MAPPINGS.items()
    }
    of_images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    found[IMAGE_TEXT] = {name: ImageText(IMAGE_TEXT, name) for name in of_images}
    found[f"{IMAGE_TEXT} --freeze vision"] = {name: InPart(IMAGE_TEXT, name) for name in of_images}
    found[f"{IMAGE_TEXT} --lora"] = {name: InPart(IMAGE_TEXT, name, lora=True) for name in of_images}
    return found | {library: dict(models) for library, models in OTHERS.items() if importlib.util.find_spec(library)}
