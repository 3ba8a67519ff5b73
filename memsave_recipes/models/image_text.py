"""Models of images and text: their flags, their processors, what of them trains, and their loss."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from math import isqrt
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.losses import IGNORED_LABEL, default_chunk_bytes
from memsave_recipes.models.causal_lm import CausalLMLoss, LossKind
from memsave_recipes.models.flags import option
from memsave_recipes.models.hub import loading_by_name
from memsave_recipes.models.language_model import LanguageModelArguments
from memsave_recipes.models.packed_attention import evaluating
from memsave_recipes.models.pretrained import build_transformer, configuration_of
from memsave_recipes.models.what_trains import leaves_of, train_part

OF_IMAGES = "pixel_values"
PROJECTORS = ("merger", "projector", "connector")
"""What names of the modules hold that map the states of images to those of text, also where they are in the tower."""
MAX_SIDE = 16_384
"""A ``longest_edge`` above it is a number of pixels, as Qwen's are."""
ANY_SIDE = 2048
"""Of an image that is cut into as many parts as a processor makes, or made smaller, where it names no limit."""


@dataclass(kw_only=True)
class ImageTextModelArguments(LanguageModelArguments):
    """The model of images and text, and what of it trains."""

    freeze: Literal["vision", "none"] = option(
        "vision", "vision: the vision tower stays as it is, and its projector trains; none: all of it trains"
    )

    @property
    def max_positions(self) -> int | None:
        """Of the text model; ``None`` where it has no limit."""
        return getattr(configuration_of(self).get_text_config(), "max_position_embeddings", None)


def open_processor(name_or_path: str, *, flag: str, trust_remote_code: bool = False) -> Any:
    """Open the processor of a model of images and text.

    Raises:
        InputError: there is none, it has no image processor or no fast tokenizer, or it needs torchvision, which is not
            there.
    """
    way_out = f"check {flag or 'its files'}"
    if find_spec("torchvision") is None:  # transformers raises an AttributeError, or names a class that is not there
        way_out += ", and install torchvision of torch's own build: processors that take videos, too, need it"
    with loading_by_name(name_or_path, f"the processor of {name_or_path}", way_out):
        processor = AutoProcessor.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
        if not hasattr(processor, "image_processor"):
            raise InputError(f"{flag} {name_or_path} has no image processor: name a model of images and text")
        if not processor.tokenizer.is_fast:
            raise InputError(f"{flag} {name_or_path} has no fast tokenizer, which says where tokens are: name another")
    return processor


