"""Whether a network takes images of a size, found on the meta device: shapes alone, without data, memory or time."""

from itertools import chain

import torch
from torch import nn
from torch.func import functional_call

from memsave_recipes.errors import InputError


def check_image_size(model: nn.Module, image_size: int, num_images: int = 2) -> None:
    """Refuse images that shrink to nothing in ``model``, or that it was not made for.

    One that shrinks to a single pixel cannot be trained alone where there is BatchNorm: a value has no deviation.

    Args:
        model: takes images (B, 3, S, S); is left as it is.
        image_size: S.
        num_images: B.

    Raises:
        InputError: its forward fails on the shapes.
    """
    on_meta = {name: tensor.to("meta") for name, tensor in chain(model.named_parameters(), model.named_buffers())}
    images = torch.empty(num_images, 3, image_size, image_size, dtype=next(model.parameters()).dtype, device="meta")
    try:
        with torch.no_grad():
            functional_call(model, on_meta, (images,))
    except (RuntimeError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        alone = ", in a last micro-batch of one (see --micro_batch_size and --drop_last)," if num_images == 1 else ""
        raise InputError(f"--image_size {image_size}{alone} does not suit {type(model).__name__}: {why}") from error
