"""Model FLOPs of a step, and their share of a device's peak.

FLOPs are those of ``torch.utils.flop_counter``: matrix products, convolutions and attention, two operations a
multiply-add; causal attention counts in full and everything else for nothing, as in the model FLOPs utilisation of PaLM
(Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B). Recomputation is no work of the model, so the
count is the same under every plan. Other kernels from outside torch (Triton) and grouped products count nothing.

NOTE [ rates of a card ]
1. Peaks are the vendors' dense rates with sums in float32. A device or precision that is not in ``cards.json`` has no
   figure: nothing is guessed from relatives (an A10G is slower than an A10, a MIG slice than its device).
2. Those of GeForce and workstation cards follow from their cores and clock, as ``about_families`` there says.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from memsave_recipes.core.activations.recompute import Checkpoint

KEPT_BY_DRIVER_GIB = 0.7  # an assumption
TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("cards.json").read_text(encoding="utf-8"))
"""Figures of devices, with their sources."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A device by its vendor's figures.

    Args:
        name: as ``torch.cuda.get_device_name`` calls it.
        memory_gb_per_s, host_gb_per_s: of its memory, and of its link to the host, one way.
        memory_gib: as torch finds it.
        tflops: TFLOP/s by precision.
    """

    name: str
    memory_gb_per_s: float
    host_gb_per_s: float
    memory_gib: float
    tflops: Mapping[str, float]

    @classmethod
    def of_cores(cls, *, family: str, cores: int, clock_mhz: int, memory_gb: int, **figures: Any) -> "Card":
        """Return a card by its product page: rule 2 of NOTE [ rates of a card ]; the driver keeps some memory."""
        float32 = 2 * cores * clock_mhz / 1e6
        tflops = {precision: float32 * multiple for precision, multiple in TABLES["families"][family].items()}
        return cls(tflops={"float32": float32, **tflops}, memory_gib=memory_gb - KEPT_BY_DRIVER_GIB, **figures)


PEAK_TFLOPS: dict[str, Mapping[str, float]] = {row["devices"]: row["tflops"] for row in TABLES["peaks"]}
"""By a pattern of the whole device name."""


def _tflops_of(device_name: str) -> Mapping[str, float]:
    return next((rates for pattern, rates in PEAK_TFLOPS.items() if re.fullmatch(pattern, device_name)), {})


CARDS = {word: Card(**figures, tflops=_tflops_of(figures["name"])) for word, figures in TABLES["sheets"].items()}
"""By the word that ``--target`` takes."""
for _word, _figures in TABLES["cards"].items():
    CARDS[_word] = Card.of_cores(**_figures)
    PEAK_TFLOPS.setdefault(re.escape(CARDS[_word].name), CARDS[_word].tflops)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the FLOP/s that the vendor states for a device, named as by torch; ``None`` if unknown."""
    tflops = _tflops_of(device_name).get(precision)
    return None if tflops is None else tflops * 1e12


def utilization_pct(flops_per_sec: Mapping[str, float], device_name: str) -> float | None:
    """Return the share of a device's peak that it reaches, in per cent; ``None`` where a peak is unknown.

    Args:
        flops_per_sec: of one device, by precision as ``ModelFlops.by_precision`` has them.
    """
    seconds = 0.0  # that a second's work takes at the peak
    for precision, flops in flops_per_sec.items():
        peak = peak_flops(device_name, precision)
        if peak is None:
            return None
        seconds += flops / peak
    return 100 * seconds if seconds else None


aten = torch.ops.aten
Formula = Callable[..., int]

FUSED_ATTENTION = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",  # torch has no formula for this one and the next
    "fused_attention_overrideable",
)
CONVOLUTIONS = {aten.convolution, aten._convolution, aten.cudnn_convolution, aten.convolution_backward}


def _without_scores(formula: Formula) -> Formula:
    """Count four of the five products of a fused attention's backward; the other makes the scores again."""
    return lambda *args, **kwargs: formula(*args, **kwargs) * 4 // 5


def _with_heads_of_query(formula: Formula, first: int) -> Formula:
    """Tell the formula that keys and values have as many heads as the query; torch 2.11's fail where they share some.

    Args:
        first: the position of the query (B, H, T, D) among the arguments.
    """

    def counted(*args: Any, **kwargs: Any) -> int:
        query, *keys_and_values = args[first : first + 3]
        shapes = [torch.Size([*query.shape[:2], *states.shape[2:]]) for states in keys_and_values]
        return formula(*args[:first], query, *shapes, *args[first + 3 :], **kwargs)

    return counted


