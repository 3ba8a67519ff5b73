"""``config.json`` of a saved VGG or DenseNet: enough to build it again, with the names of its classes.

Keys are those of timm (``architecture``, ``num_classes``) and transformers (``id2label``, ``image_size``, ``dtype``).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memsave_recipes.text import read_json, sanitized

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class ConvnetConfig:
    """What ``MODELS[architecture]`` was trained for.

    Attributes:
        architecture: such as ``vgg16``.
        label_names: in the order of the logits.
        image_size: side of the training images, in pixels.
        dtype: of the parameters.
    """

    architecture: str
    label_names: tuple[str, ...]
    image_size: int
    dtype: torch.dtype

    def save(self, folder: Path) -> None:
        """Write ``config.json`` into ``folder``."""
        content = {
            "architecture": self.architecture,
            "num_classes": len(self.label_names),
            "id2label": dict(enumerate(self.label_names)),
            "image_size": self.image_size,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: str | Path) -> "ConvnetConfig | None":
        """Of a folder that ``save`` has written; ``None`` where it is another one."""
        try:
            content = sanitized(read_json(Path(folder, CONFIG).read_text(encoding="utf-8")))
        except (OSError, ValueError):  # the Hub's names are no folders; damaged files are told by their loaders
            return None
        match content:
            case {"architecture": str(name), "id2label": dict(names), "image_size": int(size), "dtype": str(dtype)}:
                return _config(name, names, size, dtype)
        return None


def _config(architecture: str, names: dict[str, Any], image_size: int, dtype: str) -> ConvnetConfig | None:
    kind = getattr(torch, dtype, None)
    label_names = tuple(str(names.get(str(index))) for index in range(len(names)))
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        return None
    return ConvnetConfig(architecture=architecture, label_names=label_names, image_size=image_size, dtype=kind)
