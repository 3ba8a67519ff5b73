"""Attention of packed rows by document: each one by itself, causal, so that no mask is made.

Notes: ``docs/design/models.md``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.compiler import is_compiling
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from memsave_recipes.core.activations.compiled import NEVER_COMPILED
from memsave_recipes.core.activations.tiled_attention import NotInTiles
from memsave_recipes.core.errors import InputError

PackedAttention = Literal["auto", "document", "mask"]
DocumentLengths = Sequence[Sequence[int]]  # for each row, the tokens of its documents

BY_DOCUMENT = "sdpa_by_document"
ENDS_IN_A_GRAPH = 64
TAKEN = frozenset({"document_lengths", "dropout", "scaling", "sliding_window"})
WITHOUT_EFFECT = frozenset({"position_ids", "cache_position", "use_cache", "output_router_logits"})
"""Arguments of the model that reach its attention functions, and that SDPA does not read."""
TOLERANCE, ROUNDINGS = 1e-4, 64
"""Of logits against those by masks: a part of the largest one, in half precision so many of its roundings."""
OTHER_LOGITS = "its logits would be others"

aten = torch.ops.aten


def attention_by_document(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    document_lengths: DocumentLengths | None = None,
    keys_so_far: Any = None,
    sequence_group: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as an attention function of transformers, (B, H, T, D) to (B, T, H, D): NOTE [ attention by document ].

    Args:
        key, value: (B, K, T, D), of heads that ``H / K`` heads of the query share.
        attention_mask: not read.
        document_lengths: of each row, T in sum, else ``ValueError`` or ``RuntimeError``; ``None``: a row is a document.
        keys_so_far: ``KeysSoFar`` of ``core/activations/tiled_attention.py``, where T are the tokens of a tile.
        sequence_group: ``SequenceGroup`` of ``models/sequence_parallel.py``, where T are the tokens of a slice; the
            lengths are still those of whole rows.
    """
    query, key, value = (_as_sdpa_casts(states) for states in (query, key, value))
    if keys_so_far is not None:
        if sequence_group is not None:
            raise NotInTiles
        return keys_so_far.attend(query, key, value, dropout=dropout, scale=scaling, window=sliding_window), None
    attend = partial(_attend, lengths=document_lengths, scale=scaling, sliding_window=sliding_window, dropout=dropout)
    if sequence_group is not None:
        return sequence_group.attend(attend, query, key, value), None
    return attend(query, key, value), None


AttentionInterface.register(BY_DOCUMENT, attention_by_document)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    lengths: DocumentLengths | None,
    scale: float | None,
    sliding_window: int | None,
    dropout: float,
) -> Tensor:
    """Attend in whole rows, from (B, H, T, D) and twice (B, K, T, D) to (B, T, H, D)."""
    if is_compiling():
        if dropout:
            raise ValueError("dropout in attention by document cannot be compiled: take masks")
        ends = None if lengths is None else lengths.ends  # type: ignore[attr-defined]
        attended: Tensor = _attended_and_sums(query, key, value, ends, scale, sliding_window)[0]
        return attended
    lengths = [[query.shape[2]]] * len(query) if lengths is None else lengths
    window = _shorter_window(sliding_window, lengths)
    if _has_varlen(query, key, value, dropout):
        return _varlen(query, key, value, lengths, scale, window)[0]
    if window is None and _has_flash_on_cpu(query, key, value, dropout):
        joined: Tensor = _FlashOnCpu.apply(query, key, value, lengths, scale)  # type: ignore[no-untyped-call]
        return joined
    return _sdpa_of_each(query, key, value, lengths, scale, window, dropout)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, lengths: DocumentLengths, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attend from (B, H, T, D) and twice (B, K, T, D) to (B, T, H, D): rule 3 of NOTE [ attention by document ].

    Returns the log-sum-exps, (H, B * T), as well.
    """
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{key.shape[1]} heads of keys need the {query.shape[1]} query heads to be a multiple")
    bounds, longest = _bounds(lengths, query), max(map(max, lengths))
    attended, sums, *_ = aten._flash_attention_forward.default(
        *map(_joined_rows, (query, key, value)),
        *(bounds, bounds, longest, longest, 0.0, window is None, False),
        **_varlen_options(scale, window),
    )
    return attended.view(len(query), -1, *attended.shape[1:]), sums


def _varlen_backward(
    gradient: Tensor,
    states: Sequence[Tensor],
    attended: Tensor,
    sums: Tensor,
    lengths: DocumentLengths,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, from what ``_varlen`` returns and the gradient of its first."""
    bounds, longest = _bounds(lengths, states[0]), max(map(max, lengths))
    unused = torch.empty(0, dtype=torch.uint64, device=gradient.device)  # without dropout
    found = aten._flash_attention_backward.default(
        *(gradient.flatten(0, 1), *map(_joined_rows, states), attended.flatten(0, 1), sums),
        *(bounds, bounds, longest, longest, 0.0, window is None, unused, unused),
        **_varlen_options(scale, window),
    )
    of_query, of_key, of_value = (one.unflatten(0, (len(gradient), -1)).transpose(1, 2) for one in found)
    return of_query, of_key, of_value