def _addmm(total: Tensor, left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Count a product; torch 2.13's own formula fails where only the factors are rounded (``out_dtype``)."""
    return 2 * left.shape[0] * left.shape[1] * right.shape[1]


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count scores and their product with the values; (B, T, H, D) all three."""
    batch, rows, heads = query.shape[:3]
    return _scores_and_values(batch * rows * key.shape[1], heads, query, value)


def _flash_attn_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor | None,
    columns: Tensor | None,
    most_rows: int,
    most_columns: int,
    *_: Any,
    **__: Any,
) -> int:
    """Do the same for sequences one after the other, (tokens, H, D), between the bounds ``rows``, ``columns``.

    An estimate knows no bounds: each token counts as one of the longest sequence. ``None``: as in ``_flash_attn``.
    """
    if rows is None or columns is None:
        return _flash_attn(query, key, value)
    if isinstance(rows, FakeTensor):
        num_scores = len(query) * most_columns
    else:
        num_scores = int((rows.diff().long() * columns.diff().long()).sum())
    return _scores_and_values(num_scores, query.shape[1], query, value)


def _scores_and_values(num_scores: int, heads: int, query: Tensor, value: Tensor) -> int:
    return 2 * num_scores * heads * (query.shape[-1] + value.shape[-1])


def _formulas() -> dict[Any, Formula]:
    known: dict[Any, Formula] = dict(flop_registry) | {aten.addmm: _addmm}
    forward = _with_heads_of_query(known[aten._scaled_dot_product_flash_attention], first=0)
    backward = _with_heads_of_query(known[aten._scaled_dot_product_flash_attention_backward], first=1)
    for kernel in FUSED_ATTENTION:
        known[getattr(aten, f"_scaled_dot_product_{kernel}")] = forward
        known[getattr(aten, f"_scaled_dot_product_{kernel}_backward")] = backward
    known[aten._flash_attention_forward] = _flash_attn_varlen
    known[aten._flash_attention_backward] = lambda *args, **_: 5 * _flash_attn_varlen(*args[1:4], *args[6:10]) // 2
    return known


FORMULAS_OF_ALL_THAT_RUNS = _formulas()
"""The scores that a fused attention computes a second time included."""

FORMULAS = {
    op: _without_scores(formula) if re.search("att(entio)?n.*backward", str(op)) else formula
    for op, formula in FORMULAS_OF_ALL_THAT_RUNS.items()
}

# These operators are registered when a module is imported, which may be later than this, and torch has formulas of its
# own for some: these go first. A backward takes, as that of torch's kernels, four products without the scores that it
# makes again; it is given ``dout, q, k, v, out, softmax_lse`` (of flash-attn ``dq, dk, dv`` too) and then the arguments
# of the forward after ``q, k, v``.
FORMULAS_BY_NAME: dict[str, Formula] = {
    "flash_attn._flash_attn_forward": _flash_attn,
    "flash_attn._flash_attn_varlen_forward": _flash_attn_varlen,
    "flash_attn._flash_attn_backward": lambda *args, **_: 2 * _flash_attn(*args[1:4]),
    "flash_attn._flash_attn_varlen_backward": lambda *args, **_: 2 * _flash_attn_varlen(*args[1:4], *args[9:13]),
    "torch_attn._varlen_attn": _flash_attn_varlen,
    "torch_attn._varlen_attn_backward": lambda *args, **_: 2 * _flash_attn_varlen(*args[1:4], *args[6:10]),
}


class ModelFlops(TorchDispatchMode):
    """``with ModelFlops() as counted: step()`` and then ``counted.by_precision``.

    ``by_precision`` holds the FLOPs by the precision of the factors: a dtype such as ``bfloat16``, or ``tf32`` where
    torch's settings let the device round float32 factors to that. Code runs slower in it, compiled code uncompiled.

    Args:
        for_cuda: whether the step is to run on CUDA, where its fake tensors do not say so.
    """

    supports_higher_order_operators = True  # flex attention

    def __init__(self, *, for_cuda: bool = False) -> None:
        TorchDispatchMode.__init__(self)
        self.for_cuda = for_cuda
        self.by_precision: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """FLOPs of all precisions."""
        return self.by_precision.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operation = getattr(func, "overloadpacket", func)
        formula = FORMULAS_BY_NAME.get(str(operation)) or FORMULAS.get(operation)
        if formula is not None and not _recomputes():
            factor = args[1 if operation is aten.addmm else 0]
            precision = _precision(operation, factor.dtype, on_cuda=self.for_cuda or factor.is_cuda)
            self.by_precision[precision] += formula(*args, **kwargs, out_val=result)
        return result


def _precision(operation: Any, dtype: torch.dtype, *, on_cuda: bool) -> str:
    if dtype == torch.float32 and on_cuda and torch.version.hip is None:
        backends: Any = torch.backends
        settings = backends.cudnn.conv if operation in CONVOLUTIONS else backends.cuda.matmul
        if settings.fp32_precision == "tf32":
            return "tf32"
    return str(dtype).removeprefix("torch.")


def _recomputes() -> bool:
    """Return whether a checkpoint is running its function again: it does so while it unpacks a saved tensor."""
    frame = sys._getframe()
    while frame is not None:
        of_torch = frame.f_code.co_name == "unpack_hook" and frame.f_globals is vars(checkpoint)
        if of_torch or frame.f_code is Checkpoint.unpack_hook.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
