"""Data sets: images and their augmentation, documents as tokens, labelled texts; here their classes.

NOTE [ decisions ]
* A stream becomes a file first: as many documents as the run needs are read to disk, because an order that is a
  function of the seed needs every sample within reach.
"""

import re
from collections.abc import Sequence

from memsave_recipes.errors import InputError, packages_of
from memsave_recipes.text import join_names

with packages_of("vision,text", "the recipes' data"):
    import datasets  # noqa: F401


UNNAMED = re.compile(r"LABEL_\d+")
"""The name that transformers gives to a class without one."""
MAX_NAMED = 12


def in_classes_of_model(names: Sequence[str], model_labels: Sequence[str], source: str) -> tuple[list[str], list[int]]:
    """The classes in the order of the model's outputs, and the place of each class of the data among them.

    Args:
        names: of the data, in the order of its labels.
        model_labels: of the model, in the order of its outputs. Where it has no names for them, those of the data
            count, in their order.
        source: names the data in messages.

    Raises:
        InputError: a class that the model does not know, or another number of them.
    """
    if all(map(UNNAMED.fullmatch, model_labels)):
        if len(names) != len(model_labels):
            raise InputError(
                f"{source} has {len(names)} classes, and the model tells {len(model_labels)} apart: evaluate it on "
                "data of the same classes"
            )
        return list(names), list(range(len(names)))
    unknown = [name for name in names if name not in model_labels]
    if unknown:
        raise InputError(
            f"{source} has classes that the model does not know ({join_names(unknown, MAX_NAMED)}), only "
            f"{join_names(model_labels, MAX_NAMED)}: rename them, or leave them out"
        )
    return list(model_labels), [model_labels.index(name) for name in names]
