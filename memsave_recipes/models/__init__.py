"""Models that the recipes train and save, and weight files from disk, without pickle.

    from memsave_recipes.models import load

    saved = load("out/digits")
    print(saved.label_names[saved.logits([image]).argmax()])

NOTE [ decisions ]
* How a causal language model makes logits of hidden states is read from its configuration and then tried on a few
  tokens; so is whether it keeps packed documents apart. A model that fails the trial is refused by name, or its loss is
  computed the usual way.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memsave_recipes.models.saved import SavedModel, load

__all__ = ["SavedModel", "load"]


def _import(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from memsave_recipes.models import saved

    return getattr(saved, name)


if not TYPE_CHECKING:  # a type checker would take any name
    __getattr__ = _import
