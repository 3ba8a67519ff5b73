"""Methods take turns on one work: who may take part, what each needs, and how long it takes beside plain.

NOTE [ how it is measured ]
1. A method takes part when its first forward and backward leave plain's gradients: bit for bit where nothing is
   compiled and the loss is the same, else within ``TOLERANCE``. Where plain does not repeat its own bits (some kernels
   of accelerators add in any order), all are held to the tolerance.
2. Memory is the exact peak of one forward and backward above what is resident: parameters, buffers, the batch. On a CPU
   torch's profiler tells every allocation, elsewhere it is the allocator's ``max_memory_allocated``. The *activation
   peak* is that less the gradients of all parameters, which are there at the end whatever the method.
3. Time is that of a forward and backward. Methods take turns in an order drawn anew each round, plain first and again
   after every ``TURNS_BETWEEN_PLAIN`` others. A method's time against plain is the median over rounds of its seconds by
   the median of plain's in the same round.
4. Noise is how far plain's own turns lie from their round's median: twice the median distance, and at least
   ``LEAST_NOISE``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any

import harness
import torch
from models import Work
from torch import Tensor
from tqdm import tqdm

from memory_time.methods import PLAIN, PLAIN_CHUNKED, Forward, Method

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
TURNS_BETWEEN_PLAIN = 8
LEAST_NOISE = 0.01
MOST_COMPILING_S = 180
SMALL = 1e-3  # of the norm of all gradients: what a parameter's own gradient is not judged below


@dataclass(kw_only=True)
class Entry:
    """A method with what it showed; without ``forward`` it does not take part, and ``reason`` says why."""

    method: Method
    forward: Forward | None = None
    reason: str = ""
    note: str = ""
    first_s: float = 0.0
    gradient_difference: float = 0.0
    is_bitwise: bool = False
    peak_bytes: int = 0
    activation_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


class Bench:
    """Admits methods, plain's first, and then times them all."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.entries: list[Entry] = []
        self.noise = LEAST_NOISE
        self._buffers = [buffer.clone() for buffer in work.model.buffers()]
        self._expected: dict[str, tuple[list[Tensor], list[Tensor]]] = {}  # by loss: gradients and buffers of plain
        self._differences: dict[str, float] = {}  # by loss: of plain's gradients from those of the full loss
        self._repeats = True  # whether plain gives the same bits twice

    def admit(self, methods: Iterable[Method]) -> list[Entry]:
        """An entry for each; see rules 1 and 2."""
        begin = len(self.entries)
        for method in methods:
            entry = Entry(method=method)
            self.entries.append(entry)
            try:
                self._admit(entry)
            except Exception as error:  # whatever a method dislikes here is what its row says
                entry.reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            if entry.reason:
                entry.forward = None
            self._tidy()
        return self.entries[begin:]

    def _admit(self, entry: Entry) -> None:
        slow = max((e.first_s for e in self.entries if e.method.series == entry.method.series), default=0)
        if slow > MOST_COMPILING_S:
            entry.reason = f"left out: the first of its kind took {slow:.0f} s until its first step was done"
            return
        began = perf_counter()
        entry.forward = entry.method.build()
        self._check(entry)
        entry.first_s = perf_counter() - began
        if not entry.reason:
            self._read_memory(entry)

    def _check(self, entry: Entry) -> None:
        found = self._gradients_and_buffers(entry)
        loss = entry.method.loss
        if entry.method.series in (PLAIN, PLAIN_CHUNKED):
            self._expected[loss] = found
            again = self._gradients_and_buffers(entry)
            self._repeats &= _are_equal(found[0], again[0])
            self._differences[loss] = _difference(found[0], self._expected["full"][0])
        gradients, buffers = self._expected[loss]
        entry.is_bitwise = _are_equal(found[0], gradients)
        entry.gradient_difference = (
            self._differences[loss] if entry.is_bitwise else _difference(found[0], self._expected["full"][0])
        )
        if not _are_equal(found[1], buffers):
            entry.note = "BatchNorm counts its batch twice"
        tolerance = TOLERANCE[gradients[0].dtype]
        if entry.gradient_difference > tolerance:
            entry.reason = f"gradients are {entry.gradient_difference:.1g} away from plain's"
        elif self._repeats and not entry.is_bitwise and not entry.method.is_compiled:
            entry.reason = f"gradients are not plain's bit for bit: {entry.gradient_difference:.1g} away"

    def _gradients_and_buffers(self, entry: Entry) -> tuple[list[Tensor], list[Tensor]]:
        """What one step leaves, on the host."""
        self.work.clear_gradients()
        with torch.no_grad():
            for buffer, before in zip(self.work.model.buffers(), self._buffers, strict=True):
                buffer.copy_(before)
        self._step(entry)
        gradients = [parameter.grad.cpu() for parameter in self.work.model.parameters() if parameter.grad is not None]
        buffers = [buffer.to("cpu", copy=True) for buffer in self.work.model.buffers()]
        self.work.clear_gradients()
        return gradients, buffers

    def _read_memory(self, entry: Entry) -> None:
        self._tidy()
        entry.peak_bytes = harness.peak_bytes(partial(self._step, entry), self.work.device)
        gradients = [parameter.grad for parameter in self.work.model.parameters() if parameter.grad is not None]
        entry.activation_bytes = entry.peak_bytes - sum(gradient.nbytes for gradient in gradients)

    def _step(self, entry: Entry) -> None:
        assert entry.forward is not None
        entry.forward().backward()

    def _tidy(self) -> None:
        self.work.clear_gradients()
        harness.empty_device()

    def take_turns(self, rounds: int) -> None:
        """See rules 3 and 4."""
        running = [entry for entry in self.entries if entry.forward]
        plain, others = running[0], running[1:]
        distances: list[float] = []
        order = harness.turns(others, rounds)
        with tqdm(total=rounds * len(running), desc=self.work.name, unit="turn") as progress:
            for _ in range(rounds):
                plain_s = [self._seconds(plain)]
                for turn, entry in enumerate(islice(order, len(others))):
                    if turn % TURNS_BETWEEN_PLAIN == TURNS_BETWEEN_PLAIN - 1:
                        plain_s.append(self._seconds(plain))
                    entry.seconds.append(self._seconds(entry))
                    progress.update()
                usual = median(plain_s)
                plain.seconds.append(usual)
                progress.update()
                distances += [abs(seconds / usual - 1) for seconds in plain_s]
                for entry in running:
                    entry.ratios.append(entry.seconds[-1] / usual)
        self.noise = max(LEAST_NOISE, 2 * median(distances))

    def _seconds(self, entry: Entry) -> float:
        """Of a forward and backward, on a device that is at rest before and after."""
        self.work.clear_gradients()
        return harness.seconds_of(partial(self._step, entry))

    def rows(self) -> list[dict[str, Any]]:
        """The entries as the JSON file holds them, plain's first."""
        plain = self.entries[0]
        return [_row(entry, plain) for entry in self.entries]


