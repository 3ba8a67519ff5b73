"""What a plan cannot stand beside: a second checkpointing, models that are sharded or compiled. Refused by name."""

from torch import nn

from memsave_recipes.activations.compiled import CompiledLayer
from memsave_recipes.activations.spans import LayerInSpan, SpannedLayer, SpannedSequence
from memsave_recipes.errors import InputError

OURS = (CompiledLayer, LayerInSpan, SpannedLayer, SpannedSequence)
SHARDED = ("FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
WAY_OUT = "a plan decides which activations are recomputed"


def check_model(model: nn.Module) -> None:
    """Refuse a model that checkpoints, shards or compiles by itself.

    Raises:
        InputError: it does.
    """
    kinds = {base.__name__ for base in type(model).__mro__}
    if sharded := kinds.intersection(SHARDED):
        raise InputError(f"model: {sharded.pop()} shards it, which no plan is made for: train with DDP or one process")
    if "OptimizedModule" in kinds:
        raise InputError("model: torch.compile has wrapped it: pass the model itself, or use strategy compiled")
    if "DataParallel" in kinds:
        raise InputError("model: DataParallel runs copies of it: launch one process for each GPU, with DDP")
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise InputError(
                f"gradient_checkpointing: {name or type(model).__name__} is checkpointed already, and {WAY_OUT}: call "
                "model.gradient_checkpointing_disable()"
            )
        if type(module).__name__ == "CheckpointWrapper":
            raise InputError(f"model: {name} is a CheckpointWrapper, and {WAY_OUT}: leave the wrapper out")
        if isinstance(vars(module).get("forward"), OURS):
            raise InputError(f"model: a plan is applied to {name or 'it'} already: call its handle.remove() first")
