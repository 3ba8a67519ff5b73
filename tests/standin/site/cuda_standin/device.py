"""What ``torch.cuda`` has in Python alone, on the devices of the library."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

NUM_DEVICES = int(os.environ.get("STANDIN_DEVICES") or 1)
TOTAL_BYTES = int(float(os.environ.get("STANDIN_GIB") or 8) * 2**30)
CAPABILITY = tuple(map(int, (os.environ.get("STANDIN_CAPABILITY") or "9.0").split(".")))
NAME = os.environ.get("STANDIN_NAME") or "a stand-in for CUDA"
PROPERTIES = SimpleNamespace(
    name=NAME,
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=TOTAL_BYTES,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448,
    warp_size=32,
    L2_cache_size=50 * 2**20,
    is_integrated=0,
    gcnArchName="",
    uuid="standin",
)


class Stream(torch.Stream):
    """``torch.cuda.Stream``, whose base a build without CUDA lacks."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> "Stream":
        if "stream_id" in ids:
            return torch.Stream.__new__(cls, **ids)
        return torch.Stream.__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    """``torch.cuda.Event``, likewise."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
        return torch.Event.__new__(cls, device="cuda", enable_timing=enable_timing)


def _index(device: Any = None) -> int:
    index = device if isinstance(device, int | None) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _set_device(device: Any) -> None:
    if _index(device) >= NUM_DEVICES:
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    torch._C._cuda_setDevice(_index(device))


@contextlib.contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    with stream or contextlib.nullcontext():
        yield


def _current_stream(device: Any = None) -> Stream:
    stream = torch.accelerator.current_stream(torch.device("cuda", _index(device)))
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def _default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=_current_stream().device_type)


def _functions_of_c(library: ctypes.CDLL) -> dict[str, Any]:
    """The functions of ``torch._C`` that ``torch.cuda`` calls; a build without CUDA has none of them."""

    def exchange(index: int) -> int:
        return int(library.standin_exchange_device(index))

    return {
        "_cuda_init": lambda: None,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getDeviceCount": lambda: NUM_DEVICES,
        "_cuda_getDevice": lambda: int(library.standin_current_device()),
        "_cuda_setDevice": exchange,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_getDeviceProperties": lambda index: PROPERTIES,
        "_cuda_getArchFlags": lambda: f"sm_{CAPABILITY[0]}{CAPABILITY[1]}",
        "_cuda_synchronize": lambda: torch.accelerator.synchronize(),
        "_cuda_emptyCache": torch._C._accelerator_emptyCache,
        "_cuda_memoryStats": torch._C._accelerator_getDeviceStats,
        "_cuda_resetPeakMemoryStats": torch._C._accelerator_resetPeakStats,
        "_cuda_resetAccumulatedMemoryStats": lambda index: None,
        "_cuda_get_sync_debug_mode": lambda: int(library.standin_sync_debug_mode()),
        "_cuda_set_sync_debug_mode": lambda mode: library.standin_set_sync_debug_mode(mode),
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getCurrentRawStream": lambda index: 0,
        "_accelerator_emptyHostCache": lambda: None,
        "_cuda_record_memory_history": lambda *options: None,
    }


def install(library: ctypes.CDLL) -> None:
    """Make ``torch.cuda`` see the devices."""
    cuda = torch.cuda
    for name, function in _functions_of_c(library).items():
        setattr(torch._C, name, function)
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = lambda: True
    # Two functions, as dynamo has a handler for each.
    cuda._exchange_device = lambda index: torch._C._cuda_exchangeDevice(index)
    cuda._maybe_exchange_device = lambda index: torch._C._cuda_maybeExchangeDevice(index)
    cuda._initialized, cuda._lazy_init = True, lambda: None
    cuda.memory._lazy_init = cuda.random._lazy_init = cuda._lazy_init
    cuda._lazy_call = cuda.random._lazy_call = lambda call, **_: call()
    cuda.is_available, cuda.device_count, cuda.set_device = lambda: True, lambda: NUM_DEVICES, _set_device
    cuda.random.device_count = cuda.device_count
    cuda._is_compiled = lambda: False  # for dynamo, which would take it for a CUDA of its own
    cuda.is_bf16_supported = lambda including_emulation=True: including_emulation or CAPABILITY >= (8, 0)
    cuda.get_device_properties = cuda._get_device_properties = lambda device=None: PROPERTIES
    cuda.get_device_name, cuda.get_device_capability = lambda device=None: NAME, lambda device=None: CAPABILITY
    cuda.mem_get_info = cuda.memory.mem_get_info = lambda device=None: torch.accelerator.get_memory_info(_index(device))
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.stream, cuda.set_stream = _stream, torch.accelerator.set_stream
    cuda.current_stream, cuda.default_stream = _current_stream, _default_stream
    cuda.default_generators = tuple(torch.ops.standin.default_generator(index) for index in range(NUM_DEVICES))
    cuda.memory._record_memory_history = lambda *_, **__: None
    cuda.memory._dump_snapshot = lambda filename="dump_snapshot.pickle": Path(filename).write_bytes(b"stand-in")