def _joined_rows(states: Tensor) -> Tensor:
    """Join the rows of (B, H, T, D) to (B * T, H, D)."""
    return states.transpose(1, 2).flatten(0, 1)


def _varlen_options(scale: float | None, window: int | None) -> dict[str, Any]:
    return {"scale": scale, "window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


def _bounds(lengths: DocumentLengths, query: Tensor) -> Tensor:
    """Return where documents begin and end, rows one behind the other: (documents + 1,) int32 on the query's device."""
    of_all = tuple(length for row in lengths for length in row)
    if sum(of_all) != query.shape[0] * query.shape[2]:
        raise ValueError(f"documents of {sum(of_all)} tokens in rows of {query.shape[0] * query.shape[2]}")
    if isinstance(query, FakeTensor):
        return query.new_empty(len(of_all) + 1, dtype=torch.int32)
    return _bounds_on(query.device, of_all)


@lru_cache(maxsize=1)
def _bounds_on(device: torch.device, lengths: tuple[int, ...]) -> Tensor:
    """Copy the bounds, kept for all layers of a micro-batch; modes would see that the first one copies."""
    with _disable_current_modes(), torch.inference_mode(False):
        ends = list(accumulate(lengths, initial=0))
        bounds = torch.tensor(ends, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        return bounds.to(device, non_blocking=True)


def _has_varlen(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Tell whether one call takes all documents; an estimate answers as the device that it is for."""
    fits = query.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    if not query.is_cuda or torch.version.hip is not None or dropout or not fits:
        return False
    choice = torch._fused_sdp_choice(query, key, value, None, 0.0, True, enable_gqa=True)
    return choice in (SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value)


class _FlashOnCpu(torch.autograd.Function):
    """Rule 4 of NOTE [ attention by document ]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, lengths: DocumentLengths, scale: float | None
    ) -> Tensor:
        """Attend from (B, H, T, D) and twice (B, K, T, D) to (B, T, H, D)."""
        joined, sums = _flash_on_cpu(query, key, value, lengths, scale)
        ctx.save_for_backward(query, key, value, joined, *sums)
        ctx.lengths, ctx.scale = lengths, scale
        return joined

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients in the shapes of query, key and value from (B, T, H, D)."""
        query, key, value, joined, *sums = ctx.saved_tensors
        states = query, key, value
        return *_flash_on_cpu_backward(gradient, states, joined, sums, ctx.lengths, ctx.scale), None, None


def _flash_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, lengths: DocumentLengths, scale: float | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Attend as ``_FlashOnCpu``; returns the log-sum-exps of each document, (1, H, L), as well."""
    results = [
        aten._scaled_dot_product_flash_attention_for_cpu(*states, 0.0, True, scale=scale)
        for states in _documents_of_all(lengths, query, key, value)
    ]
    attended, sums = zip(*results, strict=True)
    return _rows([out.transpose(1, 2) for out in attended], len(lengths)), sums


def _flash_on_cpu_backward(
    gradient: Tensor,
    states: Sequence[Tensor],
    joined: Tensor,
    sums: Sequence[Tensor],
    lengths: DocumentLengths,
    scale: float | None,
) -> Iterator[Tensor]:
    """Yield the gradients of query, key and value from that of ``joined``."""
    whole = (gradient.transpose(1, 2), *states, joined.transpose(1, 2))
    gradients = [
        aten._scaled_dot_product_flash_attention_for_cpu_backward(*document, logsumexp, 0.0, True, scale=scale)
        for document, logsumexp in zip(_documents_of_all(lengths, *whole), sums, strict=True)
    ]
    for documents in zip(*gradients, strict=True):
        yield _rows([one.transpose(1, 2) for one in documents], len(lengths)).transpose(1, 2)


def _has_flash_on_cpu(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Tell whether SDPA would take the CPU's flash kernel; an estimate for CUDA computes on the CPU, but says CUDA."""
    states_of_all = (query, key, value)
    if query.is_cuda or query.device.type != "cpu" or any(states.stride(-1) != 1 for states in states_of_all):
        return False
    with _disable_current_modes():  # of an estimate, for whose tensors torch has no fused kernel
        q, k, v = (torch.empty(states.shape[-1], dtype=states.dtype).expand(states.shape) for states in states_of_all)
        choice = torch._fused_sdp_choice(q, k, v, None, dropout, True, enable_gqa=True)
    return bool(choice == SDPBackend.FLASH_ATTENTION.value)


def _as_sdpa_casts(states: Tensor) -> Tensor:
    """Cast as SDPA does under autocast; its kernel alone does not."""
    kind = states.device.type
    is_cast = kind != "meta" and torch.is_autocast_enabled(kind)
    return states.to(torch.get_autocast_dtype(kind)) if is_cast and states.dtype != torch.float64 else states


def _documents_of_all(lengths: DocumentLengths, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the pieces of the same document in all of them."""
    return zip(*(_documents(states, lengths) for states in tensors), strict=True)


def _documents(states: Tensor, lengths: DocumentLengths) -> list[Tensor]:
    """Split (B, H, T, D) into views, a document each: (1, H, L, D)."""
    rows = zip(states.split(1), lengths, strict=True)
    return [
        document for row, of_row in rows for document in ([row] if len(of_row) == 1 else row.split(list(of_row), dim=2))
    ]


def _rows(documents: Sequence[Tensor], num_rows: int) -> Tensor:
    """Join documents of (1, L, H, D) to (B, T, H, D)."""
    joined = torch.cat(list(documents), dim=1)
    return joined.view(num_rows, -1, *joined.shape[2:])


def _sdpa_of_each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: DocumentLengths,
    scale: float | None,
    window: int | None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend from (B, H, T, D) and twice (B, K, T, D) to (B, T, H, D): rules 4 and 5 of the NOTE."""
    heads: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1])
    windows = _windows(max(map(max, lengths)), window, query.device)
    attended = [
        sdpa_attention_forward(heads, q, k, v, windows(q.shape[2]), dropout, scale, is_causal=True)[0]
        for q, k, v in _documents_of_all(lengths, query, key, value)
    ]
    return _rows(attended, len(lengths))


def _windows(longest: int, sliding_window: int | None, device: torch.device) -> Callable[[int], Tensor | None]:
    """Return which keys a document's tokens see by its length: bool (L, L), cut from one mask; ``None``: all before."""
    if sliding_window is None:
        return lambda length: None
    seen = torch.ones(longest, longest, dtype=torch.bool, device=device).tril().triu(1 - sliding_window)
    return lambda length: None if sliding_window >= length else seen[:length, :length]


def _shorter_window(window: int | None, lengths: DocumentLengths) -> int | None:
    """Return the window where a document is longer."""
    return window if window is not None and window < max(map(max, lengths)) else None


# In compiled layers: rule 7 of NOTE [ attention by document ]


class Documents(Sequence[Sequence[int]]):
    """The lengths of the documents of each row, and for graphs where they end in all rows, one behind the other.

    The ends, int64 on the host, begin with those of the rows, and repeat the last one up to a multiple of 64: few
    graphs see another number of them.
    """

    def __init__(self, lengths: DocumentLengths) -> None:
        self.lengths = lengths
        ends = list(accumulate(length for row in lengths for length in row))
        ends += ends[-1:] * (-len(ends) % ENDS_IN_A_GRAPH)
        with torch.inference_mode(False):
            self.ends = self.counted = torch.tensor(ends, device="cpu")
            if isinstance(self.counted, FakeTensor):  # by an estimate, in which compiled layers read values, too
                with _disable_current_modes():
                    self.ends = torch.tensor(ends, device="cpu")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: Any) -> Any:
        return self.lengths[row]


@torch.library.custom_op("memsave::attention_by_document", mutates_args=())
def _attended_and_sums(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor | None, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attend as ``attention_by_document``; returns the log-sum-exps, (H, B * T), too, where a kernel gives them."""
    lengths = _lengths(ends, query)
    window = _shorter_window(window, lengths)
    if _has_varlen(query, key, value, 0.0):
        return _varlen(query, key, value, lengths, scale, window)
    if window is None and _has_flash_on_cpu(query, key, value, 0.0):
        joined, sums = _flash_on_cpu(query, key, value, lengths, scale)
        return joined, torch.cat(sums, dim=2).squeeze(0)
    return _sdpa_of_each(query, key, value, lengths, scale, window), _no_sums(query)


@_attended_and_sums.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor | None, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    return query.transpose(1, 2).new_empty(*query.transpose(1, 2).shape[:3], value.shape[-1]), _no_sums(query)


@register_flop_formula(torch.ops.memsave.attention_by_document)
def _flops(query_shape: Any, key_shape: Any, value_shape: Any, *_: Any, **__: Any) -> int:
    """Count those of whole rows, as torch does for its own, by which a compiled layer chooses what to recompute."""
    batch, heads, tokens, size = query_shape
    return int(2 * batch * heads * tokens * tokens * (size + value_shape[-1]))


@torch.library.custom_op("memsave::attention_by_document_backward", mutates_args=())
def _gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    sums: Tensor,
    ends: Tensor | None,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from that of the output, (B, T, H, D)."""
    lengths, states = _lengths(ends, query), (query, key, value)
    window = _shorter_window(window, lengths)
    if _has_varlen(query, key, value, 0.0):
        return _varlen_backward(gradient, states, attended, sums, lengths, scale, window)
    if window is None and _has_flash_on_cpu(query, key, value, 0.0):
        of_each = sums[None].split([length for row in lengths for length in row], dim=2)
        of_query, of_key, of_value = _flash_on_cpu_backward(gradient, states, attended, of_each, lengths, scale)
        return of_query, of_key, of_value
    autograd = torch._C.DispatchKey.AutogradFunctionality  # which operators do without inside
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(autograd, False):
        q, k, v = again = [one.detach().requires_grad_() for one in states]
        found = torch.autograd.grad(_sdpa_of_each(q, k, v, lengths, scale, window), again, gradient)
    of_query, of_key, of_value = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in found)
    return of_query, of_key, of_value


@_gradients.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    of_query, of_key, of_value = (
        one.new_empty(one.transpose(1, 2).shape).transpose(1, 2) for one in (query, key, value)
    )
    return of_query, of_key, of_value


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors[:3], *output, tensors[3])


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(gradient, *ctx.saved_tensors, ctx.scale, ctx.window), None, None, None


