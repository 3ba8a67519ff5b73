"""Data sets: images and their augmentation, documents as tokens, labelled texts.

NOTE [ decisions ]
* A stream becomes a file first: as many documents as the run needs are read to disk, because an order that is a
  function of the seed needs every sample within reach.
"""

from memsave_recipes.errors import packages_of

with packages_of("vision,text", "the recipes' data"):
    import datasets  # noqa: F401
