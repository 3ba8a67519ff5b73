"""Offloading on paper: the mover of ``activations/offload.py`` with copies that only take time.

They travel one after the other at the rate of the link to the host, beside the operators; who waits for one sets the
clock forward to its end. So rises and added seconds of a block that offloads come from the code that a device runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memsave_recipes.activations.offload import Mover
from memsave_recipes.activations.spans import RUN
from memsave_recipes.costs.paper import PaperClock
from memsave_recipes.costs.targets import Target
from memsave_recipes.plans import Action


@contextmanager
def offloading_on_paper(target: Target, clock: PaperClock) -> Iterator[None]:
    """Blocks under ``OFFLOAD`` move what they save to the host of a CUDA target; on a CPU they keep it, as ever."""
    if target.device_type == "cpu":
        yield
        return
    before = RUN[Action.OFFLOAD]
    RUN[Action.OFFLOAD] = Mover(torch.device("cpu"), PaperCopies(clock, target.host_bytes_per_s)).run
    try:
        yield
    finally:
        RUN[Action.OFFLOAD] = before


@dataclass
class PaperCopies:
    """``Copies`` that take the time of the link; the event that ``wait`` takes is the second at which they end."""

    clock: PaperClock
    bytes_per_s: float
    busy_until: float = 0.0

    def empty_on_host(self, num_bytes: int) -> Any:
        """Host memory, which nobody counts: all that is asked of it is its length."""
        return range(num_bytes)

    def start(self, pairs: list[tuple[Tensor, Tensor]]) -> float:
        """After the copies before them, and what was computed so far."""
        num_bytes = sum(len(target) for target, _ in pairs)
        self.busy_until = max(self.busy_until, self.clock.now) + num_bytes / self.bytes_per_s
        return self.busy_until

    def wait(self, event: float) -> None:
        """The computation goes on when they are done."""
        self.clock.now = max(self.clock.now, event)