_attended_and_sums.register_autograd(_differentiate, setup_context=_save)


def _lengths(ends: Tensor | None, query: Tensor) -> DocumentLengths:
    """Return the lengths in rows as long as those of ``query`` that end at ``Documents.ends``."""
    if ends is None:
        return [[query.shape[2]]] * len(query)
    rows: list[list[int]] = [[] for _ in query]
    for start, stop in pairwise([0, *dict.fromkeys(ends.tolist())]):
        rows[start // query.shape[2]].append(stop - start)
    return rows


def _no_sums(query: Tensor) -> Tensor:
    """Stand for the log-sum-exps."""
    batch, heads, tokens, _ = query.shape
    return query.new_empty(heads, batch * tokens, dtype=torch.promote_types(query.dtype, torch.float32))


def attends_by_document(model: nn.Module) -> bool:
    """Tell whether ``attend_by_document`` has set it."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == BY_DOCUMENT


def drops(model: nn.Module) -> bool:
    """Tell whether a model of transformers has dropout anywhere."""
    settings = model.config.to_dict().items()  # type: ignore[operator,union-attr]
    return any(bool(value) for name, value in settings if "dropout" in name or "pdrop" in name)


def set_packed_attention(
    model: PreTrainedModel, wanted: PackedAttention, *, compiles: bool = False
) -> tuple[PackedAttention, str]:
    """Choose how the model attends to packed rows, ``document`` or ``mask``; return that, and a line that says so.

    Raises ``InputError`` where it cannot attend by document as wanted.
    """
    if wanted == "mask":
        reason: str | None = "as this run began"
    else:
        reason = "its layers are compiled, with dropout" if compiles and drops(model) else attend_by_document(model)
    if reason is None:
        if drops(model):
            setattr(model, NEVER_COMPILED, True)
        return "document", "packed rows: attention by document, without masks"
    if wanted == "document":
        raise InputError(f"the model cannot attend by document, because {reason}: take masks")
    return "mask", f"packed rows: attention with masks ({reason})"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, inside."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def attend_by_document(model: PreTrainedModel) -> str | None:
    """Let a causal language model attend by document, where that gives its own logits; else return why not.

    A model on the ``meta`` device has none to compare; the arguments of its attention decide.
    """
    before = model.config._attn_implementation
    if before != "sdpa":
        return f"its attention is {before}"
    if not model._can_set_attn_implementation():
        return "its attention is its own"
    with evaluating(model):
        try:
            reason = _why_not(model)
        except Exception as error:  # transformers' models take no common set of arguments
            reason = f"it fails with {type(error).__name__}"
    if reason is not None:
        model.set_attn_implementation(before)
    return reason


def _why_not(model: PreTrainedModel) -> str | None:
    """Set ``BY_DOCUMENT`` and say why masks have to stay."""
    device = next(model.parameters()).device
    tokens: dict[str, Any] = {"input_ids": torch.arange(16, device=device).view(2, 8) % 4, "use_cache": False}
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 1, 2]], device=device)
    lengths = {"document_lengths": ((3, 5), (5, 3))}
    by_masks = None if device.type == "meta" else model(**tokens, position_ids=positions).logits
    model.set_attn_implementation(BY_DOCUMENT)
    with _watched() as calls:
        model(**tokens, **lengths, attention_mask=torch.ones_like(tokens["input_ids"]))
    if reason := calls.why_not():
        return reason
    if by_masks is None:
        return None
    return None if agree(model(**tokens, **lengths, position_ids=positions).logits, by_masks) else OTHER_LOGITS


def agree(logits: Tensor, expected: Tensor) -> bool:
    """Tell whether logits are the ``expected`` ones, but for rounding."""
    tolerance = max(TOLERANCE, ROUNDINGS * torch.finfo(expected.dtype).eps)
    return bool((logits - expected).abs().max() <= tolerance * expected.abs().max())


@dataclass
class _Calls:
    """The arguments that a model gives to its attention and to its masks."""

    attention: list[dict[str, Any]] = field(default_factory=list)
    masks: list[dict[str, Any]] = field(default_factory=list)

    def why_not(self) -> str | None:
        """Say why they are more than ``attention_by_document`` takes."""
        if not self.attention:
            return "its attention is its own"
        if any("document_lengths" not in call for call in self.attention):
            return "it hands no arguments on to its attention"
        if not all(call["is_causal"] for call in self.attention):
            return "its attention is not causal"
        given = {name for call in self.attention for name, value in call.items() if value is not None}
        if unknown := sorted(given - TAKEN - WITHOUT_EFFECT - {"is_causal"}):
            return f"its attention takes {', '.join(unknown)}"
        windows = {call.get("sliding_window") for call in self.attention}
        of_masks = {call.get("local_size") for call in self.masks}  # also of kinds of layers that are not there
        if any(call.get("use_vmap") for call in self.masks) or not of_masks - {None} <= windows <= of_masks:
            return "its masks are its own"
        return None


@contextmanager
def _watched() -> Iterator[_Calls]:
    """Note, inside, the arguments of attention by document and of the masks that it does without."""
    calls = _Calls()

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, None]:
        given = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if given is None else given
        calls.attention.append({**options, "is_causal": bool(is_causal)})
        if query.is_meta:
            return query.new_empty((*query.transpose(1, 2).shape[:3], value.shape[-1])), None
        return attention_by_document(module, query, key, value, *args, **options)

    def mask(**options: Any) -> None:
        calls.masks.append(options)

    AttentionInterface.register(BY_DOCUMENT, attention)
    AttentionMaskInterface.register(BY_DOCUMENT, mask)
    try:
        yield calls
    finally:
        AttentionInterface.register(BY_DOCUMENT, attention_by_document)
        AttentionMaskInterface._global_mapping.pop(BY_DOCUMENT)
