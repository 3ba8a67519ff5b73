"""Selective checkpointing: save the outputs of expensive operators, and recompute the cheap ones in the backward.

Nearly all the time of a forward is in a few kinds of operators, and most of the bytes that the baseline saves are of
the others: normalisations, activations, dropout, casts. A thin layer over ``create_selective_checkpoint_contexts``
(non-reentrant checkpoint, https://pytorch.org/docs/stable/checkpoint.html), with BatchNorm counted once. Gradients are
bit for bit those of the baseline, but for one product: under any dispatch mode torch computes ``(B, n, m) @ (1, m,
k)``, of which the second factor needs no gradient, as one ``mm`` and not as a ``bmm``, which rounds otherwise on some
CPUs.

NOTE [ random numbers ]
1. The second run begins with the generator where the first one began. So every operator that draws has to draw again,
   in the same order: were one of them kept, every mask after it would be another one.
2. Attention draws where its ``dropout_p`` is not 0, and is kept where it is 0. Its tag alone does not tell the two
   apart, and attention of other packages carries no tag.

NOTE [ writing in place ]
1. The second run starts from the inputs, so nothing may write on them in place. Such a write is found while the
   function runs, and raises there instead of in autograd's backward.
2. Before the function writes in place on a kept output (a mixture of experts normalises the weights of its router so),
   a copy of it in the same layout is kept instead. The second run takes the copy as the operator's output and writes on
   it in turn: the same values at every point, and no more bytes are kept. After the function has ended nobody may write
   on a kept output; torch finds that in the backward.
3. ``inplace=True`` of the modules inside is no concern of the user: ``apply_plan`` sets them out of place. That costs
   no memory, because their outputs are not kept, and saves the copy.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _VersionWrapper,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from memsave_recipes.activations.recompute import FrozenStatistics
from memsave_recipes.errors import InputError

KEPT_OPERATORS = frozenset(
    {
        # Matrix products: nearly all FLOPs of a transformer.
        "aten::mm",  # linear layers without a bias
        "aten::addmm",  # linear layers with one
        "aten::bmm",  # attention that is written out: its scores are kept, its softmax is not
        "aten::baddbmm",  # the same with a bias on the scores
        "aten::addbmm",  # the same, summed over the batch
        "aten::mv",  # reads a whole matrix for one vector
        "aten::addmv",  # the same with a bias
        "aten::linear",  # where a backend has it as one operator; elsewhere it is addmm or mm by now
        "aten::_addmm_activation",  # a product with its activation fused in
        "aten::_int_mm",  # 8-bit integers
        "aten::_scaled_mm",  # 8-bit floats
        "aten::_scaled_mm_v2",  # the same, newer
        "aten::_grouped_mm",  # the experts of a mixture, one call for all
        "aten::_scaled_grouped_mm",  # the same in 8-bit floats
        "aten::_scaled_grouped_mm_v2",  # the same, newer
        # Convolutions: nearly all FLOPs of a CNN.
        "aten::convolution",  # every kind: transposed, grouped and depthwise ones too
        "aten::conv_tbc",  # sequences first
        # Attention: quadratic time for a linear output. One name for every kernel.
        "aten::_scaled_dot_product_flash_attention",  # CUDA
        "aten::_scaled_dot_product_flash_attention_for_cpu",  # CPU
        "aten::_scaled_dot_product_efficient_attention",  # CUDA, any mask
        "aten::_scaled_dot_product_cudnn_attention",  # CUDA, Hopper and newer
        "aten::_scaled_dot_product_fused_attention_overrideable",  # XPU and devices outside torch
        "aten::_scaled_dot_product_attention_math_for_mps",  # Apple
        "aten::_triton_scaled_dot_attention",  # written in Triton
        "aten::_flash_attention_forward",  # CUDA, of nested tensors
        "aten::_efficient_attention_forward",  # the same, any mask
        "aten::_cudnn_attention_forward",  # the same, cuDNN
        "torch_attn::_varlen_attn",  # sequences of many lengths in one row
        "flash_attn::_flash_attn_forward",  # the flash-attn package, as transformers calls it
        "flash_attn::_flash_attn_varlen_forward",  # the same, sequences of many lengths
        "flex_attention",  # eager; a compiled one is not seen, and runs again
        # Communication: slow, and all ranks have to meet for it. Operators that write in place are not among it.
        "_c10d_functional::all_gather_into_tensor",  # tensor and sequence parallel layers
        "_c10d_functional::all_reduce",  # tensor parallel layers
        "_c10d_functional::reduce_scatter_tensor",  # sequence parallel layers
        "_c10d_functional::all_to_all_single",  # tokens to experts and back
        "_c10d_functional::broadcast",  # rarely
        # Routing.
        "aten::topk",  # which experts take a token: small, slow to find, and ties must break the same way again
    }
)
"""The operators whose outputs ``select_ops`` keeps, in all overloads; names that this torch lacks match nothing.

