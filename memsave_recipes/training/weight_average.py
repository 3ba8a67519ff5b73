"""The exponential moving average of the weights that train, which is evaluated and saved in their place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from memsave_recipes.core.activations.streaming import stream_of
from memsave_recipes.core.costs.breakdown import count_as_state
from memsave_recipes.core.host.masters import masters_beside_weights
from memsave_recipes.core.sharding.tensors import cut_like, local
from memsave_recipes.core.step.memory import averaged_tensors


class WeightAverage:
    """After each step ``decay * average + (1 - decay) * weights``, by ``torch.optim.swa_utils``.

    The first step sets it to the weights, as torch's ``AveragedModel`` does; the statistics of BatchNorm are averaged
    as well. Of weights in shards each rank averages its part. The average of streamed weights is on the host, too.

    Args:
        model: not wrapped by DDP.
        decay: of the average in a step, in (0, 1).
        optimizer: of the weights. Its masters on the device are averaged in their place, and the average counts as its
            state.
    """

    def __init__(self, model: nn.Module, decay: float, optimizer: Optimizer | None = None) -> None:
        self._masters = masters = masters_beside_weights(optimizer)
        self.num_updates = 0
        self._model = model
        of: dict[Any, nn.Parameter] = {} if masters is None else masters.of
        self._live = {name: of.get(tensor, tensor) for name, tensor in averaged_tensors(model).items()}
        self.tensors = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        if optimizer is not None:
            count_as_state(optimizer, self.tensors.values())
        self._average = get_ema_multi_avg_fn(decay)
        self._is_applied = False

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step. Reads nothing from the device."""
        averages, weights = self._pairs()
        if self.num_updates:
            self._average(averages, weights, self.num_updates)
        else:
            for average, weight in zip(averages, weights, strict=True):
                average.copy_(weight)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the average inside, and its weights again afterwards, or from ``take_off`` on."""
        self.apply()
        try:
            yield
        finally:
            self.take_off()

    def apply(self) -> None:
        """Let the model have the average."""
        self._exchange(applied=True)

    def take_off(self) -> None:
        """Let the model have its weights again."""
        self._exchange(applied=False)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know; in shards the tensors are."""
        return {"num_updates": self.num_updates, "tensors": dict(self.tensors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state_dict``, of whole tensors or of those in shards.

        Raises:
            ValueError: it is that of another model.
        """
        if state["tensors"].keys() != self.tensors.keys():
            raise ValueError("the average is of other weights")
        for name, tensor in state["tensors"].items():
            self.tensors[name].copy_(cut_like(tensor, self.tensors[name]))
        self.num_updates = state["num_updates"]

    @torch.no_grad()
    def _exchange(self, *, applied: bool) -> None:
        """Swap weights and averages one by one, so that a single tensor is there twice."""
        if applied is self._is_applied:
            return
        stream = stream_of(self._model)
        if stream is not None:
            stream.settle()
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the root's stay gathered after a forward without a backward
        for average, weight in zip(*self._pairs(), strict=True):
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)
        if self._masters is not None:
            self._masters.send(list(self._masters.of.values()))
        self._is_applied = applied

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's parts of the averages and of the weights, in one order."""
        return list(map(local, self.tensors.values())), [local(tensor.detach()) for tensor in self._live.values()]
