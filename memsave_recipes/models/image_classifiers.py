"""Image classifiers by name: our VGG and DenseNet, or any of transformers; weight files are read without pickle."""

import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForImageClassification
from transformers.utils.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.text import first_line
from memsave_recipes.models.convnets import SIZES, WEIGHTS, ConvnetConfig, build_densenet, build_vgg
from memsave_recipes.models.flags import option
from memsave_recipes.models.hub import reason
from memsave_recipes.models.labels import SINGLE, ProblemType
from memsave_recipes.models.pretrained import (
    LOADING_ERRORS,
    TransformerArguments,
    adapter_config,
    build_transformer,
    image_processor_config,
    open_image_processor,
)
from memsave_recipes.models.what_trains import ClassifierTrainingArguments, train_part

VGGS = [f"vgg{depth}{suffix}" for depth in ("_small", 11, 13, 16, 19) for suffix in ("", "_bn")]

MODELS: dict[str, Callable[..., nn.Module]] = {
    **{name: partial(build_vgg, name) for name in VGGS},
    **{name: partial(build_densenet, name) for name in SIZES},
}
"""Our own models: ``MODELS[name](num_classes=10)``."""
PROCESSOR_TYPES = {"image_processor_type", "feature_extractor_type", "auto_map"}
GREY_BITS = "grey_bits"  # our own entry of image processors: bits of the values in 16-bit grey images in training

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ImageModelArguments(TransformerArguments):
    """Which network: one of ours, or any image classifier of transformers."""

    model: str | None = option(None, f"one of {', '.join(MODELS)}", shown="first")
    weights: str | None = option(None, "weights for --model: a .safetensors or .pth", resume="place")
    channels_last: bool = option(False, "use the memory format in which GPUs convolve fastest")

    def __post_init__(self) -> None:
        ways = [self.model, self.model_name_or_path, self.model_type]
        if sum(way is not None for way in ways) != 1:
            raise InputError("give one of --model, --model_name_or_path and --model_type")
        if self.model is not None and self.model not in MODELS:
            raise InputError(f"--model {self.model} is not known: choose one of {', '.join(MODELS)}")
        if self.model is None and self.weights is not None:
            raise InputError("--weights are for --model: leave them out")
        is_ours = self.model is not None or self.saved_convnet is not None
        if is_ours and self.attn_implementation is not None:
            raise InputError("--attn_implementation is for models of transformers: leave it out")
        if self.adapter is not None and adapter_config(self.adapter).get("task_type") is not None:
            raise InputError(f"--model_name_or_path {self.adapter} holds adapters of a language model: take another")
        if is_ours and getattr(self, "lora", False):
            raise InputError("--lora adapts models of transformers: leave it out, or take --freeze_backbone")
        self.check_transformer()
        if getattr(self, "has_default_size", False):
            self.image_size = pretrained_image_size(self) or getattr(self, "image_size", None)

    @property
    def pretrained_grey_bits(self) -> int | None:
        """The bits of 16-bit grey images that a pretrained network was trained on, if there were any."""
        return read_grey_bits(image_processor_config(self.model_name_or_path))

    @property
    def architecture(self) -> str | None:
        """The name of our model; ``None`` for one of transformers."""
        saved = self.saved_convnet
        return self.model if saved is None else saved.architecture

    @property
    def saved_convnet(self) -> ConvnetConfig | None:
        """The configuration of ``--model_name_or_path``, where that is one of our models."""
        return None if self.model_name_or_path is None else read_convnet(self.model_name_or_path)

    @property
    def name(self) -> str:
        """The network's name in tables and dashboards."""
        return self.model or super().name

    @property
    def model_labels(self) -> tuple[str, ...] | None:
        """The classes of a pretrained model; one of ours has them in its own ``config.json``."""
        saved = self.saved_convnet
        return super().model_labels if saved is None else saved.label_names


def build_image_classifier(
    flags: ImageModelArguments,
    label_names: tuple[str, ...],
    image_size: int,
    dtype: torch.dtype,
    *,
    problem_type: ProblemType = SINGLE,
    with_weights: bool = False,
    slices_on: torch.device | None = None,
) -> nn.Module:
    """Build the network that the flags name, with one output a label, for images of ``image_size``.

    Pretrained for another number of classes, it gets a new last layer. Without ``with_weights`` a pretrained model is
    only made by its configuration. ``slices_on``: as ``build_transformer``; ours are made whole.

    Raises:
        InputError: no such model or weights, or it does not take images of that size.
    """
    saved = flags.saved_convnet
    if flags.architecture is None:
        names = list(label_names)
        labels: dict[str, Any] = {
            "id2label": dict(enumerate(names)),
            "label2id": {name: i for i, name in enumerate(names)},
            "problem_type": problem_type,
        }
        if flags.model_type is not None:
            labels["image_size"] = image_size
        model: nn.Module = build_transformer(
            AutoModelForImageClassification,
            flags,
            dtype=dtype,
            with_weights=with_weights,
            slices_on=None if flags.channels_last else slices_on,
            **labels,
        )
    else:
        model = MODELS[flags.architecture](num_classes=len(label_names))
        if with_weights and saved is not None:
            folder, new_head = str(flags.model_name_or_path), len(saved.label_names) != len(label_names)
            load_saved_convnet(model, folder, source=f"--model_name_or_path {folder}", new_head=new_head)
        elif with_weights and flags.weights is not None:
            load_weights(model, flags.weights)
        model = model.to(dtype)
    check_image_size(image_size, model)
    return model.to(memory_format=torch.channels_last) if flags.channels_last else model  # type: ignore[call-overload]


