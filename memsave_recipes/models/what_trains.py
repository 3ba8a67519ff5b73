"""What trains: all weights, the head, the last blocks, or adapters of frozen layers.

NOTE [ frozen BatchNorm ]
A BatchNorm whose weights are frozen normalises by its running statistics, in training too, and these do not move, as
in ``torchvision.ops.FrozenBatchNorm2d`` and timm's ``freeze``. So a frozen layer computes the same in training and in
evaluation, samples do not depend on one another, and adapters' files, which hold no statistics, hold all that changed.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from memsave_recipes.core.activations import find_stacks
from memsave_recipes.core.errors import InputError, option, require
from memsave_recipes.models.adapters import LoraArguments, add_lora, outside_the_backbone
from memsave_recipes.models.slices import new_weights


@dataclass(kw_only=True)
class TrainedPartArguments(LoraArguments):
    """What trains: all weights, adapters or the last blocks."""

    train_last_blocks: int | None = option(
        None, "train the last N blocks and the layers after them, and freeze the rest"
    )
    stream_weights: Literal["none", "host"] = option(
        "none",
        "host: keep the weights of a layer on the host until it runs (on a GPU): frozen weights, and with "
        "--offload_optimizer step all",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (count := self.train_last_blocks) is not None:
            require(count >= 1, "--train_last_blocks", count, "at least 1")
            self._check_whole_weights("--train_last_blocks")
        if self.stream_weights != "none":
            self._check_streaming()

    @property
    def freezes(self) -> bool:
        """Whether some of the weights are frozen."""
        return self.has_adapters or self.train_last_blocks is not None

    def _check_whole_weights(self, flag: str) -> None:
        if self.has_adapters:
            raise InputError(f"{flag} trains weights, and adapters are for frozen ones: leave it or the adapters out")

    def _check_streaming(self) -> None:
        asked = f"--stream_weights {self.stream_weights}"
        if not self.freezes and getattr(self, "offload_optimizer", "none") != "step":
            raise InputError(
                f"{asked}: all weights train, on the device: pass --offload_optimizer step, --lora or "
                "--train_last_blocks, or leave it out"
            )
        if self.load_in_4bit:
            raise InputError(f"{asked} cannot move the packed weights of --load_in_4bit: leave one of them out")
        if self.lora_merge:
            raise InputError(
                f"{asked}: --lora_merge adds to weights on the device: save the adapters, then merge with "
                "--model_name_or_path FOLDER --lora_merge --eval_only"
            )


@dataclass(kw_only=True)
class ClassifierTrainingArguments(TrainedPartArguments):
    """Training only the head of a classifier."""

    freeze_backbone: bool = option(False, "train only the head of the classifier")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.freeze_backbone:
            self._check_whole_weights("--freeze_backbone")
            if self.train_last_blocks is not None:
                raise InputError("--freeze_backbone and --train_last_blocks train other weights: leave one of them out")

    @property
    def freezes(self) -> bool:
        """As of ``TrainedPartArguments``."""
        return self.freeze_backbone or super().freezes


def train_part(model: Any, flags: TrainedPartArguments, *, task_type: str | None) -> Any:
    """Freeze in ``model`` what the flags leave out, add the adapters that they ask for, and return what is saved.

    What trains beside frozen weights in float16 is float32. BatchNorm that is frozen keeps its statistics:
    NOTE [ frozen BatchNorm ].

    Args:
        task_type: as ``add_lora``.

    Raises:
        InputError: as ``add_lora``; the model has fewer blocks, or no head outside of its backbone.
    """
    adapted = add_lora(model, flags, task_type=task_type)
    trained = None
    if flags.train_last_blocks is not None:
        trained = last_blocks(model, flags.train_last_blocks)
    elif getattr(flags, "freeze_backbone", False) and not (trained := outside_the_backbone(model)):
        raise InputError(
            f"--freeze_backbone: {type(model).__name__} has no head outside of its backbone: take --train_last_blocks"
        )
    if trained is not None:
        trained |= new_weights(model) or set()
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


@cache
def _in_evaluation(kind: type[nn.Module]) -> Any:
    """Make the class of the same name whose instances stay in evaluation mode."""
    return type(kind.__name__, (kind,), {"train": lambda self, mode=True: kind.train(self, False)})


def last_blocks(model: nn.Module, count: int) -> set[nn.Parameter]:
    """Return the weights of the last ``count`` blocks that have any, and of what is behind them: norms and the head.

    A head that is tied to the embeddings is not among them, as these come before all blocks.

    Raises:
        InputError: there are fewer blocks.
    """
    head = outside_the_backbone(model)  # which ResNet has in a sequence, as its blocks
    blocks = [block for stack in find_stacks(model) for block in stack.blocks]
    weights = [{p for module in block.modules for p in module.parameters()} - head for block in blocks]
    weights = [own for own in weights if own]
    if count > len(weights):
        raise InputError(f"--train_last_blocks {count}: {type(model).__name__} has {len(weights)} blocks with weights")
    inside: set[nn.Parameter] = set().union(*weights)
    last: set[nn.Parameter] = set().union(*weights[-count:])
    named = list(model.named_parameters())
    begin = next(at for at, (_, parameter) in enumerate(named) if parameter in last)
    for at, (name, parameter) in enumerate(named):
        is_behind = at > begin and "embed" not in name  # BART registers the norm of its embeddings behind its layers
        if parameter not in inside and (is_behind or "final" in name):  # OPT its last norm before them
            last.add(parameter)
    return last
