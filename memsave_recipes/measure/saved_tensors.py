"""How many bytes a forward keeps for its backward: the figure that activation checkpointing lowers.

Counted exactly with ``torch.autograd.graph.saved_tensors_hooks``
(https://pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-doc): every storage that autograd saves, once,
without those of the parameters, which live anyway. What a checkpointed span saves *inside* does not reach these hooks,
and is not held; its inputs do.
"""

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class SavedTensors:
    """``with SavedTensors(model) as saved: loss = ...`` and then ``saved.num_bytes``.

    ``storages`` holds each storage's address and bytes. Leave the context before ``backward()``: storages are told
    apart by address, which may be used again once the backward frees them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.storages: dict[int, int] = {}  # address -> bytes
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages saved so far."""
        return sum(self.storages.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self.storages[storage.data_ptr()] = storage.nbytes()
        # Detached: a saved output that came back as itself would keep its own graph alive if no backward follows.
        return tensor.detach()

    def __enter__(self) -> "SavedTensors":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