def train_part_of_images(model: nn.Module, flags: ClassifierTrainingArguments, image_size: int) -> Any:
    """Freeze and adapt ``model`` as ``train_part`` does; one that asks its layers what adapters lack is refused."""
    adapted = train_part(model, flags, task_type=None)
    try:
        check_image_size(image_size, model)
    except AttributeError as error:  # MobileNet pads by the stride of its convolutions
        raise InputError(
            f"--lora: {type(model).__name__} reads what peft's layers lack ({first_line(error)}): name other "
            "target_modules in a --lora_config"
        ) from error
    return adapted


def read_convnet(folder: str | Path) -> ConvnetConfig | None:
    """Read the configuration in ``folder``, where that is of one of our models."""
    config = ConvnetConfig.read(folder)
    return config if config is not None and config.architecture in MODELS else None


def load_saved_convnet(model: nn.Module, folder: str | Path, *, source: str, new_head: bool = False) -> None:
    """Load the weights of ``folder`` into one of our models; raises as ``load_weights``.

    With ``new_head`` the last layer stays as it is, because the classes are others; a line says so.
    """
    load_weights(model, Path(folder, WEIGHTS), source=source, new_head=new_head)
    if new_head and os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning("note: %s was trained on other classes, so the last layer of the model is new", folder)


