"""Image classifiers by name, and weight files from disk, without pickle."""

from collections.abc import Callable
from functools import partial

from torch import nn

from memsave_recipes.models.convnets import SIZES, build_densenet, build_vgg
from memsave_recipes.models.image_classifiers import load_weights

VGG_NAMES = ("vgg_small", *(f"vgg{depth}{suffix}" for depth in (11, 13, 16, 19) for suffix in ("", "_bn")))

MODELS: dict[str, Callable[..., nn.Module]] = {
    **{name: partial(build_vgg, name) for name in VGG_NAMES},
    **{name: partial(build_densenet, name) for name in SIZES},
}
"""Every model of ours: ``MODELS[name](num_classes=10)``."""

__all__ = ["MODELS", "load_weights"]