def _row(entry: Entry, plain: Entry) -> dict[str, Any]:
    method = entry.method
    row: dict[str, Any] = {"series": method.series, "method": method.name, "loss": method.loss}
    if not entry.forward:
        return {**row, "reason": entry.reason}
    return {
        **row,
        "peak_bytes": entry.peak_bytes,
        "activation_bytes": entry.activation_bytes,
        "share": entry.activation_bytes / plain.activation_bytes,
        "time_ratio": median(entry.ratios),
        "seconds": entry.seconds,
        "ratios": entry.ratios,
        "is_bitwise": entry.is_bitwise,
        "gradient_difference": entry.gradient_difference,
        "first_s": entry.first_s,
        "note": entry.note,
        "budget_bytes": method.budget_bytes,
        "plan": method.plan.describe() if method.plan else None,
    }


def _are_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest of a parameter's, against its norm; tiny gradients, which are rounding alone, count less."""
    if len(found) != len(expected):
        return float("inf")
    floor = SMALL * sum(gradient.double().norm().item() ** 2 for gradient in expected) ** 0.5
    pairs = zip(found, expected, strict=True)
    differences = [((own - other).double().norm() / (other.double().norm() + floor)).item() for own, other in pairs]
    return float("inf") if any(d != d for d in differences) else max(differences)
