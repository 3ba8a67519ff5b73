"""Models that the recipes train, and weight files from disk, without pickle."""

from memsave_recipes.models.image_classifiers import MODELS, load_weights

__all__ = ["MODELS", "load_weights"]