def normalization(flags: ImageModelArguments) -> dict[str, Any]:
    """Return ``mean`` and ``std`` of the values from 0 to 1 that a pretrained network expects; ``bgr`` if it is so.

    They are ImageNet's where it says nothing. Raises ``InputError`` where its image processor does more than that.
    """
    name, entries = flags.model_name_or_path, image_processor_config(flags.model_name_or_path)
    if name is None or not entries:
        return {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
    return _normalization(name, flags.trust_remote_code, json.dumps(entries))


@cache
def _normalization(name: str, trust_remote_code: bool, entries: str) -> dict[str, Any]:
    given: dict[str, Any] = json.loads(entries)
    usual = {"mean": ("image_mean", IMAGENET_DEFAULT_MEAN), "std": ("image_std", IMAGENET_DEFAULT_STD)}
    said = {key: given.get(entry) or default for key, (entry, default) in usual.items()}
    lists = {key: value if isinstance(value, list) else [value] for key, value in said.items()}
    said = {key: value * 3 if len(value) == 1 else value for key, value in lists.items()}
    try:
        processor = open_image_processor(name, trust_remote_code=trust_remote_code)
        made = _made_by(processor)
        if made.keys() == said.keys() and all(
            torch.tensor(made[key]).allclose(torch.tensor(said[key])) for key in said
        ):
            return said  # which is exact
    except Exception as error:  # of the processor, on whatever is wrong in its file
        if not PROCESSOR_TYPES & given.keys():
            return said
        why = reason(error)
        raise InputError(
            f"--model_name_or_path {name}: its image processor cannot be followed ({why}): take another model"
        ) from error
    return made


def _made_by(processor: Any) -> dict[str, Any]:
    """Find out by three colours what an image processor does to the values of pixels."""
    colours = torch.tensor([[0, 0, 0], [255, 255, 255], [250, 120, 10]])
    images = list(colours.to(torch.uint8).view(3, 3, 1, 1).expand(3, 3, 8, 8).numpy())
    geometry = dict.fromkeys(("do_resize", "do_center_crop", "do_pad"), False)
    with warnings.catch_warnings(action="ignore"):  # of a division by zero, which is refused below
        made = processor(images, return_tensors="pt", **geometry)["pixel_values"].double()
    black, white, mixed = made[..., 0, 0]
    std = 1 / (white - black)
    for order, more in (([0, 1, 2], {}), ([2, 1, 0], {"bgr": True})):
        expected = (colours[2, order] / 255 + black * std) / std
        if made.shape == (3, 3, 8, 8) and made.isfinite().all() and expected.allclose(mixed, rtol=1e-4, atol=1e-4):
            if more and (black.any() or std.unique().numel() > 1):
                break
            return {"mean": (-black * std).tolist(), "std": std.tolist(), **more}
    raise ValueError("it does not just rescale and normalise the channels, or turn RGB into BGR")


def read_grey_bits(entries: Mapping[str, Any]) -> int | None:
    """Return the entry ``GREY_BITS`` of an image processor; ``None`` where there is none, or none that can be."""
    bits = entries.get(GREY_BITS)
    return bits if isinstance(bits, int) and 8 <= bits <= 16 else None


def pretrained_image_size(flags: ImageModelArguments) -> int | None:
    """Return the pixels a side that a pretrained network was made for; ``None`` where it does not say, or is none.

    Its image processor says it, else its configuration. What cannot be read here fails in ``build_image_classifier``.
    """
    name = flags.model_name_or_path
    if name is None:
        return None
    processor = image_processor_config(name)
    sizes = [processor.get("crop_size"), processor.get("size")]
    with suppress(*LOADING_ERRORS):
        config = AutoConfig.from_pretrained(name, trust_remote_code=flags.trust_remote_code)
        sizes.append(getattr(config, "image_size", None))
    return next((side for side in map(_side, sizes) if side), None)


def _side(size: Any) -> int | None:
    """Return the side of a square, as transformers writes it; ``None`` for anything else."""
    if isinstance(size, dict):
        size = [size.get("shortest_edge")] if "shortest_edge" in size else [size.get("height"), size.get("width")]
    sides = set(size) if isinstance(size, list | tuple) else {size}
    side = sides.pop() if len(sides) == 1 else None
    return side if isinstance(side, int) and side > 0 else None


def check_image_size(image_size: int, model: nn.Module, num_images: int = 2) -> None:
    """Raise ``InputError`` where a batch (num_images, 3, image_size, image_size) shrinks to nothing in ``model``.

    One that shrinks to a single pixel cannot be trained alone where there is BatchNorm: a value has no deviation.
    """
    on_meta = {name: tensor.to("meta") for name, tensor in chain(model.named_parameters(), model.named_buffers())}
    images = torch.empty(num_images, 3, image_size, image_size, dtype=next(model.parameters()).dtype, device="meta")
    try:
        with torch.no_grad():
            functional_call(model, on_meta, (images,))
    except (RuntimeError, ValueError) as error:
        why = first_line(error)
        alone = ", in a last micro-batch of one (see --micro_batch_size)," if num_images == 1 else ""
        raise InputError(f"--image_size {image_size}{alone} does not suit {type(model).__name__}: {why}") from error


_OLD_DENSENET_KEY = re.compile(
    r"(.*denselayer\d+\.(?:norm|relu|conv))\.((?:[12])\.(?:weight|bias|running_mean|running_var))$"
)


def load_weights(model: nn.Module, path: str | Path, *, source: str | None = None, new_head: bool = False) -> None:
    """Load the tensors of ``path`` into ``model``; all names and shapes must agree.

    Reads ``.safetensors`` and what ``torch.save(model.state_dict())`` wrote, torchvision's published files among them.

    Args:
        new_head: pass over tensors of the classifier that have another shape.

    Raises:
        InputError: no such file, not a file of tensors, or other names, shapes or kinds of numbers than the model's.
    """
    source = source or f"--weights {path}"
    weights = {_OLD_DENSENET_KEY.sub(r"\1\2", name): tensor for name, tensor in _read(Path(path), source).items()}
    if new_head:
        weights |= {
            name: tensor
            for name, tensor in model.state_dict().items()
            if name.startswith("classifier.") and name in weights and weights[name].shape != tensor.shape
        }
    hint = "give the file of this very model with this number of classes"
    for name, tensor in model.state_dict().items():
        if name in weights and weights[name].is_floating_point() != tensor.is_floating_point():  # torch would cast it
            raise InputError(f"{source}: {name} has numbers of {weights[name].dtype}: {hint}")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        why = str(error).splitlines()[1].strip(" \t.")  # the first line has the class alone
        raise InputError(f"{source}: {why:.300}: {hint}") from error


def _read(path: Path, source: str) -> dict[str, Tensor]:
    if not os.path.isfile(path):  # reading a pipe or a device may never end
        raise InputError(f"{source} is not a file: check the path")
    try:
        weights = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # bytes that are no such file raise anything, KeyError and IndexError included
        why = first_line(error)
        if "weights_only" in str(error):  # torch advises to turn it off, which would execute the file
            why = "it holds more than tensors, and no pickle is executed: save model.state_dict(), best as .safetensors"
        raise InputError(f"{source} cannot be read as a file of tensors: {why}") from error
    items = weights.items() if isinstance(weights, dict) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in items):
        raise InputError(f"{source} holds no state dict: save model.state_dict()")
    return weights
