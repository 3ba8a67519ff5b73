"""BatchNorm under recomputation: the second forward must not count the batch a second time.

NOTE [ statistics once ]
1. A training forward of BatchNorm moves ``running_mean``, ``running_var`` and ``num_batches_tracked``. Under activation
   checkpointing the forward runs twice, so the statistics move twice: gradients are right, evaluation is not, and no
   loss curve shows it (https://github.com/pytorch/pytorch/issues/96136).
2. While recomputing, momentum 0 makes the update ``running = 1 * running + 0 * batch``, and without
   ``num_batches_tracked`` nothing is counted; SyncBatchNorm, which insists on a counter, counts in another one. Both
   are set back afterwards, also when the recomputation raises (it does so by design: torch stops it early once the last
   tensor it needs is there).
3. ``track_running_stats = False`` is no way out: BatchNorm then saves fewer tensors, and the checkpoint raises.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class FrozenStatistics:
    """A context in which the BatchNorm layers below ``modules`` normalise by batch but record nothing.

    Can be entered again after it was left, as a second backward through a retained graph does.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers = [layer for layer in batchnorm_layers(modules) if layer.track_running_stats]
        self.saved: list[tuple[float | None, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        self.saved = [(layer.momentum, layer.num_batches_tracked) for layer in self.layers]
        for layer in self.layers:
            layer.momentum, layer.num_batches_tracked = 0.0, _nothing_counted(layer)

    def __exit__(self, *exception: object) -> None:
        for layer, (momentum, num_batches_tracked) in zip(self.layers, self.saved, strict=True):
            layer.momentum, layer.num_batches_tracked = momentum, num_batches_tracked


def _nothing_counted(layer: _BatchNorm) -> torch.Tensor | None:
    counter = layer.num_batches_tracked
    return torch.zeros_like(counter) if isinstance(layer, nn.SyncBatchNorm) and counter is not None else None


def batchnorm_layers(modules: Iterable[nn.Module]) -> list[_BatchNorm]:
    """All BatchNorm layers (SyncBatchNorm too) among ``modules`` and below them, each once."""
    found = {layer: None for module in modules for layer in module.modules() if isinstance(layer, _BatchNorm)}
    return list(found)
