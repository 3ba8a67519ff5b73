"""The device that a step is planned for, which need not be here: its rates, its memory, its allocator.

Rates are the vendors' own, from ``core/costs/cards.json``. So a time made of them is a bound: the shortest that the
device could take. A ``calibrated`` target has the shares of them that kernels reach, as ``about_calibrated`` there
says: its times are what to expect.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import inf
from time import perf_counter
from typing import Any

import torch

from memsave_recipes.core.costs.memory import read_device_use
from memsave_recipes.core.costs.throughput import CARDS, CONVOLUTIONS, PEAK_TFLOPS, TABLES
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.plans.chain import CPU, CUDA
from memsave_recipes.core.text import GIB, MIB

MAX_MEMORY_GIB = 100_000
GENERIC = "a100-80gb"
"""The target ``cuda`` where there is no CUDA device."""

NO_DEVICE = "no CUDA device is here: an A100 with 80 GB stands for one"
CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
REPETITIONS, ENOUGH_S = 5, 0.2  # of a rate that is measured
COPIED_BYTES = 32 * MIB

KERNEL_S = 3e-6
"""The least time of a CUDA kernel with the gap before the next one: an assumption, of the order that is measured for
kernels that do nothing."""

HOST_MEMORY_BYTES_PER_S = 100e9
"""Of the memory of a host that is not here, in which optimizers step: an assumption, of the order of a few channels."""
UPDATED_NUMBERS = 2**24
ADAMW_BYTES = 28
"""Read and written for each of them: weight, gradient and two moments, of which all but the gradient change."""

WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * 1024
HOPPER_WORKSPACE_BYTES = 32 * MIB
"""cuBLAS takes it from torch's allocator with the first product, for good: ``:4096:2:16:8`` of its documentation, and
32 MiB from Hopper on (aten/src/ATen/cuda/CublasHandlePool.cpp)."""

CONTEXT_BYTES = 500 * MIB
"""Held by the driver for a process with torch's kernels, not counted by torch: an assumption; 300 to 700 MiB are usual,
and the driver's version decides."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of a card's rates that kernels reach there.

    Args:
        gemm_by_width: of the peak, by the smallest side of a matrix product, as (width, share), narrow ones first.
        attention_forward_by_length, attention_backward_by_length: likewise by the length of a row, of scores that all
            count, as ``FORMULAS`` have it for causal attention too.
        memory: of the memory's rate.
        kernel_s: the least time of any kernel.
        run: that they come from.
    """

    gemm_by_width: Sequence[tuple[float, float]]
    attention_forward_by_length: Sequence[tuple[float, float]]
    attention_backward_by_length: Sequence[tuple[float, float]]
    memory: float
    kernel_s: float
    run: str

    def of_peak(self, operation: Any, extent: float) -> float:
        """Return the share of the peak of an operator with factors of this width, or rows of this length."""
        name = str(operation)
        if "att" not in name:
            return _interpolated(self.gemm_by_width, extent)
        backward = "backward" in name
        return _interpolated(
            self.attention_backward_by_length if backward else self.attention_forward_by_length, extent
        )


CALIBRATED = {word: Shares(**shares) for word, shares in TABLES["calibrated"].items()}
"""By the word of a card that was measured; the first one's are taken for cards that were not."""


