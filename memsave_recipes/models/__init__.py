"""Models that the recipes train and save, and weight files from disk, without pickle.

    from memsave_recipes.models import load

    saved = load("out/digits")
    print(saved.label_names[saved.logits([image]).argmax()])

``load`` is imported when it is first used: torch and transformers take seconds.

NOTE [ decisions ]
* A causal language model and its loss are one module (``causal_lm.py``), so that DDP and autocast see one forward.
  How hidden states become logits is read from the model's configuration and then tried on a few tokens; so is whether
  it keeps packed documents apart. A model that fails the trial is refused by name, or its loss is computed the usual
  way.
* Adapters go into the model where it stands: the names of its blocks, and so its plans, stay the same.
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
