"""Whether a network takes images of a size, found on the meta device: shapes alone, without data, memory or time."""

from itertools import chain

import torch
from torch import nn
from torch.func import functional_call

from memsave_recipes.errors import InputError


def check_image_size(model: nn.Module, image_size: int) -> None:
    """Refuse images that shrink to nothing in ``model``, or that it was not made for.

    Args:
        model: takes images (B, 3, S, S); is left as it is.
        image_size: S.

    Raises:
        InputError: its forward fails on the shapes.
    """
    on_meta = {name: tensor.to("meta") for name, tensor in chain(model.named_parameters(), model.named_buffers())}
    images = torch.empty(2, 3, image_size, image_size, dtype=next(model.parameters()).dtype, device="meta")
    try:
        with torch.no_grad():
            functional_call(model, on_meta, (images,))
    except (RuntimeError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise InputError(f"--image_size {image_size} does not suit {type(model).__name__}: {why}") from error