Everything else runs again: it costs about one pass over memory, as reading a kept output would. That holds for the
embeddings, the casts of autocast and the unpacking of 4-bit weights too, whose outputs are large.
"""


def select_ops(function: Callable[..., Any], *inputs: Any, modules: Iterable[nn.Module]) -> Any:
    """``function(*inputs)``, of which only the inputs and the outputs of ``KEPT_OPERATORS`` are saved for backward.

    One backward only: a second one through the same graph raises, also with ``retain_graph=True``.

    Args:
        function: runs once now and once, without those operators, in the backward; must do the same both times.
        inputs: tensors among them are saved for backward; pass them here rather than by closure so that they count as
            saved tensors.
        modules: run by ``function``; their BatchNorm layers record nothing the second time.

    Raises:
        InputError: an operator writes in place on an input; in the backward, if a kept output was written on after
            ``function`` ended, or if the second run uses other operators than the first (torch 2.11 sees that of kept
            ones alone). Under autocast it does where the first one found weights cast already, because another block
            has the same or ran twice: known limit.
        RuntimeError: in the backward, if it is the second one.
    """
    first_run, second_run = _contexts(list(modules), inputs)

    def run(*inputs: Any) -> Any:
        try:
            return function(*inputs)
        except BaseException:
            first_run.leave()
            raise

    return checkpoint(run, *inputs, use_reentrant=False, context_fn=lambda: (first_run, second_run))


@contextmanager
def kept_by_policy() -> Iterator[dict[int, int]]:
    """Collects the storages that every ``select_ops`` inside keeps: identity to bytes, each once.

    They do not pass through the hooks of saved tensors. Together with those that do (``SavedTensors.storages`` has the
    same form, and may hold some of the same storages) they are saved for backward. As there, leave the context
    before the backward, which frees them.
    """
    _WATCHING.append({})
    try:
        yield _WATCHING[-1]
    finally:
        _WATCHING.pop()


_WATCHING: list[dict[int, int]] = []


def is_kept(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``select_ops`` keeps the output of this call of an operator. See NOTE [ random numbers ]."""
    name = op.name().partition(".")[0]
    return name in KEPT_OPERATORS and not _is_mutable(op) and not draws(op, args, kwargs)


def _contexts(modules: list[nn.Module], inputs: tuple[Any, ...]) -> tuple["_FirstRun", "_SecondRun"]:
    block = " + ".join(dict.fromkeys(type(module).__name__ for module in modules))
    caching, cached = create_selective_checkpoint_contexts(_policy)
    return _FirstRun(caching, block, inputs), _SecondRun(cached, FrozenStatistics(modules), block)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(op, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


class _FirstRun(TorchDispatchMode):
    """Torch's mode for the run in the forward, and NOTE [ writing in place ]."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As torch's mode does."""
        return True

    def __init__(self, caching: Any, block: str, inputs: tuple[Any, ...]) -> None:
        TorchDispatchMode.__init__(self)
        self.caching = caching
        self.block = block
        self.inputs = _storages(inputs)
        self.kept: dict[int, int] = {}
        self.is_on = False

    def __enter__(self) -> "_FirstRun":
        self.is_on = True
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """For good. After an error torch 2.11 leaves a mode only when nobody holds the traceback any more."""
        if self.is_on:
            self.is_on = False
            TorchDispatchMode.__exit__(self, None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for storage in _written_storages(func, args, kwargs):
            self._allow_write(func, storage)
        output = self.caching.__torch_dispatch__(func, types, args, kwargs)
        if is_kept(func, args, kwargs):
            self._add_kept(output)
        return output

    def _allow_write(self, op: Any, storage: int) -> None:
        if storage in self.inputs:
            raise _refusal(self.block, f"{op.name()} writes in place on an input of the block: write it out of place")
        if self.kept.pop(storage, None) is not None:
            for watching in _WATCHING:
                watching.pop(storage, None)
            self._keep_copies(storage)

    def _keep_copies(self, storage: int) -> None:
        for entry in tree_leaves(self.caching.storage):
            if isinstance(entry, _VersionWrapper) and storage in _storages(entry.val):
                entry.val = entry.val.new_empty_strided(entry.val.size(), entry.val.stride()).copy_(entry.val)
                entry.version = entry.val._version
                self._add_kept(entry.val)

    def _add_kept(self, output: Any) -> None:
        storages = _storages(output)
        self.kept |= storages
        for watching in _WATCHING:
            watching |= storages


class _SecondRun:
    """The context of the run in the backward: kept outputs in place of their operators, BatchNorm recording nothing."""

    def __init__(self, cached: AbstractContextManager[Any], frozen: FrozenStatistics, block: str) -> None:
        self.cached = cached
        self.frozen = frozen
        self.block = block

    def __enter__(self) -> None:
        self.frozen.__enter__()
        self.cached.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cached.__exit__(kind, error, trace)
        self.frozen.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError):
            for words, reason in _EXPLANATIONS.items():
                if words in str(error):
                    raise _refusal(self.block, reason) from error


_EXPLANATIONS = {
    "has been mutated": "a tensor that it keeps was written on in place after it ran: write it out of place",
    "not found in storage": (
        "its second run uses other operators than its first: leave contexts and remove the plan after the backward, "
        "use no weight twice under one autocast"
    ),
}
"""The meaning of torch's errors of the second run, and the way out."""


def _refusal(block: str, reason_and_way_out: str) -> InputError:
    return InputError(
        f"strategy: {block} cannot run under selective, because {reason_and_way_out}, or keep or recompute this block"
    )


def _written_storages(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
    """The storages that this call of an operator writes on."""
    for position, argument in enumerate(op._schema.arguments if _is_mutable(op) else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _storages(args[position] if position < len(args) else kwargs.get(argument.name))


def _is_mutable(op: Any) -> bool:
    schema = getattr(op, "_schema", None)  # higher-order operators have none
    return schema is not None and bool(schema.is_mutable)


def draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of an operator takes random numbers. See NOTE [ random numbers ]."""
    schema = getattr(op, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema else ()):
        if argument.name == "dropout_p":
            dropout = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(dropout != 0)
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def _storages(values: Any) -> dict[int, int]:
    """Identity and bytes of the storages of all tensors in ``values``; fake ones have no address."""
    storages = [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages if storage.nbytes()}
