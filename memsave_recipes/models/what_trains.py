"""What trains: all weights, the head, or adapters of frozen layers.

NOTE [ frozen BatchNorm ]
A BatchNorm whose weights are frozen normalises by its running statistics, in training too, and these do not move, as
in ``torchvision.ops.FrozenBatchNorm2d`` and timm's ``freeze``. So a frozen layer computes the same in training and in
evaluation, samples do not depend on one another, and adapters' files, which hold no statistics, hold all that changed.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm

from memsave_recipes.core.errors import InputError
from memsave_recipes.models.adapters import LoraArguments, add_lora, outside_the_backbone
from memsave_recipes.models.flags import option
from memsave_recipes.models.slices import new_weights


@dataclass(kw_only=True)
class TrainedPartArguments(LoraArguments):
    """What trains: all weights, or adapters."""

    stream_weights: Literal["none", "host"] = option(
        "none",
        "host: keep the weights of a layer on the host until it runs (on a GPU): frozen weights, and with "
        "--offload_optimizer step all",
        resume="free",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream_weights != "none" and self.load_in_4bit:
            raise InputError(
                "--stream_weights host cannot move the packed weights of --load_in_4bit: leave one of them out"
            )

    @property
    def freezes(self) -> bool:
        """Whether some of the weights are frozen."""
        return self.has_adapters


@dataclass(kw_only=True)
class ClassifierTrainingArguments(TrainedPartArguments):
    """Training only the head of a classifier."""

    freeze_backbone: bool = option(False, "train only the head of the classifier")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.freeze_backbone and self.has_adapters:
            raise InputError("--freeze_backbone trains the head, and adapters are for frozen layers: leave one out")

    @property
    def freezes(self) -> bool:
        """As of ``TrainedPartArguments``."""
        return self.freeze_backbone or super().freezes


def train_part(model: Any, flags: TrainedPartArguments, *, task_type: str | None, within: str = "") -> Any:
    """Freeze in ``model`` what the flags leave out, add the adapters that they ask for, and return what is saved.

    What trains beside frozen weights in float16 is float32. BatchNorm that is frozen keeps its statistics:
    NOTE [ frozen BatchNorm ].

    Args:
        task_type, within: as ``add_lora``.

    Raises:
        InputError: as ``add_lora``; the model has no head outside of its backbone.
    """
    adapted = add_lora(model, flags, task_type=task_type, within=within)
    if getattr(flags, "freeze_backbone", False):
        if not (head := outside_the_backbone(model)):
            raise InputError(
                f"--freeze_backbone: {type(model).__name__} has no head outside of its backbone: leave it out"
            )
        trained = head | (new_weights(model) or set())
        for parameter in model.parameters():
            parameter.requires_grad_(parameter in trained)
    for parameter in model.parameters() if flags.freezes else ():
        if parameter.requires_grad and parameter.dtype == torch.float16:  # whose updates would be too small for it
            parameter.data = parameter.data.float()
    for module in model.modules() if flags.freezes else ():
        own = [*module.parameters(recurse=False)]
        if isinstance(module, _BatchNorm) and own and not any(parameter.requires_grad for parameter in own):
            module.__class__ = _in_evaluation(type(module))  # type: ignore[arg-type]  # of _BatchNorm's class
            module.eval()
    return adapted


def leaves_of(loss: Tensor) -> set[Tensor]:
    """Return the weights that the graph of ``loss`` ends in."""
    found: set[Tensor] = set()
    seen: set[Node | None] = {None}
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node not in seen and node is not None:
            seen.add(node)
            found |= {node.variable} if hasattr(node, "variable") else set()  # of AccumulateGrad
            waiting += [before for before, _ in node.next_functions]
    return found


@cache
def _in_evaluation(kind: type[nn.Module]) -> Any:
    """Make the class of the same name whose instances stay in evaluation mode."""
    return type(kind.__name__, (kind,), {"train": lambda self, mode=True: kind.train(self, False)})
