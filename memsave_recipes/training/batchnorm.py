"""BatchNorm, the one layer that sees how a global batch is cut up: say so, or join the ranks.

It normalises by the statistics of what one rank forwards at once, so its loss is no mean over samples and rule 7 of
NOTE [ the exact global batch ] in ``memsave_recipes/training/batching.py`` applies.
"""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from memsave_recipes.errors import InputError
from memsave_recipes.training.sample_order import Geometry


def batchnorm_notice(model: nn.Module, geometry: Geometry) -> str | None:
    """In one line, where it applies: a BatchNorm model whose global batch is not normalised as one."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    synchronised = all(isinstance(layer, nn.SyncBatchNorm) for layer in layers)
    parts = geometry.accumulation_steps * (1 if synchronised else geometry.num_processes)
    if not layers or parts == 1:
        return None
    advice = "" if synchronised or geometry.num_processes == 1 else "; --sync_batchnorm joins the ranks"
    return (
        f"note: {len(layers)} BatchNorm layers normalise each of {parts} micro-batches by itself, so other numbers of "
        f"ranks or accumulation steps give another curve{advice}"
    )


def synchronize_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """``model`` with its BatchNorm layers normalising over all ranks.

    Raises:
        InputError: on a CPU, for which torch has no such layer.
    """
    if device.type == "cpu":
        raise InputError("--sync_batchnorm works on GPUs only: leave it out on a CPU")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)