def _interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value of a piecewise linear function, constant beyond its first and last point."""
    low, from_value = max((point for point in points if point[0] <= at), default=points[0])
    high, to_value = min((point for point in points if point[0] >= at), default=points[-1])
    return from_value if high <= low else from_value + (to_value - from_value) * (at - low) / (high - low)


@dataclass(frozen=True)
class Host:
    """What a rank's host has for tensors that leave the device.

    Args:
        budget_bytes: of memory; ``None`` where it is not known.
        bytes_per_s: between the device and the host, one way.
        memory_bytes_per_s: that the host reads and writes.
    """

    budget_bytes: int | None = None
    bytes_per_s: float = inf
    memory_bytes_per_s: float = inf

    def holds(self, num_bytes: int) -> bool:
        """Return whether the host has memory for so much; assumed where it is not known."""
        return self.budget_bytes is None or num_bytes <= self.budget_bytes


UNKNOWN_HOST = Host()


@dataclass(frozen=True, kw_only=True)
class Target:
    """The properties of a device that an estimate needs.

    Args:
        word: as ``--target`` names it.
        name: as ``torch.cuda.get_device_name`` calls it.
        device: of its type; nothing can be put on it.
        flops_per_s: by precision, as ``peak_flops`` names them; one that is missing is not in the vendor's tables.
        bytes_per_s: of its memory.
        host_bytes_per_s: between it and the host's memory, one way.
        host_memory_bytes_per_s: that its host reads and writes.
        kernel_s: the least time of any kernel.
        context_bytes: held by the driver besides torch's memory.
        cublas_workspace_bytes: allocated by the first matrix product, for good.
        has_flash_attention: whether torch's flash kernel runs on it: from Ampere on.
        has_varlen_attention: whether attention by document takes all documents in one call: NVIDIA's of these.
        remark: how it was found, where the word does not tell.
        shares: of the peak, where the other rates are ``calibrated``.
    """

    word: str
    name: str
    device: torch.device
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    host_bytes_per_s: float
    memory_bytes: int
    host_memory_bytes_per_s: float = HOST_MEMORY_BYTES_PER_S
    kernel_s: float = 0.0
    context_bytes: int = 0
    cublas_workspace_bytes: int = 0
    has_flash_attention: bool = True
    has_varlen_attention: bool = False
    remark: str = ""
    shares: Shares | None = None

    @property
    def calibrated(self) -> "Target":
        """The same with the rates that kernels reach; of a CPU, whose rates are measured, itself."""
        if self.device.type == "cpu":
            return self
        shares = CALIBRATED.get(self.word) or next(iter(CALIBRATED.values()))
        return replace(self, bytes_per_s=shares.memory * self.bytes_per_s, kernel_s=shares.kernel_s, shares=shares)

    @property
    def half(self) -> str:
        """The dtype of 16 bits that it computes in: that of ``--dtype auto``."""
        return "bfloat16" if "bfloat16" in self.flops_per_s else "float16"

    def seconds(self, operation: Any, dtype: torch.dtype, flops: float, num_bytes: int, extent: float = 0.0) -> float:
        """Return the time of an operator by the roofline; a precision that is in no table computes as float32 does.

        Args:
            extent: the smallest side of a product, or the length of the rows of attention.
        """
        precision = str(dtype).removeprefix("torch.")
        if operation in CONVOLUTIONS and dtype == torch.float32 and "tf32" in self.flops_per_s:
            precision = "tf32"
        flops_per_s = self.flops_per_s.get(precision, self.flops_per_s["float32"])
        if self.shares is not None:
            flops_per_s *= self.shares.of_peak(operation, extent)
        return max(flops / flops_per_s, num_bytes / self.bytes_per_s, self.kernel_s)


ALIASES = {"a100": "a100-80gb", "a100-40g": "a100-40gb", "v100-32gb": "v100"}


def find_target(word: str) -> Target:
    """Return the target that ``--target`` names.

    Args:
        word: ``cpu`` (this one; its rates are measured, which takes about a second), ``cuda`` (the device that is
            here; where there is none, an A100 with 80 GB, and ``remark`` says so), or a device such as ``h100``.

    Raises:
        InputError: no such word, or a CUDA device is here that is in no table; the message names the words.
    """
    if word.lower() == "cpu":
        return _this_cpu()
    if word.lower() == "cuda":
        return _this_device() if torch.cuda.is_available() else replace(_from_card(GENERIC), remark=NO_DEVICE)
    spellings = {_plain(known): known for known in CARDS} | {_plain(word): known for word, known in ALIASES.items()}
    plain = _plain(word)
    known = spellings.get(plain) or spellings.get(f"rtx{plain}")
    if known is None:
        close = ", ".join(spellings[name] for name in get_close_matches(plain, spellings, n=3))
        meant = f" (did you mean {close}?)" if close else ""
        raise InputError(
            f"target {word}: no figures of such a device{meant}; give the size of its memory alone (target_memory), or "
            f"name one of {', '.join(known_targets())}"
        )
    return _from_card(known)


def target_of(word: str | None, memory_gib: float | None) -> Target:
    """Return the device ``word``, with so much memory where that is given.

    Args:
        word: as ``find_target``. ``None``: where ``memory_gib`` is given any GPU, at the rates of an A100; else this
            machine's device.

    Raises:
        InputError: as ``find_target``, or not a size.
    """
    if memory_gib is None:
        return find_target(word or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not 0 < memory_gib < MAX_MEMORY_GIB:
        raise InputError(f"target_memory_gib {memory_gib}: must be above 0 and below {MAX_MEMORY_GIB:,}")
    memory_bytes = int(memory_gib * GIB)
    if word is None:
        name = f"GPU with {memory_gib:g} GiB"
        return replace(_from_card(GENERIC), name=name, memory_bytes=memory_bytes, remark="at the rates of an A100")
    return replace(find_target(word), memory_bytes=memory_bytes, remark=f"with {memory_gib:g} GiB of memory")


def host_rate(device: torch.device) -> float:
    """Return the bytes a second between ``device`` and its host: the vendor's, or measured where its card is not known.

    Nothing is copied for a CPU.
    """
    if device.type == "cpu":
        return inf
    with suppress(InputError):
        return find_target(device.type).host_bytes_per_s
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize(device)

    return COPIED_BYTES / _shortest_s(copy)


def host_memory_rate() -> float:
    """Return the bytes a second that this host reads and writes where torch's fused AdamW steps."""
    weight = torch.zeros(UPDATED_NUMBERS)
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return ADAMW_BYTES * UPDATED_NUMBERS / _shortest_s(optimizer.step)


