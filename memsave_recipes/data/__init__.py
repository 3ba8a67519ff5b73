"""Data sets: images and their augmentation, documents as tokens, labelled texts."""

from memsave_recipes.errors import packages_of

with packages_of("vision,text", "the recipes' data"):
    import datasets  # noqa: F401
