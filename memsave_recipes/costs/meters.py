"""Read a step at its boundaries: the bytes that live there, the most that lived since the boundary before, the time.

A *boundary* is a place in a step that its caller names by calling ``note()`` there. Where the bytes come from depends
on the device: an allocator that keeps statistics is asked at every boundary; on a CPU, whose allocator keeps none,
torch's profiler tells afterwards.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Protocol

import torch

from memsave_recipes.measure.allocations import Allocation, Event, Labels, Use, record_allocations


@dataclass(frozen=True)
class Reading:
    """Bytes at a boundary, above those at the first one.

    ``peak_bytes`` is the most between the boundary before and this one, ``seconds`` the time since that one, where the
    run that gives the bytes gives the time as well.
    """

    live_bytes: int
    peak_bytes: int
    seconds: float | None = None


class Meter(Protocol):
    """What a step is read with."""

    def note(self) -> None:
        """A boundary is here."""


class Instruments(Protocol):
    """What reads a step; the step gets a meter, and each reading is of the boundaries that it notes."""

    @property
    def repetitions(self) -> int:
        """How often a clock has to be read for its readings to mean something; 0 where the readings of memory have
        the seconds, and nothing has to warm up."""

    def read_memory(self, step: Callable[[Meter], None]) -> list[Reading]:
        """A reading for each boundary; bytes are counted from where the step begins."""

    def read_clock(self, step: Callable[[Meter], None]) -> list[float]:
        """Seconds between the boundaries, one fewer than there are."""


@dataclass(frozen=True)
class DeviceInstruments:
    """Readings of steps that run on a device."""

    device: torch.device
    repetitions: int = 5

    def read_memory(self, step: Callable[[Meter], None]) -> list[Reading]:
        """From the allocator's statistics, or, on a CPU, from torch's profiler."""
        return _read_profile(step) if self.device.type == "cpu" else _read_allocator(step, self.device)

    def read_clock(self, step: Callable[[Meter], None]) -> list[float]:
        """By the host's clock on a CPU; elsewhere by events in the device's own stream."""
        clock = _HostClock() if self.device.type == "cpu" else _DeviceClock(self.device)
        step(clock)
        return clock.intervals_s()


class _HostClock:
    def __init__(self) -> None:
        self.times: list[float] = []

    def note(self) -> None:
        self.times.append(perf_counter())

    def intervals_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]


class _DeviceClock:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: list[torch.Event] = []

    def note(self) -> None:
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        self.events.append(event)

    def intervals_s(self) -> list[float]:
        torch.accelerator.synchronize(self.device)
        return [earlier.elapsed_time(later) / 1000 for earlier, later in pairwise(self.events)]


class _LabelMeter:
    """Boundaries as labels of nothing, which stand among the allocations of the profile."""

    def __init__(self) -> None:
        self.labels = Labels()

    def note(self) -> None:
        self.labels.note(Use.TEMPORARIES, ())


def _read_profile(step: Callable[[Meter], None]) -> list[Reading]:
    meter = _LabelMeter()
    _, events = record_allocations(lambda: step(meter), meter.labels)
    return list(_readings(events))


def _readings(events: list[Event]) -> Iterator[Reading]:
    live = peak = 0
    for event in events:
        if not isinstance(event, Allocation):
            yield Reading(live, peak)
            peak = live
        elif event.device.type == "cpu":
            live += event.num_bytes
            peak = max(peak, live)


class _AllocatorMeter:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin_bytes = torch.accelerator.memory_allocated(device)
        self.readings: list[Reading] = []
        torch.accelerator.reset_peak_memory_stats(device)

    def note(self) -> None:
        live = torch.accelerator.memory_allocated(self.device) - self.begin_bytes
        peak = torch.accelerator.max_memory_allocated(self.device) - self.begin_bytes
        self.readings.append(Reading(live, peak))
        torch.accelerator.reset_peak_memory_stats(self.device)


def _read_allocator(step: Callable[[Meter], None], device: torch.device) -> list[Reading]:
    meter = _AllocatorMeter(device)
    step(meter)
    return meter.readings