def _plain(word: str) -> str:
    """Leave out the maker's name, blanks and hyphens: ``NVIDIA RTX 3060 Ti`` is ``rtx3060ti``."""
    return re.sub(r"nvidia|geforce|tesla|amd|instinct|radeon|[ _-]", "", word.lower())


def known_targets() -> list[str]:
    """List the words that ``find_target`` knows."""
    return ["cpu", "cuda", *CARDS]


def _from_card(word: str) -> Target:
    card = CARDS[word]
    flops = {precision: tflops * 1e12 for precision, tflops in card.tflops.items()}
    is_hopper = any(family in card.name for family in ("H100", "H200", "B200"))
    has_flash_attention = any(name in flops for name in ("bfloat16", "tf32"))
    return Target(
        word=word,
        name=card.name,
        device=CUDA,
        flops_per_s=flops,
        bytes_per_s=card.memory_gb_per_s * 1e9,
        host_bytes_per_s=card.host_gb_per_s * 1e9,
        memory_bytes=int(card.memory_gib * GIB),
        kernel_s=KERNEL_S,
        has_flash_attention=has_flash_attention,
        has_varlen_attention=has_flash_attention and not card.name.startswith("AMD"),
        context_bytes=CONTEXT_BYTES,
        cublas_workspace_bytes=HOPPER_WORKSPACE_BYTES if is_hopper else WORKSPACE_BYTES,
    )


def _this_device() -> Target:
    """Return the current CUDA device, with its own memory in place of the card's."""
    name, memory_bytes = torch.cuda.get_device_name(), torch.cuda.get_device_properties().total_memory
    patterns = [pattern for pattern in PEAK_TFLOPS if re.fullmatch(pattern, name)]
    alike = [word for word, card in CARDS.items() if any(re.fullmatch(one, card.name) for one in patterns)]
    if not alike:
        raise InputError(
            f"target cuda: no figures of the {name} that is here; name one of {', '.join(known_targets())}"
        )
    word = min(alike, key=lambda word: abs(CARDS[word].memory_gib * GIB - memory_bytes))
    return replace(_from_card(word), name=name, memory_bytes=memory_bytes, remark="the device that is here")


def _this_cpu() -> Target:
    """Measure a product, a copy and operators that do nothing, the best of a few."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return Target(
        word="cpu",
        name="this CPU",
        device=CPU,
        flops_per_s={str(dtype).removeprefix("torch."): _product_rate(dtype) for dtype in CPU_DTYPES},
        bytes_per_s=2 * COPIED_BYTES / _shortest_s(lambda: target.copy_(source)),
        host_bytes_per_s=inf,
        memory_bytes=read_device_use(target.device).total_bytes,
        kernel_s=_operator_s(),
        remark=f"measured here, torch.get_num_threads() being {torch.get_num_threads()}",
    )


def _product_rate(dtype: torch.dtype, width: int = 512) -> float:
    factor = torch.ones(width, width, dtype=dtype)
    return 2 * width**3 / _shortest_s(lambda: factor @ factor)


def _operator_s(count: int = 200) -> float:
    """Time an operator that has nothing to compute, with autograd and its backward."""

    def chain() -> None:
        value = torch.ones(1, requires_grad=True)
        for _ in range(count):
            value = value * 1.0
        value.backward()

    return _shortest_s(chain) / (2 * count)


def _shortest_s(run: Callable[[], object]) -> float:
    """Return the best of ``REPETITIONS``, or of those that ``ENOUGH_S`` hold, after one that warms up."""
    run()
    seconds: list[float] = []
    while len(seconds) < REPETITIONS and sum(seconds) < ENOUGH_S:
        begin = perf_counter()
        run()
        seconds.append(perf_counter() - begin)
    return min(seconds)
