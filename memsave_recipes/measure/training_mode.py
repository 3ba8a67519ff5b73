"""A model as it will train, whatever mode it was left in."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Inside, all of a model that is in evaluation mode trains; afterwards every module is in its own mode again.

    ``from_pretrained`` returns models in evaluation mode, whose dropout keeps nothing for a backward. A model that is
    itself in training mode stays as it is: what of it evaluates (a frozen BatchNorm, say) will do so in training.
    """
    modes = [(module, module.training) for module in model.modules()]
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
