"""Model FLOPs: what the products of a forward and its backward cost, counted as they run, recomputation left out.

The formulas are those of ``torch.utils.flop_counter``: matrix products, convolutions and attention, two operations a
multiply-add; causal attention counts in full and everything else for nothing, as in the model FLOPs utilisation of PaLM
(Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B). What runs a second time to save memory is no work
of the model: neither an activation checkpoint's second forward nor the scores that a fused attention computes again in
its backward. So the count is the same under every plan.

Of flash-attn's own operators those of version 2 count, each document of a packed row by itself, as it is computed.

Known limits: other kernels from outside torch (Triton) and grouped products count nothing.
"""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
Formula = Callable[..., int]

CONVOLUTIONS = {aten.convolution, aten._convolution, aten.cudnn_convolution, aten.convolution_backward}


def _without_scores(formula: Formula) -> Formula:
    """Four of the five products of a fused attention's backward; the other makes the scores of the forward again."""
    return lambda *args, **kwargs: formula(*args, **kwargs) * 4 // 5


def _addmm(total: Tensor, left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """torch 2.13's own formula fails where the factors are rounded and their sum is not (``out_dtype``)."""
    return 2 * left.shape[0] * left.shape[1] * right.shape[1]


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores and their product with the values; (B, T, H, D) all three."""
    batch, rows, heads = query.shape[:3]
    return _scores_and_values(batch * rows * key.shape[1], heads, query, value)


def _flash_attn_varlen(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, columns: Tensor, *_: Any, **__: Any
) -> int:
    """The same for sequences that lie one after the other, (tokens, H, D), between the bounds ``rows``, ``columns``."""
    num_scores = int((rows.diff().long() * columns.diff().long()).sum())
    return _scores_and_values(num_scores, query.shape[1], query, value)


def _scores_and_values(num_scores: int, heads: int, query: Tensor, value: Tensor) -> int:
    return 2 * num_scores * heads * (query.shape[-1] + value.shape[-1])


def _formulas() -> dict[Any, Formula]:
    known: dict[Any, Formula] = dict(flop_registry) | {aten.addmm: _addmm}
    for kernel in ("flash_attention_for_cpu", "fused_attention_overrideable"):  # torch 2.13 has none for these
        known[getattr(aten, f"_scaled_dot_product_{kernel}")] = known[aten._scaled_dot_product_flash_attention]
        backward = known[aten._scaled_dot_product_flash_attention_backward]
        known[getattr(aten, f"_scaled_dot_product_{kernel}_backward")] = backward
    fused = {op for op in known if "attention" in str(op) and "backward" in str(op)}
    return {op: _without_scores(formula) if op in fused else formula for op, formula in known.items()}


FORMULAS = _formulas()

# flash-attn registers its operators when it is imported, which may be later than this. A backward takes, as that of
# torch's kernels, four products without the scores that it makes again; it is given ``dout, q, k, v, out, softmax_lse,
# dq, dk, dv`` and then what the forward is given after ``q, k, v``.
FORMULAS_BY_NAME: dict[str, Formula] = {
    "flash_attn._flash_attn_forward": _flash_attn,
    "flash_attn._flash_attn_varlen_forward": _flash_attn_varlen,
    "flash_attn._flash_attn_backward": lambda *args, **_: 2 * _flash_attn(*args[1:4]),
    "flash_attn._flash_attn_varlen_backward": lambda *args, **_: 2 * _flash_attn_varlen(*args[1:4], *args[9:11]),
}


def formula_of(operation: Any) -> Formula | None:
    """What counts the FLOPs of an operator, called as it is with its result as ``out_val``."""
    return FORMULAS.get(operation) or FORMULAS_BY_NAME.get(str(operation))


class ModelFlops(TorchDispatchMode):
    """``with ModelFlops() as counted: step()`` and then ``counted.by_precision``.

    ``by_precision`` holds the FLOPs by what the device computes with: a dtype such as ``bfloat16``, or ``tf32`` where
    torch's settings let the device round float32 factors to that. Slows down what runs in it; compiled code runs
    uncompiled.
    """

    supports_higher_order_operators = True  # flex attention

    def __init__(self) -> None:
        super().__init__()
        self.by_precision: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """FLOPs of all precisions."""
        return self.by_precision.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operation = getattr(func, "overloadpacket", func)
        formula = formula_of(operation)
        if formula is not None and not _recomputes():
            factor = args[1 if operation is aten.addmm else 0]
            self.by_precision[_precision(operation, factor)] += formula(*args, **kwargs, out_val=result)
        return result


def _precision(operation: Any, factor: Tensor) -> str:
    if factor.dtype == torch.float32 and factor.is_cuda and torch.version.hip is None:
        backends: Any = torch.backends
        settings = backends.cudnn.conv if operation in CONVOLUTIONS else backends.cuda.matmul
        if settings.fp32_precision == "tf32":
            return "tf32"
    return str(factor.dtype).removeprefix("torch.")


def _recomputes() -> bool:
    """Whether a checkpoint is running its function again: it does so while it unpacks a saved tensor."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "unpack_hook" and frame.f_globals is vars(checkpoint):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
