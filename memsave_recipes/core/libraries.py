"""Modules of libraries that need not be installed: they are told by the full names of their classes."""

from torch import nn

LAYER = "transformers.modeling_layers.GradientCheckpointingLayer"
MODEL = "transformers.modeling_utils.PreTrainedModel"
CONV1D = "transformers.pytorch_utils.Conv1D"


def is_of(name: str, module: nn.Module) -> bool:
    """Tell whether ``module`` is of the class with this full name, or of one that is made from it."""
    home, _, own = name.rpartition(".")
    return any(one.__name__ == own and one.__module__ == home for one in type(module).__mro__)
