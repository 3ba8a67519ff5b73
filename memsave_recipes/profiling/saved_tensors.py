"""The bytes that a forward saves for backward: the figure that activation checkpointing lowers.

Counted exactly with ``torch.autograd.graph.saved_tensors_hooks``
(https://pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-doc): every storage that autograd saves, once,
without those of the parameters, which live anyway. Tensors *inside* a checkpointed span do not reach these hooks, as
they are not held; its inputs do. Those that a selective span keeps are told by its policy.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memsave_recipes.activations.selective import kept_by_policy

Ends = tuple[nn.Module, nn.Module]
"""The first and the last module of a block; the same one where the block is a module."""


class SavedTensors:
    """``with SavedTensors(model) as saved: loss = ...`` and then ``saved.num_bytes``.

    ``storages`` holds the bytes of each by its identity. Leave the context before ``backward()``: the identity of a
    storage may be another one's once the backward has freed it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self.storages: dict[int, int] = {}  # identity -> bytes
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages saved so far."""
        return sum(self.storages.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._parameters:
            self.storages[storage._cdata] = storage.nbytes()
        # Detached: a saved output that came back as itself would keep its own graph alive if no backward follows.
        return tensor.detach()

    def __enter__(self) -> "SavedTensors":
        self._hooks.__enter__()
        self._selective = kept_by_policy()
        self._kept = self._selective.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._selective.__exit__(*exception)
        self._hooks.__exit__(*exception)
        self.storages |= self._kept


class ForwardMeter:
    """Counts the bytes that the first forward of ``model`` inside its context saves, and in which blocks.

    Args:
        model: whose forward counts.
        blocks: in the order of the forward (``find_blocks``). They must keep everything: tensors inside a recomputed
            block are not seen.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Ends] = ()) -> None:
        self._model = model
        self._blocks = blocks
        self._saved = SavedTensors(model)
        self._inputs: dict[int, int] = {}  # of the blocks: identity -> bytes
        self._in_blocks: list[dict[int, int]] = []  # storages that each block was the first to save
        self._before_block: set[int] = set()
        self._handles: list[Any] = []
        self._counting = False
        self._has_begun = self._has_ended = False

    @property
    def num_bytes(self) -> int:
        """Bytes saved so far."""
        return self._saved.num_bytes

    @property
    def freed_by_recomputation_bytes(self) -> int | None:
        """How much less would be held with every block recomputed by itself; ``None`` while that is not known.

        Then the inputs of all blocks are kept instead, and one block at a time is rebuilt. Of a forward that did not
        end, only the blocks that had passed are in the figure.
        """
        if not self._in_blocks:
            return None
        in_blocks = {storage for saved in self._in_blocks for storage in saved}
        kept = {storage: size for storage, size in self._saved.storages.items() if storage not in in_blocks}
        kept |= self._inputs
        again = max(sum(size for storage, size in saved.items() if storage not in kept) for saved in self._in_blocks)
        freed = max(0, self.num_bytes - sum(kept.values()) - again)
        return freed if freed or self._has_ended else None

    def __enter__(self) -> "ForwardMeter":
        self._handles = [
            self._model.register_forward_pre_hook(self._begin, prepend=True),
            self._model.register_forward_hook(self._note_end),
            self._model.register_forward_hook(self._stop, always_call=True),
        ]
        for first, last in self._blocks:
            self._handles.append(first.register_forward_pre_hook(self._enter_block))
            self._handles.append(last.register_forward_hook(self._leave_block))
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, *_: Any) -> None:
        if not self._has_begun:
            self._saved.__enter__()
            self._counting = self._has_begun = True

    def _note_end(self, *_: Any) -> None:
        self._has_ended = True

    def _stop(self, *_: Any) -> None:
        if self._counting:
            self._saved.__exit__(None, None, None)
            self._counting = False

    def _enter_block(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not self._counting:
            return
        self._before_block = set(self._saved.storages)
        for tensor in _tensors(inputs):
            storage = tensor.untyped_storage()
            self._inputs[storage._cdata] = storage.nbytes()

    def _leave_block(self, *_: Any) -> None:
        if self._counting:
            saved = self._saved.storages
            self._in_blocks.append({storage: saved[storage] for storage in saved.keys() - self._before_block})


def find_blocks(model: nn.Module, names: Sequence[str]) -> list[Ends]:
    """The modules behind the names of a plan's blocks, such as ``features.0..2``, anywhere inside wrappers of a model.

    Empty where the blocks are no modules.
    """
    for root in model.modules():
        try:
            return [_ends(root, name) for name in names]
        except AttributeError:
            continue
    return []


def _ends(root: nn.Module, name: str) -> Ends:
    first, _, last = name.partition("..")
    siblings, dot, _ = first.rpartition(".")
    return root.get_submodule(first), root.get_submodule(f"{siblings}{dot}{last}" if last else first)


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
