"""Offloading on a CPU: copies that happen late, or to memory that torch does not count."""

import threading
import weakref
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch

from memsave_recipes.core.activations.offload import OffloadEngine
from memsave_recipes.core.activations.spans import RUN
from memsave_recipes.core.costs import step_trace
from memsave_recipes.core.plans import Action


@contextmanager
def moving_everything(copies):
    """Inside, blocks that offload move storages of any size by ``copies``, and are predicted to."""
    engine = OffloadEngine(torch.device("cpu"), copies, smallest_bytes=1)
    with patch.dict(RUN, {Action.OFFLOAD: engine.run}), patch.object(step_trace, "SMALLEST_BYTES", 1):
        yield


class LateCopies:
    """Copies that happen only when somebody waits for them, from and to memory that must still be held by then.

    Fresh host memory and fresh targets are filled with NaN, so that reading before the wait shows.
    """

    def __init__(self):
        self.pending = {}
        self.log = []  # "out" or "back", with the bytes
        self.host = []
        self.sent = []  # weak references to the storages that left

    def empty_on_host(self, num_bytes):
        memory = torch.full((num_bytes,), 255, dtype=torch.uint8)
        self.host.append(weakref.ref(memory))
        return memory

    @property
    def held(self):
        return [memory for reference in self.host if (memory := reference()) is not None]

    def start(self, pairs):
        event = object()
        out = pairs[0][0].untyped_storage().data_ptr() in {whole.data_ptr() for whole in self.held}
        self.log.append(("out" if out else "back", sum(len(target) for target, _ in pairs)))
        for target, source in pairs:
            target.fill_(255)
            if out:
                self.sent.append(source.untyped_storage()._weak_ref())
        self.pending[event] = [(weakref.ref(target), weakref.ref(source)) for target, source in pairs]
        return event

    def wait(self, event):
        for target, source in self.pending.pop(event):
            assert target() is not None
            assert source() is not None
            target().copy_(source())

    @property
    def bytes_out(self):
        return sum(size for way, size in self.log if way == "out")

    @property
    def bytes_back(self):
        return sum(size for way, size in self.log if way == "back")


class HostCopies:
    """Copies to memory that torch's allocator knows nothing of, as a host's is to a device's."""

    def empty_on_host(self, num_bytes):
        return torch.from_numpy(np.empty(num_bytes, dtype=np.uint8))

    def start(self, pairs):
        for target, source in pairs:
            target.copy_(source)

    def wait(self, event):
        pass


class CopiesInOrder:
    """Copies that are made, one after the other, when somebody waits for one, into memory that holds NaN until then."""

    def __init__(self):
        self.under_way, self.lock = [], threading.Lock()

    def empty_on_host(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def start(self, pairs):
        for target, _ in pairs:
            target.fill_(float("nan") if target.is_floating_point() else 255)
        self.under_way.append(pairs)
        return _EndOfCopies(self, len(self.under_way))

    def wait(self, event):
        event.synchronize()


class _EndOfCopies:
    """The end of the copies that were started so far."""

    def __init__(self, copies, number):
        self.copies, self.number = copies, number

    def synchronize(self):
        with self.copies.lock:
            for pairs in self.copies.under_way[: self.number]:
                for target, source in pairs:
                    target.copy_(source)
                pairs.clear()


class LateForTheHost(CopiesInOrder):
    """Copies that the host sees only when it has waited by itself, and not when the device has."""

    def wait(self, event):
        pass