def limit_pixels(processor: Any, max_pixels: int | None) -> None:
    """Let the image processor make no image of more pixels, by its own entry, so that it is saved with it.

    Raises:
        InputError: it makes all images of one size, or none that is so small.
    """
    if max_pixels is None:
        return
    images = processor.image_processor
    size = {name: side for name, side in dict(images.size or {}).items() if side is not None}
    longest, tile = size.get("longest_edge"), size.get("height", 0) * size.get("width", 0)
    if longest is not None and _counts_pixels(images):
        images.size = {**size, "longest_edge": max_pixels, "shortest_edge": min(size["shortest_edge"], max_pixels)}
    elif longest is not None:
        images.size = {**size, "longest_edge": min(longest, isqrt(max_pixels))}
    elif hasattr(images, "max_patches") and 0 < tile <= max_pixels:
        images.max_patches = min(images.max_patches, max_pixels // tile)
    else:
        raise InputError(
            f"--max_pixels {max_pixels}: {type(images).__name__} makes images of {size or 'one size'}, whatever they "
            "were: leave it out"
        )


def _counts_pixels(images: Any) -> bool:
    """Tell it of ``longest_edge``, by that of the class, too: ``limit_pixels`` lowers that of the object."""
    sizes = (images.size, getattr(type(images), "size", None))
    return any((dict(size or {}).get("longest_edge") or 0) > MAX_SIDE for size in sizes)


def largest_size(processor: Any) -> tuple[int, int]:
    """Return the width and height in pixels of an image of which as many values are made as of any."""
    images = processor.image_processor
    size = dict(images.size or {})
    longest = size.get("longest_edge") or ANY_SIDE
    if _counts_pixels(images):
        side = images.patch_size * images.merge_size
        most = max(1, longest // side**2)  # parts, in so many rows that the fewest are left out
        rows = max(range(isqrt(most) // 2 + 1, isqrt(most) + 1), key=lambda rows: most // rows * rows)
        return most // rows * side, rows * side
    if tiles := getattr(images, "max_patches", None):  # in one row, as no other number has this aspect ratio
        return tiles * size["height"], size["height"]
    return longest, longest


def build_image_text_model(args: Any, processor: Any = None, *, with_weights: bool, **options: Any) -> PreTrainedModel:
    """Build the model that the flags name; one from scratch has the words and the image token of ``processor``.

    Raises:
        InputError: as ``build_transformer``; it encodes its text, so that no token follows from those before it.
    """
    options |= {"dtype": args.torch_dtype, "in_4bit": args.load_in_4bit, "with_weights": with_weights}
    if args.model_type is not None and processor is not None:
        options |= _entries_of(processor, configuration_of(args))
    model = build_transformer(AutoModelForImageTextToText, args, **options)
    if model.config.is_encoder_decoder:
        raise InputError(f"{args.name} is an encoder and a decoder, which is not trained here: take another model")
    model.config.use_cache = model.config.get_text_config().use_cache = False
    return model


def _entries_of(processor: Any, config: Any) -> dict[str, Any]:
    """Return the entries of a configuration that follow from the processor."""
    tokenizer = processor.tokenizer
    special = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    named = [name for name in ("image_token_id", "image_token_index") if name in config.to_dict()]
    if not named:
        raise InputError(f"--model_type {config.model_type} has no token for an image: take another type")
    token = getattr(tokenizer, "image_token_id", processor.image_token_id)  # the processor's may be one before images
    return {"text_config": {"vocab_size": len(tokenizer), **special}, named[0]: token}


def train_part_of_image_text(model: PreTrainedModel, flags: Any) -> Any:
    """Freeze what the flags leave out, add adapters to the layers of the decoder, and return what is saved."""
    if flags.freeze == "vision":
        for name, module in _vision_tower(model).named_modules():
            if not any(word in name for word in PROJECTORS):
                for parameter in module.parameters(recurse=False):
                    parameter.requires_grad_(False)
    decoder = model.get_decoder()
    within = next(name for name, module in model.named_modules() if module is decoder)
    return train_part(model, flags, task_type="CAUSAL_LM", within=within)


def _vision_tower(model: PreTrainedModel) -> nn.Module:
    tower = model.get_encoder(modality="image")
    if tower in (model, model.base_model):
        raise InputError(f"--freeze vision: {type(model).__name__} has no vision tower of its own: pass --freeze none")
    return cast(nn.Module, tower)


def weights_of_images(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the weights that train and are neither in the decoder nor in the head."""
    of_text = {*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()}
    return [one for one in model.parameters() if one not in of_text and one.requires_grad]


def freeze_unused(model: PreTrainedModel, batch: dict[str, Any]) -> None:
    """Freeze the ``weights_of_images`` that the logits of a batch with an image do not depend on.

    LLaVA leaves the last layer of its tower out, so no image gives these a gradient, and none without one may.
    """
    with evaluating(model), saved_tensors_hooks(lambda tensor: tensor.new_empty(0), lambda nothing: nothing):
        used = leaves_of(model(**batch, use_cache=False).logits)
    for weight in weights_of_images(model):
        weight.requires_grad_(weight in used)


class ImageTextLoss(CausalLMLoss):
    """The loss of a model of images and text, always by its own forward; in evaluation also which answers are right.

    A micro-batch without an image has gradients of 0 for the weights that only images pass. So they are there in every
    step of every rank, as DDP asks, and the step does not depend on how images are dealt to micro-batches.

    Attributes:
        is_best: of the last forward in evaluation, whether the largest logit is that of the next token, bool (N,), one
            for each label that counts: all of an answer are if greedy decoding gives this answer.
    """

    def __init__(self, model: PreTrainedModel, loss: LossKind = "auto", chunk_bytes: int | None = None) -> None:
        super().__init__(model, loss, chunk_bytes)
        self.unread |= {"input_ids"}
        self.is_best: Tensor | None = None
        self.of_images = weights_of_images(model)

    def forward(self, *args: Any, **inputs: Any) -> Tensor:
        """Compute the summed loss as ``CausalLMLoss`` does."""
        loss = super().forward(*args, **inputs)
        if OF_IMAGES not in inputs and torch.is_grad_enabled():
            loss = loss + 0 * sum(one.sum() for one in self.of_images)
        return loss

    def look(self, targets: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
        """Note which of the tokens that count have the largest logit."""
        if not self.training:
            counts = targets != IGNORED_LABEL
            self.is_best = logits_of(counts).argmax(dim=-1) == targets[counts]


def with_image_text_loss(
    model: PreTrainedModel, loss: str | None, device: torch.device, *, flag: LossKind
) -> ImageTextLoss:
    """Return the model with its loss, as it is trained on ``device``; by default that of the ``flag``."""
    return ImageTextLoss(model, loss or flag, default_chunk_bytes(device))


def right_answers(labels: Tensor, is_best: Tensor) -> tuple[Tensor, Tensor]:
    """Count the answers all of whose tokens are the best ones, and all answers.

    Args:
        labels: (B, T), not shifted, -100 where nothing counts; an answer is what counts without a gap.
        is_best: as ``ImageTextLoss`` has it.
    """
    counts = labels[:, 1:] != IGNORED_LABEL
    begins = counts & ~torch.nn.functional.pad(counts, (1, 0))[:, :-1]
    number = begins.flatten().cumsum(dim=0)[counts.flatten()] - 1  # of the answer of each token, in order
    total = begins.sum()
    wrong = torch.zeros(int(total), device=labels.device).index_add_(0, number, (~is_best).float())
    return (wrong == 0).sum(), total
