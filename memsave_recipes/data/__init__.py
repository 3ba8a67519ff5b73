"""Data sets: images and their augmentation, documents as tokens, labelled texts; here their classes.

NOTE [ decisions ]
* A stream becomes a file first, because an order that is a function of the seed needs every sample within reach.
* ``datasets`` reads labelled texts, Parquet and the Hub, not documents and conversations from JSON and CSV: it names no
  row, takes the number 3 for a text, or puts quotes around the texts next to it, and lets a broken quote pass.
* ``train_test_split`` holds out by the place in the file, and copies are in both splits.
* ``imagefolder`` takes a folder inside a class folder for another class, and one named ``test`` there for a split.
* The built-in texts are read from installed libraries: the figures in ``docs`` were measured on them.
"""

import re
from collections.abc import Sequence

from memsave_recipes.core.errors import InputError, packages_of
from memsave_recipes.core.text import join_names

with packages_of("vision,text", "the recipes' data"):
    import datasets  # noqa: F401


UNNAMED = re.compile(r"LABEL_\d+")  # as transformers names a class without a name
MAX_NAMED = 12  # columns, splits or classes in a message


def in_classes_of_model(names: Sequence[str], model_labels: Sequence[str], source: str) -> tuple[list[str], list[int]]:
    """Return the classes in the order of the model's outputs, and the place of each class of the data among them.

    Where the model has no names for its outputs, those of the data count. Raises ``InputError`` for a class that the
    model does not know, or another number of them; ``source`` names the data.
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
